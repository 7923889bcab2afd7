"""What differs on a CPU, against what runs on other devices: the loss, and packed linear layers."""

import copy

import pytest
import torch
from edited import SoftCapped
from tiny import RECIPES, tiny_gpt

from model import chunked_loss
from model import loss as loss_module
from model.chunked_loss import cross_entropy_
from model.gpt import GPT, FusedLinear
from model.inference import OneDNNLinear, prepare_for_inference
from utils.devices import autocast, has_onednn

CPU = torch.device("cpu")


@pytest.mark.parametrize("chunk_rows", [7, 48])
@pytest.mark.parametrize("dtype, far", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_the_chunked_loss_and_its_gradients_are_those_of_whole_logits(
    variant, dtype, far, chunk_rows, monkeypatch
):
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=300)
    torch.nn.init.normal_(model.head_weight)  # (320, 32), with padding
    x, targets = torch.randn(100, 32), torch.randint(300, (100,))
    targets[::7] = -1
    if variant == "gpu":  # the loss of GPUs takes the place of that of CPUs
        monkeypatch.setattr(chunked_loss, "cross_entropy_by_rows_", cross_entropy_)
    monkeypatch.setattr(chunked_loss, "SOFTMAX_BYTES_ON_CPU", 4 * 320 * 5)
    monkeypatch.setattr(chunked_loss, "MATMUL_BYTES_ON_CPU", 4 * 32 * 100)

    def loss_and_gradients(rows):
        monkeypatch.setattr(loss_module, "PLAIN_BYTES", 4 * 320 * rows)
        monkeypatch.setattr(chunked_loss, "LOGITS_BYTES_ON_CPU", 4 * 320 * rows)
        leaves = [x.clone().requires_grad_(), model.head_weight]
        with autocast(CPU, dtype):
            loss = model.loss(model, leaves[0], targets)
            with torch.no_grad():  # as in validation, which needs no gradients
                validation_loss = model.loss(model, leaves[0], targets)
        gradients = torch.autograd.grad(3 * loss, leaves)
        return [loss.detach(), validation_loss, *gradients]

    whole = loss_and_gradients(1000)  # by F.cross_entropy
    torch.testing.assert_close(loss_and_gradients(chunk_rows), whole, atol=far, rtol=far)


def test_float16_keeps_the_gradient_of_a_mean_over_many_tokens():
    torch.manual_seed(0)
    model = tiny_gpt(vocab_size=64, n_embd=4)
    weight = torch.nn.init.normal_(model.head_weight).detach()
    x = torch.randn(2**17, 4)
    targets = torch.arange(2**17) % 64
    with autocast(CPU, torch.float16):
        model.loss(model, x, targets).backward()
    one_hot = torch.nn.functional.one_hot(targets)
    expected = ((x @ weight.T).softmax(-1) - one_hot).T @ x / 2**17
    assert (model.head_weight.grad - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_for_inference_gives_the_logits_of_the_plain_one(recipe, dtype):
    if not has_onednn(dtype):
        pytest.skip(f"oneDNN has no matmuls in {dtype} here")
    plain = tiny_gpt(recipe).eval()
    packed = prepare_for_inference(copy.deepcopy(plain), CPU, dtype)
    linear_layers = [m for m in packed.modules() if isinstance(m, OneDNNLinear)]
    assert len(linear_layers) == 4 * plain.config.n_layer
    assert "head" in vars(packed)  # hides the method of the class
    idx = torch.arange(32).view(2, 16)
    with torch.no_grad(), autocast(CPU, dtype):
        logits, rounded = packed(idx).float(), plain(idx).float()
    exact = plain(idx)
    error, rounding = (logits - exact).norm(), (rounded - exact).norm()
    assert error <= max(1.2 * rounding, 1e-5 * exact.norm())
    hidden = plain.hidden(idx)
    assert packed.logits(hidden).equal(plain.logits(hidden)) or dtype is torch.float32


@pytest.mark.parametrize("device, has_onednn", [("cpu", False), ("cuda", True)])
def test_on_gpus_and_without_onednn_linear_layers_stay_plain(monkeypatch, device, has_onednn):
    monkeypatch.setattr("model.inference.has_onednn", lambda dtype: has_onednn)
    model = prepare_for_inference(tiny_gpt(), torch.device(device), torch.float32)
    assert type(model) is type(tiny_gpt())  # the head, too
    assert type(model.transformer.h[0].attn.c_attn) is FusedLinear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_weights_of_a_gpu_are_cast_once(recipe, dtype, caplog):
    model = prepare_for_inference(tiny_gpt(recipe), torch.device("cuda"), dtype)
    assert model.transformer.h[0].attn.c_attn.weight.dtype is dtype and not caplog.records
    plain = tiny_gpt(recipe).eval()
    idx = torch.arange(32).view(2, 16)
    with torch.no_grad(), autocast(CPU, dtype):
        assert model(idx).equal(plain(idx))


def test_soft_capped_logits_stay_capped():
    model = prepare_for_inference(SoftCapped(tiny_gpt().config), CPU, torch.float32)
    assert isinstance(model.transformer.h[0].mlp.c_fc, OneDNNLinear)
    torch.nn.init.constant_(model.transformer.ln_f.bias, 100.0)
    logits = model(torch.arange(16)[None])
    assert logits.abs().max() <= 15


class DoubledLinear(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class ReadsWeights(GPT):
    """Reads a weight that inference would put into another layout."""

    def logits(self, x):
        return super().logits(x) + self.transformer.h[0].mlp.c_fc.weight.mean()


def test_only_plain_linear_layers_are_replaced_and_only_if_logits_stay_the_same(caplog):
    model = tiny_gpt()
    model.transformer.h[0].mlp.c_fc = DoubledLinear(32, 128)
    prepare_for_inference(model, CPU, torch.float32)
    assert type(model.transformer.h[0].mlp.c_fc) is DoubledLinear and not caplog.records
    model = prepare_for_inference(ReadsWeights(tiny_gpt().config), CPU, torch.float32)
    assert type(model.transformer.h[0].mlp.c_fc) is FusedLinear and "head" not in vars(model)
    assert "the model with faster linear layers" in caplog.text
