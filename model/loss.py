"""How the loss of many tokens is computed: in chunks, so that few logits are in memory at a time.

What the loss is, GPT.logits and GPT.token_losses in model/gpt.py say. This file and
model/chunked_loss.py only compute it. ChunkedCrossEntropy has its gradient by hand and is the
fastest for many logits. If it does not agree with the definition any more (model/proof.py),
autograd computes the definition, one chunk after another.

Shapes: N tokens of a batch, n of a chunk, C channels, V vocabulary, "padded V" with its padding.
"""

from typing import Any

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
from model.proof import agrees, is_proven

# Up to this size in bytes of a batch's float32 logits, the definition is faster than chunks.
PLAIN_BYTES = 2**22


# model/gpt.py imports this file, so it cannot import the class.
GPT = Any


class ChunkedLoss(nn.Module):
    """The loss of a model's hidden states, computed in chunks that bound the memory."""

    def __init__(self) -> None:
        super().__init__()
        # Used on GPUs. With torch.compile, `execute` in model/execution.py replaces it by a
        # compiled `cross_entropy_`.
        self.chunk_cross_entropy_ = cross_entropy_by_rows_

    def forward(self, model: GPT, x: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """Return the mean loss in nats for x (N, C) and targets (N,) other than -1. With the
        reduction "none" return the loss of each target (N,), which is 0 for -1."""
        if reduction == "none":
            # for dpo and grpo: with gradients in training, without them under the reference model
            losses = chunked_token_losses(model, x, targets, chunk_bytes(x.device))
            return losses.masked_fill(targets < 0, 0)  # whatever the definition gives for -1
        logits_bytes = 4 * len(x) * model.config.padded_vocab_size  # float32 logits of N tokens
        if logits_bytes > PLAIN_BYTES and has_fast_loss(model):
            # asked here, because gradients are always off inside an autograd.Function
            needs_grad = torch.is_grad_enabled()
            V = model.config.vocab_size
            return ChunkedCrossEntropy.apply(
                x, model.head_weight, targets, V, self.chunk_cross_entropy_, needs_grad
            )
        # a quarter, because autograd keeps about four tensors as large as a chunk's logits
        losses = chunked_token_losses(model, x, targets, chunk_bytes(x.device) // 4)
        return mean_of_counted(losses, targets)


def chunked_token_losses(model: GPT, x: Tensor, targets: Tensor, max_bytes: int) -> Tensor:
    """Return the loss of each token (N,) by the model's definition. If all float32 logits take
    more than `max_bytes`, only those of a chunk are in memory at a time."""
    row_bytes = 4 * model.config.padded_vocab_size  # float32 logits of one token
    if row_bytes * len(x) <= max_bytes:
        return losses_of_chunk(model, x, targets)
    chunk_size = rows_within(max_bytes, row_bytes)  # in tokens
    losses: list[Tensor] = []  # (n,) each
    for start in range(0, len(x), chunk_size):
        chunk = slice(start, start + chunk_size)
        # The caller may weight each loss differently, so the forward pass cannot compute the
        # gradients: the backward pass recomputes each chunk.
        losses.append(
            recompute(losses_of_chunk, model, x[chunk], targets[chunk], use_reentrant=False)
        )
    return torch.cat(losses)  # (N,)


def losses_of_chunk(model: GPT, x: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each token (n,) of a chunk, whose logits (n, V) are all in memory."""
    # GPT.token_losses defines the loss: minus the log-softmax of the logits at the targets
    return model.token_losses(model.logits(x).float(), targets)


def mean_of_counted(losses: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of the losses (N,) whose target is not -1, rounded like F.cross_entropy."""
    # nll_loss negates again. Its targets are columns: 0, the only one, or -1, which it ignores.
    return F.nll_loss(-losses.unsqueeze(1), targets.clamp(max=0), ignore_index=-1)


def has_fast_loss(model: GPT) -> bool:
    """Return whether ChunkedCrossEntropy computes the loss that the model defines. The comparison
    runs once; training asks for it before the first step (Run.distribute in training/run.py)."""
    return is_proven("the chunked loss", chunked_loss_agrees, model)


def chunked_loss_agrees(model: GPT) -> bool:
    """Compare ChunkedCrossEntropy with the definition of a narrow copy: the loss and its gradients,
    also those of parameters that only the definition uses, such as a learned temperature."""
    x = torch.randn(64, model.config.n_embd, requires_grad=True)  # hidden states of 64 tokens
    V = model.config.vocab_size
    targets = torch.randint(V, (64,))
    targets[::8] = -1  # does not count
    leaves = [x] + [p for p in model.parameters() if p.requires_grad]
    # Both, because a definition may differ in training, such as by label smoothing.
    for is_training in (True, False):
        model.train(is_training)
        # True: the forward pass computes the gradients, too
        fast = ChunkedCrossEntropy.apply(
            x, model.head_weight, targets, V, cross_entropy_by_rows_, True
        )
        losses = losses_of_chunk(model, x, targets)  # (64,), by the definition
        plain = losses[targets >= 0].mean()
        # The loss, then its gradients: zeros for parameters that a loss does not depend on. So a
        # temperature, which `fast` does not know, shows.
        fast_results = (fast,) + torch.autograd.grad(fast, leaves, materialize_grads=True)
        plain_results = (plain,) + torch.autograd.grad(plain, leaves, materialize_grads=True)
        if not all(agrees(a, b) for a, b in zip(fast_results, plain_results, strict=True)):
            return False
    return True
