"""Models on the device "meta": shapes without memory, which take their weights from elsewhere."""

import torch
from torch.overrides import TorchFunctionMode

from model.config import GPTConfig
from model.gpt import GPT


class SkipInit(TorchFunctionMode):
    """Leave new parameters uninitialised: torch.nn.init on "meta" imports the slow compiler."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs or {})


def empty_gpt(config: GPTConfig, kind: type[GPT] = GPT) -> GPT:
    """Return a GPT, or a subclass of it, on the device "meta", for weights from a file."""
    with torch.device("meta"), SkipInit():
        return kind(config)


def resized(model: GPT, config: GPTConfig) -> GPT:
    """Return a GPT of `config`, with fewer positions or tokens, or another dropout, and the weights
    of `model`."""
    state = model.state_dict()
    rows = {
        "transformer.wpe.weight": config.block_size,
        "transformer.wte.weight": config.padded_vocab_size,
        "lm_head.weight": config.padded_vocab_size,
    }
    for name in rows.keys() & state.keys():
        state[name] = state[name][: rows[name]].contiguous()
    copy = empty_gpt(config, type(model))
    copy.load_state_dict(state, assign=True)
    return copy.requires_grad_()
