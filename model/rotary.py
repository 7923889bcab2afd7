"""Rotary positions (Su et al. 2021)."""

import torch
from torch import Tensor


def rotations(positions: Tensor, width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, 1, D / 2) of the angles by which positions (T) turn pairs of channels,
    (B, T, 1, D / 2) of positions (B, T)."""
    pairs = torch.arange(0, width, 2, device=positions.device) / width
    angles = positions[..., None, None] / base**pairs
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turns channels i and i + D / 2 of x (B, T, H, D) by their angle, as transformers' LLaMA."""
    return Rotation.apply(x, *rotary)


class Rotation(torch.autograd.Function):
    """A gradient turns back by the same angle: fewer and larger operations than autograd's."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grad, cos, -sin), None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    halves = x.unflatten(-1, (2, -1))
    turned = halves * cos.unsqueeze(-2)
    turned[..., 0, :].addcmul_(halves[..., 1, :], sin, value=-1)
    turned[..., 1, :].addcmul_(halves[..., 0, :], sin)
    return turned.flatten(-2).to(x.dtype)
