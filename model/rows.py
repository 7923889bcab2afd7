"""Rows: tensors that are read row by row, from a file, from two other tensors, or drawn at random.

The initial weights of a run are a dict of Rows by parameter name. Each process of a sharded run
reads only the rows that it holds, so no process needs the whole tensor in memory.
"""

from types import EllipsisType
from typing import Protocol

import torch
from torch import Tensor

RowIndex = Tensor | slice | EllipsisType


class Rows(Protocol):
    """Tensor that can return any of its rows; an index into a vector gives one number. Tensors on
    the CPU, Float32Rows (joined from a checkpoint) and NormalRows (drawn) are Rows."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: RowIndex, /) -> Tensor:
        """Return the rows of a slice, or the rows with the indices int64 (r,), in that order. An
        ellipsis returns everything, also of a single number."""


def is_vector(shape: torch.Size) -> bool:
    """Return True for a vector, a matrix of one column, and a single number. Checkpoints write each
    of these tensors whole, as a single row."""
    return shape.numel() == shape[:1].numel()  # for the shape () both are 1
