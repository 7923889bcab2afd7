"""Log-probabilities of target tokens, without the logits of a whole batch in memory."""

import torch
from torch import Tensor

from model.cpu import linear
from model.loss import rows_within

SLICE_BYTES = {"cpu": 2**24, "cuda": 2**29}  # float32 logits of a slice of the vocabulary


def score_targets(
    x: Tensor, weight: Tensor, targets: Tensor, banned: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Score each target (N,) after hidden states x (N, C), for a head of weight (V, C).

    Returns its log-probability in nats, whether it is the argmax (the first of equal logits), and
    whether it is the argmax of the ids that are not `banned`, each (N,). Logits are float32, since
    many bfloat16 ones are equal.
    """
    logits_of_targets, logsumexps = torch.zeros(targets.shape, device=x.device), []
    highest, highest_allowed = [], []  # for each slice: logit (N,) and column (N,)
    width = rows_within(SLICE_BYTES.get(x.device.type, SLICE_BYTES["cuda"]), 4 * len(x))
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, len(weight), width):
            logits = linear(x.float(), weight[start : start + width].float())  # (N, width)
            logsumexps.append(logits.logsumexp(-1))
            (inside,) = torch.where((targets >= start) & (targets < start + width))
            logits_of_targets[inside] = logits[inside, targets[inside] - start]
            highest.append(logits.max(-1))
            ids = [token - start for token in banned if start <= token < start + width]
            logits[:, ids] = -torch.inf
            highest_allowed.append(logits.max(-1) if ids else highest[-1])

    def are_argmax(slices: list[tuple[Tensor, Tensor]]) -> Tensor:
        tops, columns = (torch.stack(part) for part in zip(*slices, strict=True))  # (slices, N)
        best = tops.argmax(0, keepdim=True)
        return (best * width + columns.gather(0, best))[0] == targets

    logprob = logits_of_targets - torch.stack(logsumexps).logsumexp(0)
    return logprob, are_argmax(highest), are_argmax(highest_allowed)
