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
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
