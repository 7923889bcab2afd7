"""The cache of keys and values that sampling goes on from."""

from torch import Tensor


class KVCache:
    """Keys and values of the tokens seen so far, so that each new token costs one forward of one.

    Holds at most `capacity` tokens; memory is taken at the first append, in the dtype of its keys.
    """

    def __init__(self, capacity: int, *, compiled: bool = False) -> None:
        self.capacity = capacity
        self.compiled = compiled  # its reader makes float32 of bfloat16 as it reads
        self.place: Tensor | None = None  # (T,): where the next T go, in shapes that stay the same
        self.length = 0  # tokens every layer has seen; GPT.hidden advances it without a place
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> (B, K, capacity, D) twice

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds k and v (B, K, T, D) of the newest T tokens; returns all of them so far, or with a
        `place` all the capacity, for a mask to choose from."""
        if layer not in self.layers:
            B, K, _, D = k.shape
            # zeros: what a mask hides is multiplied by 0, which makes no number of NaN
            keys, values = (k.new_zeros(B, K, self.capacity, D) for _ in range(2))
            self.layers[layer] = keys, values
        keys, values = self.layers[layer]
        if self.place is not None:
            keys.index_copy_(2, self.place, k)
            values.index_copy_(2, self.place, v)
            return keys, values
        end = self.length + k.size(2)
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]
