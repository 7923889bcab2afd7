"""What differs on a CPU, against what runs on other devices: the loss, and packed linear layers."""

import copy

import pytest
import torch
from tiny import RECIPES, tiny_gpt

from model import chunked_loss
from model import loss as loss_module
from model.chunked_loss import cross_entropy_
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
    assert len(linear_layers) == 4 * plain.config.n_layer + 1  # and the head
    idx = torch.arange(32).view(2, 16)
    with torch.no_grad(), autocast(CPU, dtype):
        logits, rounded = packed(idx).float(), plain(idx).float()
    exact = plain(idx)
    error, rounding = (logits - exact).norm(), (rounded - exact).norm()
    assert error <= max(1.2 * rounding, 1e-5 * exact.norm())


@pytest.mark.parametrize("device, has_onednn", [("cpu", False), ("cuda", True)])
def test_on_gpus_and_without_onednn_linear_layers_stay_plain(monkeypatch, device, has_onednn):
    monkeypatch.setattr("model.inference.has_onednn", lambda dtype: has_onednn)
    model = prepare_for_inference(tiny_gpt(), torch.device(device), torch.float32)
    assert type(model) is type(tiny_gpt())  # the head, too
    assert isinstance(model.transformer.h[0].attn.c_attn, torch.nn.Linear)
