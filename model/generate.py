"""Sampling from a GPT with a key/value cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.gpt import GPT, KVCache


def choose(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Token ids (B,) drawn from logits (B, V) by inverting the cumulative distribution at
    `uniform` (B,) in [0, 1). Temperature 0 takes the likeliest; exactly top_k survive ties."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    ids = None
    if top_k is not None or top_p is not None:
        logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))  # likeliest first
    probabilities = logits.softmax(-1)
    if top_p is not None:  # Holtzman et al. 2020: the smallest set that reaches top_p
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (before < top_p)
    cumulative = probabilities.cumsum(-1)
    place = uniform.unsqueeze(-1) * cumulative[:, -1:]
    pick = torch.searchsorted(cumulative, place, right=True).clamp_(max=logits.size(-1) - 1)
    return (pick if ids is None else ids.gather(-1, pick)).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yields the next token ids (B,) of `prompt` (B, P), P >= 1, `max_new_tokens` times.

    Row i draws its random numbers from (seed, i), whatever the other rows. When the context is
    full, its older half is dropped and the rest read again; a prompt longer than the context keeps
    its end. `use_cache=False` reads the whole context for each token, and gives the same tokens.
    """
    T = model.config.block_size
    uniforms = torch.stack(
        [
            torch.rand(
                max_new_tokens, generator=torch.Generator().manual_seed(seed * 1_000_003 + i)
            )
            for i in range(len(prompt))
        ]
    ).to(prompt.device)
    context = prompt[:, -T:]
    unread, cache = context, KVCache(T)
    for step in range(max_new_tokens):
        if context.size(1) > T:
            context = context[:, -max(1, T // 2) :]
            unread, cache = context, KVCache(T)
        x = model.hidden(unread, cache) if use_cache else model.hidden(context)
        logits = model.logits(x[:, -1])  # (B, V)
        token = choose(logits, uniforms[:, step], temperature, top_k, top_p)
        yield token
        unread = token.unsqueeze(1)
        context = torch.cat([context, unread], dim=1)


def complete(model: GPT, prompt: list[int], eot: int, rows: int = 1, **options) -> list[list[int]]:
    """`rows` continuations of one prompt, each up to its end-of-text token; options of generate."""
    device = model.transformer.wte.weight.device
    texts: list[list[int]] = [[] for _ in range(rows)]
    ended: set[int] = set()
    for tokens in generate(model, torch.tensor([prompt] * rows, device=device), **options):
        for row, token in enumerate(tokens.tolist()):
            if token == eot:
                ended.add(row)
            if row not in ended:
                texts[row].append(token)
        if len(ended) == rows:
            break
    return texts
