"""Rows of n-grams in a table of embeddings, which are added to those of tokens.

They tell the first block which tokens precede one, before any attention (after modded-nanogpt's
hashed bigrams). N-grams of all lengths share one table. It is much smaller than the number of
n-grams, so several share a row: that of their hash.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import GPTConfig
from model.layers import KVCache

MULTIPLIER = 1_000_003  # a prime, from Python's former hash of tuples


def ngram_rows(
    idx: Tensor, cache: KVCache | None, mask: Tensor | None, config: GPTConfig
) -> Tensor:
    """Return the rows (B, T, N - 1) of the n-grams, n = 2 to N, that end at each id (B, T).

    The tokens before it are the nearest ones that it attends to: those of its row and of the cache,
    or where `mask` (B, 1, T, S) allows it. End of text stands in for those that are missing.
    """
    B, T = idx.shape
    num_before = config.ngrams - 1  # tokens before an id in the longest n-gram
    tokens = idx  # (B, S), where S = T without a cache
    if cache is not None:
        # The cache keeps token ids, too, because n-grams may begin in tokens of earlier calls.
        tokens = cache.append("tokens", idx, dim=1)
    end_of_text = config.vocab_size - 1  # a tokenizer.json may have another token here
    # the padding moves column s to s + num_before
    tokens = F.pad(tokens, (num_before, 0), value=end_of_text)
    columns = torch.arange(tokens.size(1), device=idx.device)  # (num_before + S,)

    id_column = columns[-T:, None]  # (T, 1), the column of each id

    # the columns of the tokens before each id, the nearest first
    if mask is None:
        nearest = id_column - columns[1 : num_before + 1]  # (T, num_before)
        nearest = nearest.expand(B, T, num_before)
    else:
        # (B, T, num_before + S), true for earlier columns that are padding or that the mask allows
        is_before = F.pad(mask[:, 0], (num_before, 0), value=True) & (columns < id_column)
        # The largest columns are the nearest. The padding ensures that there are num_before.
        nearest = columns.where(is_before, -1).topk(num_before).values  # (B, T, num_before)

    # Each round takes in one more earlier token: the hash of an n-gram becomes the hash of an
    # (n + 1)-gram.
    ngram_hash = idx  # (B, T) int64
    rows: list[Tensor] = []  # (B, T) for n = 2, 3, ..., N
    for column in nearest.unbind(-1):  # (B, T)
        # the product wraps around at 64 bits
        ngram_hash = ngram_hash * MULTIPLIER + tokens.gather(1, column) + 1
        # High bits of the hash depend on more bits of the token ids than low bits do, and % by a
        # power of two would see the low bits alone.
        rows.append((ngram_hash ^ (ngram_hash >> 15)) % config.ngram_rows)
    return torch.stack(rows, -1)
