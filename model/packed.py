"""A GPT for inference on a CPU: its weights are kept in the dtype of the products and in the order
in which oneDNN reads them. A token costs reading them all once, which is half again as fast; the
products of a batch are an eighth faster."""

from functools import cached_property, partial

import torch
import torch.nn as nn
from torch import Tensor

from model import onednn
from model.gpt import GPT


class PackedGPT(GPT):
    """A GPT made of the layers of another, which loses them; their outputs are of `dtype`, as under
    autocast."""

    def __init__(self, model: GPT, dtype: torch.dtype, rows: int) -> None:
        nn.Module.__init__(self)
        self.config, self.transformer = model.config, model.transformer
        if not self.config.tied:
            self.lm_head = model.lm_head
        self.pack = partial(onednn.PackedLinear, dtype=dtype, rows=rows)
        # holds on to no linear layer, so that each is freed as it is replaced
        for module in [m for m in self.modules() if not isinstance(m, nn.Linear)]:
            for name, child in module.named_children():
                if isinstance(child, nn.Linear) and name != "lm_head":
                    setattr(module, name, self.pack(child.weight, child.bias))
        self.eval()

    @cached_property
    def head(self) -> onednn.PackedLinear:
        return self.pack(self.head_weight[: self.config.vocab_size], None)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)


def packed(model: GPT, dtype: torch.dtype, rows: int = 1) -> GPT:
    """The model for inference of about `rows` tokens at a time: a PackedGPT in place of `model`
    where oneDNN has products of `dtype`, else `model` itself."""
    here = onednn.has(model.transformer.wte.weight.device, dtype)
    return PackedGPT(model, dtype, rows) if here else model
