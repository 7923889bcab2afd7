"""Items of `bench_gpu.sh correctness` on one operation: the loss, and the kernels of attention."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import loss
from model.loss import HeadCrossEntropy
from scripts.bench.gpu import Bench
from utils.devices import autocast


def head(bench: Bench) -> dict:
    """Compare the loss and its gradients with float64, with tokens that do not count and a smaller
    last chunk, beside F.cross_entropy on whole logits."""
    V, C, chunk = (257, 64, 96) if bench.tiny else (50257, 768, 2048)
    padded = -(-V // 128) * 128
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * chunk + 37, C, generator=generator)
    weight = 0.02 * torch.randn(padded, C, generator=generator)
    targets = torch.randint(V, (len(x),), generator=generator)
    targets[::7] = -1

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight[:V]), targets, ignore_index=-1)

    ours, compiled = HeadCrossEntropy(V), HeadCrossEntropy(V)
    compiled.cross_entropy_ = torch.compile(loss.cross_entropy_, fullgraph=True, dynamic=False)
    for module in (ours, compiled):
        module.logits_bytes = 4 * padded * chunk
    exact = loss_and_gradients(plain, x.double(), weight.double(), targets, torch.float64)
    tensors, found, ok = [t.to(bench.device) for t in (x, weight, targets)], {}, True
    for dtype in (torch.float32, torch.bfloat16):
        errors = {
            name: relative_errors(loss_and_gradients(form, *tensors, dtype), exact)
            for name, form in (("plain", plain), ("eager", ours), ("compiled", compiled))
        }
        bounds = [max(1.5 * error, 1e-6) for error in errors["plain"]]
        for name, values in errors.items():
            found[f"{str(dtype).removeprefix('torch.')}_{name}"] = values
            ok &= all(error <= bound for error, bound in zip(values, bounds, strict=True))
    return {"ok": ok, "errors_of_loss_input_weight": found}


def loss_and_gradients(
    form: Callable[..., Tensor], x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return the loss of a head and the gradients of its input and weight; float64 is exact."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
    with autocast(x.device, torch.float32 if dtype is torch.float64 else dtype):
        value = form(*leaves, targets)
    value.backward()
    return [value.detach(), *(leaf.grad for leaf in leaves)]


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return |x - exact| / |exact| of two tensors."""
    exact = exact.double().cpu()
    return ((x.double().cpu() - exact).norm() / exact.norm()).item()


def attention(bench: Bench) -> dict:
    """Compare each kernel of attention with MATH in float32, and time it."""
    found, ok = {}, True
    for T in (64, 50) if bench.tiny else (1024, 1000):
        B, H, D = (2, 2, 32) if bench.tiny else (16, 12, 64)
        torch.manual_seed(0)
        shape = (B, T, H, D)  # transposed to (B, H, T, D), as in the model
        qkv = [torch.randn(shape, device=bench.device).transpose(1, 2) for _ in range(4)]
        exact = attend(qkv, SDPBackend.MATH)
        low = [t.to(torch.bfloat16) for t in qkv]
        for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "chosen"):
            backend = getattr(SDPBackend, name, None)
            try:
                errors = relative_errors(attend(low, backend), exact)
            except RuntimeError as error:  # not for these tensors on this device
                found[f"{T}_{name}"] = str(error).partition("\n")[0]
                continue
            ms = bench.milliseconds(partial(attend, low, backend))
            found[f"{T}_{name}"] = {"errors": errors, "ms": ms}
            ok &= max(errors) <= 0.02
    return {"ok": ok, "kernels": found}


def attend(qkv: list[Tensor], backend: SDPBackend | None) -> list[Tensor]:
    """Return the result of causal attention and its three gradients, by one kernel or PyTorch's
    choice; the fourth tensor is the gradient of the result."""
    leaves, grad = [t.detach().requires_grad_() for t in qkv[:3]], qkv[3]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reasons against a kernel
        if backend is None:
            y = F.scaled_dot_product_attention(*leaves, is_causal=True)
            y.backward(grad)
        else:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(*leaves, is_causal=True)
                y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def relative_errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Return the relative error of each tensor."""
    return [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
