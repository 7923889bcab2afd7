"""Sampling from a GPT with a key/value cache."""

from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

from model.cache import KVCache
from model.gpt import GPT

CHUNK = 16  # tokens that `complete` makes before it looks whether all rows have ended


def choose(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> Tensor:
    """Token ids (B,) drawn from logits (B, V) by inverting the cumulative distribution at
    `uniform` (B,) in [0, 1). Temperature 0 takes the likeliest; exactly top_k survive ties."""
    if temperature == 0:
        return logits.argmax(-1)
    ids = None
    if top_k is not None or top_p is not None:
        logits, ids = logits.topk(min(top_k or logits.size(-1), logits.size(-1)))  # likeliest first
    probabilities = (logits.float() / temperature).softmax(-1)
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
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    use_cache: bool = True,
    use_torch_compile: bool = False,
) -> Iterator[Tensor]:
    """Yields the next token ids (B,) of B prompts, each of one token or more, `max_new_tokens`
    times, without waiting for a GPU.

    Row i draws its random numbers from (seed, i), whatever the other rows. When a row's context is
    full, its older half is dropped and the rest read again; a prompt longer than the context keeps
    its end. `use_cache=False` reads the whole context for each token, and gives the same tokens.
    `use_torch_compile` compiles the reading of one token for the number of prompts and the tokens
    there is room for, rounded up to 64s. On a CPU the weights must not change after that.
    """
    T, device = model.config.block_size, model.transformer.wte.weight.device
    if use_torch_compile:
        one_token = compiled(next_logits, device)
    uniforms = torch.stack(
        [
            torch.rand(
                max_new_tokens, generator=torch.Generator().manual_seed(seed * 1_000_003 + i)
            )
            for i in range(len(prompts))
        ]
    ).to(device)
    prompts = [prompt[-T:] for prompt in prompts]
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]  # in front, so that all end together
    first = torch.tensor(pads, device=device)[:, None]  # (B, 1): where each begins
    rows = [[0] * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]
    context = torch.tensor(rows, device=device)
    room = longest + max_new_tokens
    if use_torch_compile:
        room = -(-room // 64) * 64
    unread, cache = context, KVCache(min(T, room), compiled=use_torch_compile)
    for step in range(max_new_tokens):
        lengths = [context.size(1) - pad for pad in pads]
        if max(lengths) > T:
            lengths = [n if n <= T else max(1, T // 2) for n in lengths]
            pads = [max(lengths) - n for n in lengths]
            first = torch.tensor(pads, device=device)[:, None]
            context = context[:, -max(lengths) :]
            unread, cache = context, KVCache(T, compiled=use_torch_compile)
        if not use_cache:
            unread, cache = context, None
        if use_torch_compile and cache and cache.layers:  # the prompt has been read
            end = context.size(1)
            cache.place = torch.arange(end - 1, end, device=device)
            padding = beside_padding(first, end, unread, cache.capacity)
            logits = one_token(model, unread, cache, **padding)
        else:
            padding = beside_padding(first, context.size(1), unread) if any(pads) else {}
            logits = next_logits(model, unread, cache, **padding)
        token = choose(logits, uniforms[:, step], temperature, top_k, top_p)
        yield token
        unread = token.unsqueeze(1)
        context = torch.cat([context, unread], dim=1)


def next_logits(model: GPT, unread: Tensor, cache: KVCache | None, **where: Tensor) -> Tensor:
    """Logits (B, V) of the token after `unread` (B, T)."""
    return model.logits(model.hidden(unread, cache, **where)[:, -1])


def compiled(function: Callable, device: torch.device) -> Callable:
    """`function`, compiled for inference. On a CPU the weights become part of it, in the order of
    whichever of several matrix products was the fastest in a trial: for one row this reads them as
    fast as memory gives them."""
    if device.type != "cpu":
        return torch.compile(function)
    from torch._inductor import config, select_algorithm  # which take a second

    select_algorithm.PRINT_AUTOTUNE = False
    settings = {"freezing": True, "max_autotune": True, "max_autotune_report_choices_stats": False}
    return config.patch(settings)(torch.compile(function))


def beside_padding(
    first: Tensor, end: int, unread: Tensor, width: int | None = None
) -> dict[str, Tensor]:
    """Positions (B, T) and mask (B, 1, T, end or width) of the last T tokens `unread`, which end at
    `end`, of rows that begin at `first` (B, 1), after padding."""
    here = torch.arange(end - unread.size(1), end, device=unread.device)  # (T,)
    seen = torch.arange(width or end, device=unread.device)
    mask = (seen <= here[:, None]) & (seen >= first[:, None])  # (B, T, end)
    mask |= seen == here[:, None]  # padding sees itself: a softmax over nothing is not a number
    return {"positions": (here - first).clamp(min=0), "mask": mask[:, None]}


def complete(model: GPT, prompt: list[int], eot: int, rows: int = 1, **options) -> list[list[int]]:
    """`rows` continuations of one prompt, each up to its end-of-text token; options of generate."""
    texts: list[list[int]] = [[] for _ in range(rows)]
    tokens = generate(model, [prompt] * rows, **options)
    while any(eot not in text for text in texts) and (some := list(islice(tokens, CHUNK))):
        for text, more in zip(texts, torch.stack(some, 1).tolist(), strict=True):
            text += more
    return [text[: text.index(eot)] if eot in text else text for text in texts]
