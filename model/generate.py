"""Sampling from a GPT with a key/value cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from model.cache import KVCache
from model.gpt import GPT

CHUNK = 16  # tokens between two tests of `complete` for the end of all rows


@dataclass(frozen=True)
class Sampling:
    """How to continue prompts. Row i draws its random numbers from (seed, first_row + i) alone."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens, exactly k where some are tied."""
    top_p: float | None = None
    """Draw from the smallest set of tokens that reaches this probability (Holtzman et al. 2020)."""
    seed: int = 0
    first_row: int = 0


def sample_token(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """Draw ids (B,) from logits (B, V): the inverse CDF at `uniform` (B,) in [0, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    ids = None
    if sampling.top_k is not None or sampling.top_p is not None:
        V = logits.size(-1)
        logits, ids = logits.topk(min(sampling.top_k or V, V))  # likeliest first
    probabilities = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (before < sampling.top_p)
    cumulative = probabilities.cumsum(-1)
    place = uniform.unsqueeze(-1) * cumulative[:, -1:]
    pick = torch.searchsorted(cumulative, place, right=True).clamp_(max=logits.size(-1) - 1)
    return (pick if ids is None else ids.gather(-1, pick)).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPT,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    use_cache: bool = True,
    decode: Callable[..., Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield the next token ids (B,) of B prompts, each of one token or more, without a host sync.

    Where the context is full, its older half is dropped and the rest read again; a prompt longer
    than the context keeps its end. `use_cache=False` reads the whole context for each token and
    gives the same tokens, and so does `decode`: decode_token, as on GPUs, or compiled from it.
    """
    T, device = model.config.block_size, model.transformer.wte.weight.device
    uniforms = draw_uniforms(len(prompts), sampling).to(device)
    prompts = [prompt[-T:] for prompt in prompts]
    lengths = [len(prompt) for prompt in prompts]
    rows = [[0] * (max(lengths) - len(prompt)) + prompt for prompt in prompts]
    context = torch.tensor(rows, device=device)  # (B, S): rows end together
    first = torch.tensor([max(lengths) - n for n in lengths], device=device)  # (B,)
    if decode is None and context.is_cuda:
        decode = decode_token
    capacity = T if decode else min(T, max(lengths) + sampling.max_new_tokens)
    unread, cache = context, KVCache(capacity) if use_cache else None
    for uniform in uniforms.unbind(1):
        if max(lengths) > T:
            lengths = [n if n <= T else max(1, T // 2) for n in lengths]
            first = torch.tensor([max(lengths) - n for n in lengths], device=device)
            context = context[:, -max(lengths) :]
            unread = context
            if cache:
                cache.restart()
        if cache and cache.column is not None:
            token = decode(model, cache, unread, first, uniform, sampling)
        else:
            padded = min(lengths) < max(lengths)
            where = positions_and_mask(first, context.size(1), unread.size(1)) if padded else {}
            logits = model.logits(model.hidden(unread, cache, **where)[:, -1])
            token = sample_token(logits, uniform, sampling)
            if cache and decode:
                cache.become_static()
        yield token
        new = token.unsqueeze(1)
        context = torch.cat([context, new], dim=1)
        unread = new if use_cache else context
        lengths = [n + 1 for n in lengths]


def decode_token(
    model: GPT, cache: KVCache, token: Tensor, first: Tensor, uniform: Tensor, sampling: Sampling
) -> Tensor:
    """Return the ids (B,) that follow `token` (B, 1) in rows that begin at column `first` (B,) of a
    static cache. Tensors have the same shapes for every token, so that one graph serves all."""
    column = torch.arange(cache.capacity, device=token.device)
    mask = (column <= cache.column) & (column >= first[:, None])  # (B, S)
    positions = cache.column - first[:, None]  # (B, 1)
    x = model.hidden(token, cache, positions=positions, mask=mask[:, None, None])
    return sample_token(model.logits(x[:, -1]), uniform, sampling)


def draw_uniforms(rows: int, sampling: Sampling) -> Tensor:
    """Return random numbers in [0, 1) (rows, max_new_tokens)."""
    first = sampling.seed * 1_000_003 + sampling.first_row
    sources = [torch.Generator().manual_seed(seed) for seed in range(first, first + rows)]
    return torch.stack([torch.rand(sampling.max_new_tokens, generator=g) for g in sources])


def positions_and_mask(first: Tensor, S: int, T: int) -> dict[str, Tensor]:
    """Return positions (B, T) and mask (B, 1, T, S) of the last T of S tokens in rows with left
    padding up to `first` (B,)."""
    key = torch.arange(S, device=first.device)
    query, first = key[-T:], first[:, None]
    mask = (key <= query[:, None]) & (key >= first[..., None])  # (B, T, S)
    mask |= key == query[:, None]  # padding attends to itself: a softmax over nothing is NaN
    return {"positions": (query - first).clamp(min=0), "mask": mask[:, None]}


@dataclass(frozen=True)
class Continuation:
    """Text of a model after a prompt."""

    tokens: list[int]
    """Without the one that ended it."""
    end_id: int | None
    """The token that ended it; None: it was cut at the longest length."""


def complete(
    model: GPT,
    prompts: list[list[int]],
    end_ids: frozenset[int],
    sampling: Sampling,
    all_done: Callable[[bool], bool] = lambda done: done,
    decode: Callable[..., Tensor] | None = None,
) -> list[Continuation]:
    """Return what follows each prompt up to the first of `end_ids`. `all_done`, called every CHUNK
    tokens, tells whether every process is done, as forward passes can be collectives; what it
    raises ends the texts. `decode` is that of generate."""
    texts: list[list[int]] = [[] for _ in prompts]
    tokens = generate(model, prompts, sampling, decode=decode)
    while some := list(islice(tokens, CHUNK)):
        for text, more in zip(texts, torch.stack(some, 1).tolist(), strict=True):
            text += more
        if all_done(all(not end_ids.isdisjoint(text) for text in texts)):
            break
    return [cut_at_end(text, end_ids) for text in texts]


def cut_at_end(tokens: list[int], end_ids: frozenset[int]) -> Continuation:
    """Return the tokens before the first of `end_ids`."""
    for place, token in enumerate(tokens):
        if token in end_ids:
            return Continuation(tokens[:place], token)
    return Continuation(tokens, None)
