"""The loss: the output head and its cross-entropy.

HeadCrossEntropy applies the head itself, because the logits of a whole batch are in memory only if
they are few. Three functions compute the loss of a chunk of tokens, and a change of the loss has to
change all three: `loss_of_chunk` here, by F.cross_entropy, for few logits and for the loss of each
target; cross_entropy_ and cross_entropy_by_rows_ of model/chunked_loss.py, with their gradient, for
the mean over many logits.

Shapes: N tokens of a batch, n of a chunk, C channels, V vocabulary, "padded V" with its padding.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute

from model.chunked_loss import (
    ChunkedCrossEntropy,
    chunk_bytes,
    cross_entropy_by_rows_,
    rows_within,
)

# Up to this size in bytes of a batch's float32 logits, a single F.cross_entropy is faster than
# chunks.
PLAIN_BYTES = 2**22


class HeadCrossEntropy(nn.Module):
    """Cross-entropy of the head's logits, computed in chunks that bound the memory."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size  # V, without padding
        # Used on GPUs. With torch.compile, `execute` in model/execution.py replaces it by a
        # compiled `cross_entropy_`.
        self.chunk_cross_entropy_ = cross_entropy_by_rows_

    def forward(
        self, x: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
    ) -> Tensor:
        """Return the mean cross-entropy in nats for x (N, C), weight (padded V, C) and targets
        (N,) other than -1. With the reduction "none" return the cross-entropy of each target (N,),
        which is 0 for -1."""
        all_logits_bytes = 4 * len(x) * len(weight)  # in float32
        max_bytes = chunk_bytes(x.device)
        if reduction == "mean" and all_logits_bytes > PLAIN_BYTES:
            # not in ChunkedCrossEntropy: gradients are always off inside an autograd.Function
            needs_grad = torch.is_grad_enabled()
            return ChunkedCrossEntropy.apply(
                x, weight, targets, self.vocab_size, self.chunk_cross_entropy_, needs_grad
            )
        if all_logits_bytes <= max_bytes:
            return self.loss_of_chunk(x, weight, targets, reduction)

        # The reduction is "none" here. The caller may weight each loss differently, so the forward
        # pass cannot compute the gradients: the backward pass recomputes each chunk.
        chunk_size = rows_within(max_bytes, 4 * len(weight))  # in tokens
        losses = []  # (n,) each
        for start in range(0, len(x), chunk_size):
            chunk = slice(start, start + chunk_size)
            inputs = (x[chunk], weight, targets[chunk], reduction)
            losses.append(recompute(self.loss_of_chunk, *inputs, use_reentrant=False))
        return torch.cat(losses)  # (N,)

    def loss_of_chunk(self, x: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the cross-entropy (n,) in nats of each token of a chunk, which is 0 for a target
        of -1. With the reduction "mean" return the mean over the tokens with other targets."""
        logits = F.linear(x, weight[: self.vocab_size]).float()  # (n, V)
        return F.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction)
