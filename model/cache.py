"""The key/value cache of sampling."""

from torch import Tensor


class KVCache:
    """Keys and values of past tokens, so that a new token costs one forward pass of itself alone.

    Holds at most `capacity` tokens; memory is taken at the first append.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens in every layer; not updated where `slots` is set
        self.slots: Tensor | None = None  # (T,): positions to write next, where compiled
        self.stored: dict[object, Tensor] = {}

    def append(self, name: object, x: Tensor, dim: int) -> Tensor:
        """Add the values `x` of the newest T tokens, along `dim`; return those of all S so far.

        With `slots`, return the whole capacity: a mask has to hide what is not written yet.
        """
        if name not in self.stored:
            shape = [self.capacity if i == dim else n for i, n in enumerate(x.shape)]
            # zeros: a mask multiplies by 0, which would not hide NaN
            self.stored[name] = x.new_zeros(shape)
        stored, T = self.stored[name], x.size(dim)
        if self.slots is not None:
            return stored.index_copy_(dim, self.slots, x)
        stored.narrow(dim, self.length, T).copy_(x)
        return stored.narrow(dim, 0, self.length + T)

    def advance(self, T: int) -> None:
        """Count T tokens that every layer has appended."""
        if self.slots is None:
            self.length += T
