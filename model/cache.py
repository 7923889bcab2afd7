"""The key/value cache of sampling."""

from torch import Tensor


class KVCache:
    """Keys and values of past tokens, so that a new token costs one forward pass of itself alone.

    Holds at most `capacity` tokens; memory is taken at the first append, in the values' dtype.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens in every layer; not updated where `slots` is set
        self.slots: Tensor | None = None  # (T,): positions to write next, where compiled
        self.tokens: Tensor | None = None  # (B, capacity)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> (B, K, capacity, D) twice

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k and v (B, K, T, D) of the newest T tokens; return all (B, K, S, D) so far.

        With `slots`, return the whole capacity: a mask has to hide what is not written yet.
        """
        if layer not in self.layers:
            B, K, _, D = v.shape
            # zeros: a mask multiplies by 0, which would not hide NaN
            self.layers[layer] = tuple(v.new_zeros(B, K, self.capacity, D) for _ in range(2))
        keys, values = self.layers[layer]
        if self.slots is not None:
            keys.index_copy_(2, self.slots, k.to(keys.dtype))
            values.index_copy_(2, self.slots, v)
            return keys, values
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def append_tokens(self, idx: Tensor) -> Tensor:
        """Add the ids (B, T) of the newest T tokens; return all (B, S) so far, or the whole
        capacity with `slots`."""
        if self.tokens is None:
            self.tokens = idx.new_zeros(len(idx), self.capacity)
        if self.slots is not None:
            return self.tokens.index_copy_(1, self.slots, idx)
        end = self.length + idx.size(1)
        self.tokens[:, self.length : end] = idx
        return self.tokens[:, :end]

    def advance(self, T: int) -> None:
        """Count T tokens that every layer has appended."""
        if self.slots is None:
            self.length += T
