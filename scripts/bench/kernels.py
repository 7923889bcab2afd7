"""Items of `bench_gpu.sh correctness` on one operation: the loss, and the kernels of attention."""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import loss
from model.loss import HeadCrossEntropy
from scripts.bench.gpu import Bench
from utils.distributed import autocast


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
    x, weight, targets = (t.to(bench.device) for t in (x, weight, targets))

    def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight[:V]).float(), targets, ignore_index=-1)

    ours, compiled = HeadCrossEntropy(V), HeadCrossEntropy(V)
    compiled.cross_entropy_ = torch.compile(loss.cross_entropy_, fullgraph=True, dynamic=False)
    for module in (ours, compiled):
        module.logits_bytes = 4 * padded * chunk

    def results(work: Callable, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
        with autocast(bench.device, dtype):
            value = work(*leaves, targets)
        value.backward()
        return [value.detach(), *(leaf.grad for leaf in leaves)]

    wide = [t.double().cpu().requires_grad_() for t in (x, weight)]
    exact_loss = F.cross_entropy(F.linear(wide[0], wide[1][:V]), targets.cpu(), ignore_index=-1)
    exact_loss.backward()
    exact = [exact_loss.detach(), *(leaf.grad for leaf in wide)]
    found, ok = {}, True
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for kind, work in (("plain", plain), ("eager", ours), ("compiled", compiled)):
            errors = [
                relative_error(a, b) for a, b in zip(results(work, dtype), exact, strict=True)
            ]
            found[f"{name}_{kind}"] = errors
            bounds = [max(1.5 * e, 1e-6) for e in found[f"{name}_plain"]]
            ok &= all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    return {"ok": ok, "errors_of_loss_input_weight": found}


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return |x - exact| / |exact| of two tensors."""
    return ((x.double().cpu() - exact).norm() / exact.norm()).item()


def attention(bench: Bench) -> dict:
    """Compare each kernel of attention with MATH in float32, and time it."""
    found, ok = {}, True
    for T in (64, 50) if bench.tiny else (1024, 1000):
        B, H, D = (2, 2, 32) if bench.tiny else (16, 12, 64)
        torch.manual_seed(0)
        qkv = [torch.randn(B, H, T, D, device=bench.device) for _ in range(4)]
        exact = attend(qkv, SDPBackend.MATH)
        low = [t.to(torch.bfloat16) for t in qkv]
        allowed = 2 * relative_errors(attend(low, SDPBackend.MATH), exact)[0] + 1e-3
        for name in ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", None):
            backend = getattr(SDPBackend, name) if name else None
            try:
                errors = relative_errors(attend(low, backend), exact)
            except RuntimeError as error:
                found[f"{T}_{name}"] = str(error).partition("\n")[0]
                continue
            work = lambda low=low, backend=backend: attend(low, backend)  # noqa: E731
            found[f"{T}_{name or 'chosen'}"] = {"errors": errors, "ms": bench.milliseconds(work)}
            ok &= max(errors) <= max(allowed, 0.02)
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
    return [relative_error(a, b.double().cpu()) for a, b in zip(found, exact, strict=True)]
