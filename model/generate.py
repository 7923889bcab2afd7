"""Sampling from a GPT with a KV cache, or without it if the cache does not suit the model.

`generate` yields token ids, `complete` returns whole completions, as token ids. Prompts are lists
of token ids. Shorter prompts are padded on the left, so that all rows end in the same column.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from model.gpt import GPT
from model.layers import KVCache
from model.proof import agrees, is_proven
from utils.seeds import hash_seed

# Tokens of each text that `complete` generates between two checks whether all texts have ended. A
# check waits for the GPU and for other processes.
TOKENS_PER_CHECK = 16


class Sampling(Protocol):
    """Options for continuing prompts; config.SamplingConfig, in a layer above model/, describes
    them."""

    @property
    def max_new_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def seed(self) -> int: ...


def sample_token(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Draw token ids (B,) from logits (B, V) with random numbers `uniform` (B,) in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # token ids of the columns of `logits`; None means that column i is token i
    ids_of_columns: Tensor | None = None
    if sampling.top_k is not None or sampling.top_p is not None:
        V = logits.size(-1)
        # (B, k) each, likeliest first; top_p without top_k needs all V tokens, sorted
        logits, ids_of_columns = logits.topk(min(sampling.top_k or V, V))
    probabilities = (logits.float() / sampling.temperature).softmax(-1)  # (B, V), or (B, k)
    if sampling.top_p is not None:
        # Keep a token if the likelier tokens sum to less than top_p (Holtzman et al. 2020). This
        # always keeps the likeliest token.
        sum_before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (sum_before < sampling.top_p)

    columns = draw_columns(probabilities, uniform)  # (B, 1)
    if ids_of_columns is None:
        return columns.squeeze(-1)
    return ids_of_columns.gather(-1, columns).squeeze(-1)  # (B,), token ids


def draw_columns(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Draw a column for each row of `probabilities` (B, n), like torch.multinomial, but with random
    numbers `uniform` (B,) in [0, 1) from outside. Return columns (B, 1). Rows need not sum to 1."""
    # Invert the cumulative distribution: a row [0.5, 0.3, 0.2] and the number 0.6 give column 1,
    # the first one with a cumulative probability ([0.5, 0.8, 1.0]) above 0.6.
    cumulative = probabilities.cumsum(-1)
    threshold = uniform.unsqueeze(-1) * cumulative[:, -1:]  # (B, 1)
    columns = torch.searchsorted(cumulative, threshold, right=True)
    # With NaN no column is above the threshold: take the last one.
    return columns.clamp_(max=probabilities.size(-1) - 1)


@torch.no_grad()
def generate(
    model: GPT, prompts: list[list[int]], sampling: Sampling, first_index: int = 0
) -> Iterator[Tensor]:
    """Yield the next token ids (B,) of B prompts, on the model's device. A prompt has between 1 and
    block_size tokens.

    The random numbers of prompt i depend only on (seed, first_index + i). `first_index` is the
    index of the first prompt in a longer list, if these prompts are a part of one (as in grpo).
    When a context is full, its older half is dropped, and the newer half is read again. With
    prompts of one length the loop does not wait for the GPU to finish a token.
    """
    # False if a narrow copy of the model has other logits with the cache than without it, such as
    # after an edit of attention; compared once for each class and config
    use_cache = is_proven("the KV cache", cache_agrees, model)
    context = Context(model, prompts, sampling.max_new_tokens, use_cache)
    uniforms = draw_uniforms(len(prompts), sampling, first_index)  # (B, max_new_tokens)
    for uniform in uniforms.to(context.tokens.device).unbind(1):  # (B,)
        tokens = sample_token(context.next_logits(), uniform, sampling)  # (B,)
        yield tokens
        context.append(tokens)


