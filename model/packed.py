"""A GPT for inference on a CPU: its weights are kept in the dtype of the products and in the order
in which oneDNN reads them. A token costs reading them all once, which is half again as fast; the
products of a batch are an eighth faster."""

import copy

import torch
import torch.nn as nn
from torch import Tensor

from model import onednn
from model.gpt import GPT


class PackedGPT(GPT):
    """A GPT with the weights of another; its layers' outputs are of `dtype`, as the other's are
    under autocast."""

    def __init__(self, model: GPT, dtype: torch.dtype, rows: int) -> None:
        nn.Module.__init__(self)
        self.config = model.config
        shared = {id(p): p for p in model.parameters()}  # not copied
        self.transformer = copy.deepcopy(model.transformer, shared)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear):
                    setattr(module, name, onednn.PackedLinear(child, dtype, rows))
        head = nn.Linear(self.config.n_embd, self.config.vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(self.transformer.wte.weight[: self.config.vocab_size])
        self.head = onednn.PackedLinear(head, dtype, rows)
        self.eval()

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)


def packed(model: GPT, dtype: torch.dtype, rows: int = 1) -> GPT:
    """The model for inference of about `rows` tokens at a time: PackedGPT where oneDNN has products
    of `dtype`, else `model` itself."""
    here = onednn.has(model.transformer.wte.weight.device, dtype)
    return PackedGPT(model, dtype, rows) if here else model
