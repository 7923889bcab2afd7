"""Hashed n-grams: which rows of the n-gram table belong to a token and the tokens before it.

Their embeddings tell the first block what stands around a token, before any attention (after
modded-nanogpt's hashed bigrams). N-grams of all lengths share one table.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.cache import KVCache
from model.config import GPTConfig

MULTIPLIER = 1_000_003  # as in Python's hash of a tuple


def ngram_rows(
    idx: Tensor, cache: KVCache | None, mask: Tensor | None, config: GPTConfig
) -> Tensor:
    """Return the rows (B, T, N - 1) of the n-grams, n = 2 to N, that end at each id (B, T). The
    tokens before it are the last ones that it attends to: those of its row and of the cache, or
    where `mask` (B, 1, T, S) allows it. End of text stands where there are fewer."""
    (B, T), count = idx.shape, config.ngrams - 1
    tokens = idx if cache is None else cache.append("tokens", idx, dim=1)  # (B, S)
    eot = config.vocab_size - 1  # but in some tokenizer.json of others
    tokens = F.pad(tokens, (count, 0), value=eot)  # column s is now s + count
    columns = torch.arange(tokens.size(1), device=idx.device)
    static = cache is not None and cache.column is not None
    own = (cache.column + count if static else columns[-T:])[:, None]  # (T, 1)
    if mask is None:
        nearest = (own - columns[1 : count + 1]).expand(B, T, count)
    else:
        attended = F.pad(mask[:, 0], (count, 0), value=True) & (columns < own)
        nearest = columns.where(attended, -1).topk(count).values  # (B, T, count)
    value, rows = idx, []
    for column in nearest.unbind(-1):
        value = value * MULTIPLIER + tokens.gather(1, column) + 1  # wraps around at 64 bits
        rows.append((value ^ (value >> 15)) % config.ngram_rows)
    return torch.stack(rows, -1)
