"""What differs on a CPU, against what runs on other devices: the loss, and packed linear layers."""

import copy
import pkgutil

import pytest
import torch
from tiny import RECIPES, tiny_gpt

from model import loss as loss_module
from model.compile import for_training
from model.gpt import GPT
from model.loss import HeadCrossEntropy, cross_entropy_, cross_entropy_on_cpu_
from model.packed import PackedLinear, for_inference
from utils.devices import autocast, has_onednn

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_loss_in_small_chunks_is_that_of_whole_logits(on_cpu, dtype, compiled, monkeypatch):
    torch.manual_seed(0)
    x, weight, targets = torch.randn(100, 32), torch.randn(320, 32), torch.randint(300, (100,))
    targets[::7] = -1
    function = cross_entropy_on_cpu_ if on_cpu else cross_entropy_
    if compiled:
        function = torch.compile(function, fullgraph=True, dynamic=False)
    monkeypatch.setattr(loss_module, "cross_entropy_on_cpu_", function)
    monkeypatch.setattr(loss_module, "SOFTMAX_BYTES_ON_CPU", 4 * 320 * 5)
    results = []
    for chunks in (False, True):
        if chunks:
            monkeypatch.setattr(loss_module, "LOGITS_BYTES_ON_CPU", 4 * 320 * 48)  # 48, 48 and 4
            monkeypatch.setattr(loss_module, "MATMUL_BYTES_ON_CPU", 4 * 32 * 100)
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with autocast(CPU, dtype):
            value = HeadCrossEntropy(300)(*leaves, targets)
        (3 * value).backward()
        results.append([value.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_for_inference_gives_the_logits_of_the_plain_one(recipe, dtype):
    if not has_onednn(dtype):
        pytest.skip(f"oneDNN has no matmuls in {dtype} here")
    plain = tiny_gpt(recipe).eval()
    packed = for_inference(copy.deepcopy(plain), CPU, dtype)
    linear_layers = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    assert len(linear_layers) == 4 * plain.config.n_layer + 1  # and the head
    idx = torch.arange(32).view(2, 16)
    with torch.no_grad(), autocast(CPU, dtype):
        logits, rounded = packed(idx).float(), plain(idx).float()
    exact = plain(idx)
    error, rounding = (logits - exact).norm(), (rounded - exact).norm()
    assert error <= max(1.2 * rounding, 1e-5 * exact.norm())


CHANGES = {  # a line of the model, and the recipe that has it
    "model.layers.LayerNorm": "gpt2",
    "model.layers.RMSNorm": "modern",
    "model.layers.ScaledDotProduct": "gpt2",
    "model.layers.Rotary": "llama",
    "model.gpt.MLP": "gpt2",
}


@pytest.mark.parametrize("module", CHANGES)
def test_a_change_of_the_model_changes_what_trains_and_what_samples(module, monkeypatch):
    def run():
        torch.manual_seed(0)
        model = for_training(GPT(tiny_gpt(CHANGES[module]).config), CPU)
        loss = model(idx, idx)
        return loss, for_inference(model, CPU, torch.float32)(idx)

    idx = torch.arange(32).view(2, 16)
    before = run()
    forward = pkgutil.resolve_name(module).forward
    monkeypatch.setattr(f"{module}.forward", lambda *args: 0.5 * forward(*args))
    for value, changed_value in zip(before, run(), strict=True):
        assert not torch.equal(value, changed_value)


def test_packed_layers_are_for_tensors_on_a_cpu():
    weight = torch.randn(5, 8)
    with pytest.raises(AssertionError, match="not on meta"):
        PackedLinear(weight.to("meta"), None, torch.float32, 1)
    with pytest.raises(AssertionError, match="not on meta"):
        PackedLinear(weight, None, torch.float32, 1)(torch.randn(3, 8, device="meta"))


def test_without_onednn_linear_layers_stay_plain(monkeypatch):
    monkeypatch.setattr("model.packed.has_onednn", lambda dtype: False)
    model = for_inference(tiny_gpt(), CPU, torch.float32)
    assert model.packed_head is None
    assert type(model.transformer.h[0].attn.c_attn) is torch.nn.Linear
