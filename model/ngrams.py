"""N-gram embeddings: the rows of their table, which the model adds to the token embedding.

They tell the first block which tokens precede a token, before any attention (after modded-nanogpt's
hashed bigrams). The hash of an n-gram chooses its row. N-grams of all lengths share one table. It
has far fewer rows than there are n-grams, so several n-grams share a row.
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
    """Return the indices (B, T, N - 1) of the table rows of the n-grams, n = 2 to N, that end at
    each token id (B, T).

    The earlier tokens of an n-gram are the nearest ones that the last token attends to: the tokens
    before it in its row and in the KV cache, or the tokens that `mask` (B, 1, T, S) allows. End of
    text replaces missing tokens.
    """
    B, T = idx.shape
    num_before = config.ngrams - 1  # tokens before an id in the longest n-gram
    tokens = idx  # (B, S), where S = T without a cache
    if cache is not None:
        # The cache also keeps token ids, because n-grams may begin in tokens of earlier calls.
        tokens = cache.append("tokens", idx, dim=1)
    eot = config.vocab_size - 1  # with a tokenizer.json it may be another token
    # pad on the left: column s moves to s + num_before
    tokens = F.pad(tokens, (num_before, 0), value=eot)
    columns = torch.arange(tokens.size(1), device=idx.device)  # (num_before + S,)

    id_column = columns[-T:, None]  # (T, 1), the column of each id

    # the columns of the tokens before each id, the nearest first
    if mask is None:
        nearest = id_column - columns[1 : num_before + 1]  # (T, num_before)
        nearest = nearest.expand(B, T, num_before)
    else:
        # (B, T, num_before + S), True for earlier columns that are padding or that the mask allows
        is_before = F.pad(mask[:, 0], (num_before, 0), value=True) & (columns < id_column)
        # The largest columns are the nearest. The padding ensures that there are num_before.
        nearest = columns.where(is_before, -1).topk(num_before).values  # (B, T, num_before)

    # Each round adds one more earlier token: the hash of an n-gram becomes the hash of an
    # (n + 1)-gram.
    ngram_hash = idx  # (B, T) int64
    rows: list[Tensor] = []  # (B, T) for n = 2, 3, ..., N
    for column in nearest.unbind(-1):  # (B, T)
        # the product wraps around at 64 bits
        ngram_hash = ngram_hash * MULTIPLIER + tokens.gather(1, column) + 1
        # ^ mixes high bits into the low bits. High bits depend on more bits of the token ids, but %
        # by a power of two reads only the low bits.
        rows.append((ngram_hash ^ (ngram_hash >> 15)) % config.ngram_rows)
    return torch.stack(rows, -1)
