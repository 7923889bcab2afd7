"""Scores of a model: used by train.py and the other scripts alike."""

import math

import numpy as np
import torch

from data.loader import Sequences
from model.gpt import GPT
from utils.distributed import Process, autocast


@torch.no_grad()
def validation_loss(
    model: GPT,
    sequences: Sequences,
    process: Process,
    *,
    tokens: int,
    batch_size: int,
    dtype: torch.dtype,
    token_bytes: np.ndarray | None = None,
) -> dict[str, float]:
    """Mean loss in nats per token over the first `tokens` targets of a split, or all there are.

    The batches do not depend on the number of processes: each takes every world_size-th, and their
    losses are added in one order, so the figure is the same for any. With the bytes that each token
    id stands for, `bits_per_byte` too.
    """
    model.eval()
    n = min(len(sequences), max(1, tokens // sequences.block_size))
    batches = np.array_split(np.arange(n), range(batch_size, n, batch_size))
    nats = torch.zeros(len(batches), dtype=torch.float64)
    n_bytes = torch.zeros(len(batches), dtype=torch.float64)
    for turn in range(0, len(batches), process.world_size):
        mine = turn + process.rank
        # all processes run the same number of forwards, which collectives within them rely on
        inputs, targets = sequences.batch(batches[min(mine, len(batches) - 1)])
        idx, labels = (torch.from_numpy(x).to(process.device) for x in (inputs, targets))
        with autocast(process.device, dtype):
            loss = model(idx, labels)
        if mine < len(batches):
            nats[mine] = loss.item() * targets.size
            n_bytes[mine] = 0 if token_bytes is None else float(token_bytes[targets].sum())
    totals = process.sum(torch.stack([nats, n_bytes]).to(_float64_home(process)))
    total_nats, total_bytes = totals.sum(dim=1).tolist()
    model.train()
    scores = {"loss": total_nats / (n * sequences.block_size)}
    if total_bytes:
        scores["bits_per_byte"] = total_nats / math.log(2) / total_bytes
    return scores


def _float64_home(process: Process) -> torch.device:
    """Where float64 can be reduced: NCCL reduces on the GPU; Apple's has no float64."""
    return process.device if process.device.type == "cuda" else torch.device("cpu")
