"""Tensors that are read row by row: mapped from a file, computed from two, or drawn.

A run whose state is divided among processes fills in only the rows that a process holds. So what a
model begins with is a dict of such tensors by parameter name, and none of them has to exist whole.
"""

from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """A matrix or vector of which any rows can be read; a vector has rows of one number. A Tensor
    on the CPU is one."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: Tensor | slice, /) -> Tensor:
        """Return some rows, by a slice or by their indices, int64 (r,), in this order."""


def is_vector(shape: torch.Size) -> bool:
    """Return True for a vector, a matrix of one column, and a single number. Checkpoints write
    these as one row."""
    return shape.numel() == shape[:1].numel()  # for the shape () both are 1
