"""Tensors that are read row by row: mapped from a file, computed from two, or drawn.

A run whose state is divided among processes fills in only the rows that a process holds. So what a
model begins with is a dict of such tensors by parameter name, and none of them has to exist whole.
"""

from typing import Protocol

import torch
from torch import Tensor

from utils.seeds import hash_seed

# Rows of NormalRows that one generator draws: with fewer, seeding generators would take the time.
BLOCK_ROWS = 64


class Rows(Protocol):
    """A matrix or vector of which any rows can be read; a vector has rows of one number. A Tensor
    on the CPU is one."""

    @property
    def shape(self) -> torch.Size: ...

    def __getitem__(self, rows: Tensor | slice, /) -> Tensor:
        """Return some rows, by a slice or by their indices, int64 (r,), in this order."""


class NormalRows:
    """Matrix of normal numbers with a standard deviation of `std`. A row follows from the seed, the
    name of the matrix and the index of the row, whoever draws it and whatever is drawn before.
    Seeds have 32 bits: of the 166,000 blocks of rows of a 175B some three pairs begin alike."""

    def __init__(self, seed: int, name: str, shape: torch.Size, std: float) -> None:
        self.seed = seed
        self.name = name
        self.shape = shape
        self.std = std

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        # device="cpu", because torch's default device may be another one
        indices = torch.arange(self.shape[0], device="cpu")[rows]  # (r,)
        drawn = torch.empty(len(indices), self.shape[1], device="cpu")
        blocks = indices // BLOCK_ROWS  # (r,)
        for block in blocks.unique().tolist():
            block_seed = hash_seed(f"{self.seed} {self.name} {block}")
            generator = torch.Generator("cpu").manual_seed(block_seed)
            # draw the whole block even for one row, so that a row's numbers follow from its index
            normal = torch.randn(BLOCK_ROWS, self.shape[1], generator=generator, device="cpu")
            is_here = blocks == block  # (r,)
            drawn[is_here] = normal[indices[is_here] % BLOCK_ROWS]
        return drawn.mul_(self.std)


def constant(value: float, shape: torch.Size) -> Rows:
    """Return a tensor of one value, which takes the memory of one number."""
    return torch.tensor(value, device="cpu").expand(shape)


def is_vector(shape: torch.Size) -> bool:
    """Return True for a vector, a matrix of one column, and a single number. Checkpoints write
    these as one row."""
    return shape.numel() == shape[:1].numel()  # for the shape () both are 1
