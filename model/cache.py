"""The key/value cache of sampling."""

from torch import Tensor


class KVCache:
    """Keys and values of up to `capacity` past tokens, so that only new tokens are computed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens in every layer
        self.stored: dict[object, Tensor] = {}

    def append(self, name: object, x: Tensor, dim: int) -> Tensor:
        """Add the values `x` of the newest T tokens, along `dim`; return those of all S so far."""
        if name not in self.stored:
            shape = list(x.shape)
            shape[dim] = self.capacity
            self.stored[name] = x.new_empty(shape)
        stored, T = self.stored[name], x.size(dim)
        stored.narrow(dim, self.length, T).copy_(x)
        return stored.narrow(dim, 0, self.length + T)
