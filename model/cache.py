"""The key/value cache of sampling."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of up to `capacity` past tokens, so that only new tokens are computed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stored: dict[object, Tensor] = {}
        self.restart()

    def restart(self) -> None:
        """Forget all tokens."""
        self.length = 0  # tokens in every layer
        self.column: Tensor | None = None  # place (1,) of the next token in a static cache

    def become_static(self) -> None:
        """Take the later tokens one by one, with tensors of constant shapes and addresses: `append`
        returns all columns, of which a mask has to hide those that are not filled."""
        device = next(iter(self.stored.values())).device
        self.column = torch.tensor([self.length], device=device)

    def append(self, name: object, x: Tensor, dim: int) -> Tensor:
        """Add the values `x` of the newest T tokens, along `dim`; return those of all S so far."""
        if name not in self.stored:
            shape = list(x.shape)
            shape[dim] = self.capacity
            self.stored[name] = x.new_zeros(shape)
        if self.column is not None:
            return self.stored[name].index_copy_(dim, self.column, x)
        stored, T = self.stored[name], x.size(dim)
        stored.narrow(dim, self.length, T).copy_(x)
        return stored.narrow(dim, 0, self.length + T)

    def advance(self, T: int) -> None:
        """Count T tokens that every layer has appended."""
        if self.column is not None:
            self.column += T
        else:
            self.length += T
