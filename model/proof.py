"""Proofs of shortcuts: each is compared once with the plain model, on a narrow copy of it.

A shortcut computes the same as the plain model in another way: faster, with less memory, or in
another program. Code that knows only the shortcut goes wrong without an error when someone changes
the model. So `is_proven` compares both where a shortcut starts, and a shortcut that differs is not
taken. The copy has the model's class and its config but few channels: it takes milliseconds for
any size of model, and needs no other process and no GPU.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from model.config import GPTConfig
from model.initial_weights import own_random_numbers

# Lines for the user go through logging; in model/ only find_checkpoint prints. Python writes them
# to stderr, and `start` in utils/distributed.py turns them off on all processes but the main one.
notes = logging.getLogger("notes")

Output = TypeVar("Output")
# model/gpt.py imports this file (through model/loss.py), so it cannot import the class.
GPT = Any

# Largest logits of the narrow copy are about three times this standard deviation: soft-capping at
# 15 or 30 has to show.
LOGITS_STD = 8.0


def agrees(shortcut: Tensor, plain: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Return whether two results differ only by rounding in `dtype`: relative to the largest
    magnitude, by 1e-4 in float32, and by 3 % in bfloat16. NaN never agrees."""
    tolerance = 0.3 * torch.finfo(dtype).eps ** 0.5
    if shortcut.shape != plain.shape:
        return False
    difference = (shortcut.float() - plain.float()).abs().max()
    return bool(difference <= tolerance * plain.float().abs().max())


def narrow_config(config: GPTConfig, max_kv_heads: int) -> GPTConfig:
    """Return a config with few channels, heads, layers and token ids, but with the same context and
    the same techniques: 32 channels, 2 heads, 4 layers and 509 token ids for GPT-2 124M and
    `max_kv_heads` of 2."""
    num_kv_heads = min(config.num_kv_heads, max_kv_heads)  # max_kv_heads is 2, or --tensor_parallel
    queries_per_key = min(config.n_head // config.num_kv_heads, 2)
    n_head = num_kv_heads * queries_per_key
    # Even, for rotary positions. All heads together have 24 channels or more, because an edit may
    # divide the channels, such as a convolution with groups=4.
    head_size = max(4, 2 * (16 // n_head))
    n_embd = n_head * head_size  # 32 for 1, 2, 4 or 8 heads; 24 for 6
    n_inner: int | None = None
    if config.n_inner is not None:
        n_inner = n_embd  # another width than 4 n_embd
    # Four layers show a change of only some layers, such as of every fourth one. Attention takes
    # most of the time, so a context of more than 1,024 tokens gets fewer layers.
    max_layers = max(2, min(4, 2**22 // config.block_size**2))
    return replace(  # block_size stays, because a window that is nearly as wide has to show
        config,
        n_embd=n_embd,
        n_inner=n_inner,
        n_head=n_head,
        n_kv_head=num_kv_heads,
        n_layer=min(config.n_layer, max_layers),
        vocab_size=min(config.vocab_size, 509),  # padded to 512
    )


def narrow_copy(model_class: type[nn.Module], config: GPTConfig, max_kv_heads: int) -> GPT:
    """Return a new model of the class and the techniques of another one, with few channels, in
    float32 on the CPU and in evaluation mode. Its weights are such that logits reach about +-20."""
    model: GPT = model_class(narrow_config(config, max_kv_heads))
    # Every parameter gets random numbers. What begins at 0 or 1, such as a gate, would hide what it
    # does.
    with torch.no_grad():
        for parameter in model.parameters():
            # outputs of a matrix (out, in) are about as large as its inputs
            num_inputs = parameter.size(-1) if parameter.dim() > 1 else 1
            parameter.normal_(std=num_inputs**-0.5)
        # so far logits are about 1, too small for soft-capping to show; LOGITS_STD is 8
        model.head_weight.mul_(LOGITS_STD)
    return model.float().eval()


def is_proven(shortcut_name: str, comparison: Callable[[GPT], bool], model: GPT) -> bool:
    """Return whether the plain model and a shortcut, such as "the KV cache", agree.

    `comparison` takes a narrow copy of `model`, in float32, and compares both. The same function
    object runs once for a class of models and a config, without changing the global random numbers.
    If the shortcut differs, or the copy raises an error, a note on stderr says so.
    """
    # @cache keeps the result for these arguments; mypy does not know that classes are hashable
    return prove(shortcut_name, comparison, type(model), model.config)  # type: ignore[arg-type]


def on_narrow_copy(
    function: Callable[[GPT], Output],
    model_class: type[nn.Module],
    config: GPTConfig,
    max_kv_heads: int = 2,
) -> Output:
    """Call a function with a narrow copy of a model of this class and config, and return its
    result. Weights, random numbers, autocast and threads are the same for every caller and on every
    process, and the global random numbers do not change."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the copy is so small that threads would only wait for each other
    try:
        with (
            torch.device("cpu"),
            own_random_numbers(seed=0),
            torch.autocast("cpu", enabled=False),
            torch.enable_grad(),
        ):
            return function(narrow_copy(model_class, config, max_kv_heads))
    finally:
        torch.set_num_threads(num_threads)


@cache
def prove(
    shortcut_name: str,
    comparison: Callable[[GPT], bool],
    model_class: type[nn.Module],
    config: GPTConfig,
) -> bool:
    """Compare a shortcut with the plain model, and print a note if they differ (is_proven)."""
    reason = "gives another result than the plain model"
    try:
        if on_narrow_copy(comparison, model_class, config):
            return True
    except Exception as error:  # an edited model may raise anything
        reason = f"cannot be compared with the plain model ({type(error).__name__}: {error})"
    # on stderr of the main process: "note: the KV cache gives another result ..."
    notes.warning("note: %s %s, so it is not used", shortcut_name, reason)
    return False
