"""Objectives of fine-tuning, as functions of log-probabilities in nats: N texts or pairs of texts,
T tokens. Supervised fine-tuning uses the model's cross-entropy.
"""

import torch
from torch import Tensor


def dpo_margin(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Return the margin (N,) of DPO for log-probabilities (N,) of completions under the model and
    under the reference (Rafailov et al. 2023, equation 7)."""
    return beta * ((chosen - ref_chosen) - (rejected - ref_rejected))


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (reward - mean) / standard deviation within each group, for rewards (groups, size)
    (Shao et al. 2024, section 4.1.2); 0 in a group of equal rewards, whose mean may be rounded."""
    spread, equal = rewards.std(dim=1, keepdim=True), rewards == rewards[:, :1]
    advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-4)  # as in trl
    return advantages.masked_fill(equal.all(dim=1, keepdim=True), 0.0)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(ref - logprob) - (ref - logprob) - 1, (N, T): an unbiased estimate of the KL
    divergence from the reference, never negative (Shao et al. 2024, equation 4)."""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def grpo_losses(
    logprobs: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, *, clip: float, kl: float
) -> Tensor:
    """Return the loss (N, T) of each token, whose mean is that of a completion, for advantages (N,)
    and log-probabilities (N, T) under the model, the one that sampled and the reference (Shao et
    al. 2024, equation 3)."""
    A = advantages[:, None]
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return kl * kl_estimate(logprobs, ref) - torch.minimum(ratio * A, clipped * A)


def mean_over_tokens(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the mean (N,) of values (N, T) where `loss_mask` (N, T) is true."""
    return (values * loss_mask).sum(1) / loss_mask.sum(1)
