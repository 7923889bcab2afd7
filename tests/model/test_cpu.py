"""Each fast path for CPUs against the plain module that it replaces."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from tiny import RECIPES, tiny_gpt

from model import cpu
from model import packed as packed_layers
from model.gpt import GPT
from model.layers import RMSNorm, ScaledDotProduct
from model.loss import HeadCrossEntropy, cross_entropy_
from model.packed import for_inference
from model.replace import CPU_CLASSES, for_training, swap_classes
from utils import devices
from utils.devices import autocast

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


def results(module, inputs, rest, backend=None):
    """The output of a module, compiled by a backend, and gradients of its inputs and parameters."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    module.zero_grad()
    function = torch.compile(module, fullgraph=True, backend=backend) if backend else module
    y = function(*leaves, *rest)
    y.float().square().sum().backward()
    return [y.detach(), *(x.grad for x in leaves), *(p.grad for p in module.parameters())]


def x4(dtype=torch.float32):
    return torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


ROWS = {  # a plain module, inputs with gradients, inputs without
    "layer norm": lambda dtype: (nn.LayerNorm(16), [x4(dtype)], []),
    "linear": lambda dtype: (nn.Linear(16, 24, dtype=dtype), [x4(dtype)], []),
    "linear without bias": lambda dtype: (nn.Linear(16, 24, False, dtype=dtype), [x4(dtype)], []),
    "norm": lambda dtype: (RMSNorm(16, 1e-5), [x4(dtype)], []),
    "norm without gain": lambda dtype: (RMSNorm(16, 1e-6, gain=False), [x4(dtype)], []),
    "attention": lambda dtype: (ScaledDotProduct(0.0), [x4(dtype)] * 3, []),
}


@pytest.mark.parametrize("backend", [None, "aot_eager"])  # what is traced differs, not its code
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", ROWS)
def test_a_replaced_module_computes_what_the_plain_one_does(row, dtype, backend, monkeypatch):
    monkeypatch.setattr(devices, "onednn_speedup", lambda dtype: 2.0)  # on every processor
    module, inputs, rest = ROWS[row](dtype)
    expected = results(module, inputs, rest)
    fast = swap_classes(copy.deepcopy(module))
    assert type(fast) is CPU_CLASSES[type(module)]
    found, atol = results(fast, inputs, rest, backend), TOLERANCE[dtype]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=atol, rtol=atol)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast", [False, True])
def test_the_loss_in_small_chunks_is_that_of_whole_logits(fast, dtype, compiled, monkeypatch):
    torch.manual_seed(0)
    x, weight, targets = torch.randn(100, 32), torch.randn(320, 32), torch.randint(300, (100,))
    targets[::7] = -1
    whole, small = HeadCrossEntropy(300), HeadCrossEntropy(300)
    whole.plain_bytes = 2**30
    if fast:
        monkeypatch.setattr(cpu, "SOFTMAX_BYTES", 4 * 320 * 5)
        small = swap_classes(small)
    small.logits_bytes, small.matmul_bytes = 4 * 320 * 48, 4 * 32 * 100  # last chunk is smaller
    if compiled:
        small.cross_entropy_ = torch.compile(cross_entropy_, fullgraph=True, dynamic=False)
    found = []
    for loss in (whole, small):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with autocast(CPU, dtype):
            value = loss(*leaves, targets)
        (3 * value).backward()
        found.append([value.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_for_training_learns_as_the_plain_one_under_its_names(recipe, dtype):
    plain = tiny_gpt(recipe)
    fast = for_training(tiny_gpt(recipe), CPU)
    x, y = torch.randint(0, 257, (2, 3, 16))
    for model in (plain, fast):
        with autocast(CPU, dtype):
            model(x, y).backward()
    for (name, p), (other, q) in zip(
        plain.named_parameters(), fast.named_parameters(), strict=True
    ):
        assert name == other
        assert (p.grad - q.grad).abs().max() <= 4 * TOLERANCE[dtype] * p.grad.abs().max(), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_for_inference_gives_the_logits_of_the_plain_one(recipe, dtype):
    if not cpu.has_onednn(dtype):
        pytest.skip(f"oneDNN has no matmuls in {dtype} here")
    plain = tiny_gpt(recipe).eval()
    packed = for_inference(copy.deepcopy(plain), CPU, dtype)
    assert type(packed) is packed_layers.CPUInferenceGPT
    idx = torch.arange(32).view(2, 16)
    with torch.no_grad(), autocast(CPU, dtype):
        found, rounded = packed(idx).float(), plain(idx).float()
    exact = plain(idx)
    error, rounding = (found - exact).norm(), (rounded - exact).norm()
    assert error <= max(1.2 * rounding, 1e-5 * exact.norm())


def test_without_onednn_linear_layers_stay_plain(monkeypatch):
    monkeypatch.setattr(devices, "HAS_ONEDNN", False)
    monkeypatch.setattr(devices, "onednn_speedup", lambda dtype: 0.0)
    model = for_inference(tiny_gpt(), CPU, torch.float32)
    assert type(model) is GPT and type(model.transformer.h[0].attn.c_attn) is torch.nn.Linear
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(cpu.linear(x, weight), F.linear(x, weight))