class Context:
    """Tokens of B texts, from which the model predicts the next token of each.

    With a KV cache each call of `next_logits` reads only the tokens that are new, or all that are
    left after the older half of a full context was dropped. Without it each call reads all tokens.
    """

    def __init__(
        self, model: GPT, prompts: list[list[int]], max_new_tokens: int, use_cache: bool
    ) -> None:
        self.model = model
        self.lengths = [len(prompt) for prompt in prompts]  # tokens of each row, without padding
        longest = max(self.lengths)
        block_size = model.config.block_size
        assert longest <= block_size, f"a prompt of {longest} tokens is too long"
        # Pad on the left with token 0. Any token would do, because no result of the tokens of a
        # prompt depends on it.
        # [[7, 8], [1, 2, 3, 4]] -> [[0, 0, 7, 8], [1, 2, 3, 4]]
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        device = model.transformer.wte.weight.device
        self.tokens = torch.tensor(rows, device=device)  # (B, S), with padding
        self.capacity = min(block_size, longest + max_new_tokens)  # of the cache, in tokens
        # Keys and values of past tokens, which get memory in the first forward pass. None:
        # next_logits reads all tokens.
        self.cache = KVCache(self.capacity) if use_cache else None

    def append(self, tokens: Tensor) -> None:
        """Add the next token (B,) of each text."""
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(1)], dim=1)  # (B, S)
        self.lengths = [length + 1 for length in self.lengths]

    def next_logits(self) -> Tensor:
        """Return the logits (B, V) of the token after each text."""
        if max(self.lengths) > self.model.config.block_size:  # lengths do not count padding
            self.drop_older_halves()
        if self.cache is None:
            return self.plain_logits()
        return self.cached_logits(self.cache)

    def drop_older_halves(self) -> None:
        """Drop the older half of the context of each text that is longer than the block size."""
        block_size = self.model.config.block_size
        self.lengths = [n if n <= block_size else block_size // 2 for n in self.lengths]
        self.tokens = self.tokens[:, -max(self.lengths) :]  # (B, S), the newest columns
        if self.cache is not None:
            # an empty cache, because positions start again at the new beginning: the next pass
            # reads all tokens that are left
            self.cache = KVCache(self.capacity)

    def cached_logits(self, cache: KVCache) -> Tensor:
        """Read the tokens that are not in the cache yet, and return the logits of next_logits."""
        # (B, T): the prompts, then one token at a time. `hidden` below adds them to the cache.
        unread = self.tokens[:, cache.length :]
        T = unread.size(1)
        # Rows of different lengths have padding: they need a mask that hides it, and positions that
        # skip it. None means causal attention, and positions that continue the cache.
        longest = max(self.lengths)
        positions: Tensor | None = None
        mask: Tensor | None = None
        if min(self.lengths) < longest:
            # (B,): the column in which the text of each row begins, after its padding
            first_columns = torch.tensor(
                [longest - length for length in self.lengths], device=unread.device
            )
            # (B, T) and (B, 1, T, S)
            positions, mask = positions_and_mask(first_columns, longest, T)
        hidden = self.model.hidden(unread, cache, positions=positions, mask=mask)  # (B, T, C)
        return self.model.logits(hidden[:, -1])  # (B, V), from the last column, where all rows end

    def plain_logits(self) -> Tensor:
        """Return the logits of next_logits by a forward pass over all tokens, as in training."""
        longest = max(self.lengths)  # 4 for the lengths [2, 4]
        # self.tokens is (B, longest). Roll the padding to the right, where causal attention does
        # not see it: 0 0 7 8 -> 7 8 0 0.
        rows = [row.roll(n - longest) for row, n in zip(self.tokens, self.lengths, strict=True)]
        hidden = self.model.hidden(torch.stack(rows))  # (B, longest, C)
        last_columns = torch.tensor(self.lengths, device=hidden.device) - 1  # (B,)
        rows_of_batch = torch.arange(len(rows), device=hidden.device)  # (B,): 0 to B - 1
        return self.model.logits(hidden[rows_of_batch, last_columns])  # (B, C) -> (B, V)


@torch.no_grad()
def cache_agrees(model: GPT) -> bool:
    """Compare the logits with the KV cache with those of a forward pass over all tokens, as in
    training. `model` is the narrow copy that is_proven makes (model/proof.py)."""
    block_size = model.config.block_size
    vocab_size = model.config.vocab_size
    num_new = min(2, block_size - 1)  # tokens after a prompt
    # One text of nearly the full context needs no mask and no positions, two texts of different
    # lengths need both. These are shorter, because attention with a mask takes most of the time,
    # but never empty.
    for lengths in ([block_size - num_new], [block_size // 2, block_size // 8]):
        prompts = [torch.randint(vocab_size, (max(1, length),)).tolist() for length in lengths]
        cached = Context(model, prompts, num_new, use_cache=True)
        plain = Context(model, prompts, num_new, use_cache=False)
        for _ in range(num_new):
            if not agrees(cached.next_logits(), plain.next_logits()):  # up to rounding
                return False
            tokens = torch.randint(vocab_size, (len(lengths),))  # (B,)
            cached.append(tokens)
            plain.append(tokens)
    return True


def draw_uniforms(num_prompts: int, sampling: Sampling, first_index: int = 0) -> Tensor:
    """Return random numbers in [0, 1) (num_prompts, max_new_tokens) for sample_token. They are
    drawn on the CPU, so that they are the same for every device.

    `first_index` is the index of the first prompt in a longer list, from 0.
    """
    # Longer seeds are hashed to 32 bits, so that the product below fits into PyTorch's 64 bits.
    seed = sampling.seed if sampling.seed < 2**32 else hash_seed(f"{sampling.seed}")
    # seeds lie far apart, so that prompt 0 of seed 1 gets other numbers than prompt 1 of seed 0
    first_seed = seed * 1_000_003 + first_index
    uniforms: list[Tensor] = []  # (max_new_tokens,) each
    for index in range(num_prompts):
        # one generator per prompt, so that its numbers do not depend on the size of the batch
        generator = torch.Generator().manual_seed(first_seed + index)
        uniforms.append(torch.rand(sampling.max_new_tokens, generator=generator))
    return torch.stack(uniforms)


def positions_and_mask(first_columns: Tensor, S: int, T: int) -> tuple[Tensor, Tensor]:
    """Return the positions (B, T) and the attention mask (B, 1, T, S) of the last T of S tokens in
    rows with left padding. The text of a row begins in its column of `first_columns` (B,). The mask
    is True where a token may attend. For the columns [2, 0] and S = T = 4, the positions are
    [[0, 0, 0, 1], [0, 1, 2, 3]]."""
    key_columns = torch.arange(S, device=first_columns.device)  # (S,)
    query_columns = key_columns[-T:]  # (T,), of the newest tokens
    positions = (query_columns - first_columns[:, None]).clamp(min=0)  # (B, T), 0 for padding

    is_past = key_columns <= query_columns[:, None]  # (T, S)
    is_text = key_columns >= first_columns[:, None, None]  # (B, 1, S)
    # padding attends to itself, because a softmax over no tokens is NaN
    is_itself = key_columns == query_columns[:, None]
    mask = (is_past & is_text) | is_itself  # (B, T, S)
    return positions, mask.unsqueeze(1)


@dataclass(frozen=True)
class GeneratedTokens:
    """Token ids that a model wrote after a prompt."""

    tokens: list[int]
    """Token ids before `end_id`."""
    end_id: int | None
    """Token id that ended the text; None: the text was cut at max_new_tokens."""


def complete(
    model: GPT,
    prompts: list[list[int]],
    end_ids: frozenset[int],
    sampling: Sampling,
    all_done: Callable[[bool], bool] = bool,
    first_index: int = 0,
) -> list[GeneratedTokens]:
    """Return the tokens that the model writes after each prompt, up to the first of `end_ids`.

    `all_done` (Process.all_done) gets True when all texts of this process have ended, and returns
    True when the texts of all processes have: under FSDP2 a forward pass needs every process. It
    raises Stopped after a signal. The default is for one process. `first_index` is the index of the
    first prompt in a longer list: prompt i draws its random numbers from (seed, first_index + i).
    """
    completions: list[list[int]] = [[] for _ in prompts]  # token ids
    new_tokens = generate(model, prompts, sampling, first_index)  # iterator of token ids (B,)
    while True:
        # up to TOKENS_PER_CHECK tensors (B,) of token ids; empty after max_new_tokens
        columns = list(islice(new_tokens, TOKENS_PER_CHECK))
        if not columns:
            break
        rows = torch.stack(columns, 1).tolist()  # B lists of token ids
        for completion, ids in zip(completions, rows, strict=True):
            completion += ids
        have_ended = all(end_ids.intersection(completion) for completion in completions)
        # `all_done` returns the same on all processes. A process whose texts have ended goes on
        # generating until all processes are done.
        if all_done(have_ended):
            break
    return [cut_at_end(completion, end_ids) for completion in completions]


def cut_at_end(tokens: list[int], end_ids: frozenset[int]) -> GeneratedTokens:
    """Return the tokens before the first of `end_ids`, and that id. If there is none, return all
    tokens and None."""
    for position, token in enumerate(tokens):
        if token in end_ids:
            return GeneratedTokens(tokens[:position], token)
    return GeneratedTokens(tokens, None)
