"""Objectives of fine-tuning, as functions of log-probabilities in nats. They know no model and no
batch; supervised fine-tuning uses the model's own cross-entropy.

N texts or pairs of texts, T tokens. "ref" is the reference model, from which fine-tuning began.
"""

import torch
from torch import Tensor


def dpo_margin(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Return the margin (N,) of DPO for log-probabilities (N,) of completions under the model and
    under the reference (Rafailov et al. 2023, equation 7)."""
    # the implicit reward of a completion is beta times how much likelier it has become
    return beta * ((chosen - ref_chosen) - (rejected - ref_rejected))


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (reward - mean) / standard deviation within each group, for rewards (groups, size)
    (Shao et al. 2024, section 4.1.2); 0 in a group of equal rewards."""
    mean = rewards.mean(dim=1, keepdim=True)  # (groups, 1)
    std = rewards.std(dim=1, keepdim=True)
    advantages = (rewards - mean) / (std + 1e-4)  # 1e-4 as in trl
    # The mean of equal numbers can be rounded: without this, noise would be divided by 1e-4.
    is_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return advantages.masked_fill(is_equal, 0.0)


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
    A = advantages[:, None]  # (N, 1): all tokens of a completion have its advantage
    ratio = (logprobs - old).exp()  # 1 in the first update after sampling
    clipped = ratio.clamp(1 - clip, 1 + clip)
    # PPO's minimum: no gain from moving the ratio further than the clipping range
    gain = torch.minimum(ratio * A, clipped * A)
    return kl * kl_estimate(logprobs, ref) - gain


def mean_over_tokens(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the mean (N,) of values (N, T) where `loss_mask` (N, T) is true."""
    return (values * loss_mask).sum(1) / loss_mask.sum(1)
