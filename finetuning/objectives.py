"""Objectives of fine-tuning, as functions of log-probabilities in nats.

Supervised fine-tuning uses the model's cross-entropy, -sum(loss_mask log p) / sum(loss_mask).
N texts or pairs of texts, T tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-4  # added to the standard deviation of a group, as in trl


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> Tensor:
    """Return -log sigmoid(beta ((chosen - ref_chosen) - (rejected - ref_rejected))), (N,), for the
    log-probabilities (N,) of completions under the model and under the reference (Rafailov et al.
    2023, equation 7)."""
    return -F.logsigmoid(beta * ((chosen - ref_chosen) - (rejected - ref_rejected)))


def reward_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return -log sigmoid(chosen - rejected), (N,), for rewards (N,): the negative log-likelihood
    of the preference after Bradley and Terry (Ouyang et al. 2022, equation 1)."""
    return -F.logsigmoid(chosen - rejected)


def group_advantages(rewards: Tensor) -> Tensor:
    """Return (reward - mean) / standard deviation within each group, for rewards (groups, size)
    (Shao et al. 2024, section 4.1.2)."""
    spread = rewards.std(dim=1, keepdim=True)
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + EPS)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return exp(ref - logprob) - (ref - logprob) - 1, (N, T): an unbiased estimate of the KL
    divergence from the reference, never negative (Shao et al. 2024, equation 4)."""
    difference = ref_logprobs - logprobs
    return difference.exp() - difference - 1


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip: float,
    kl: float,
) -> Tensor:
    """Return the loss (N,) of each completion, its mean over the completion's tokens.

    That of a token is -min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A) + kl * kl_estimate, where
    ratio = exp(logprob - old_logprob), for log-probabilities (N, T), advantages A (N,) and
    `loss_mask` (N, T), true at tokens of the completion (Shao et al. 2024, equation 3)."""
    A = advantages[:, None]
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    losses = kl * kl_estimate(logprobs, ref_logprobs) - torch.minimum(ratio * A, clipped * A)
    return (losses * loss_mask).sum(1) / loss_mask.sum(1)
