"""Initial weights of a new model, and models that are built without weights.

`initial_weights` describes each weight as Rows (model/rows.py), whose numbers are drawn when a row
is read. So each process of a sharded run draws only the rows that it holds, and the numbers are the
same for any number of processes.
"""

from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.config import GPTConfig
from model.rows import Rows
from utils.seeds import hash_seed

Model = TypeVar("Model", bound=nn.Module)  # GPT or a subclass; model/gpt.py imports this file

# Rows that one generator draws (a chunk). With fewer rows, seeding generators would take most of
# the time.
ROWS_PER_SEED = 64


def initial_weights(model: nn.Module, config: GPTConfig, seed: int) -> dict[str, Rows]:
    """Return the weights of a new model by parameter name: matrices from Normal(0, 0.02), biases
    and the table of n-grams of 0, gains of 1. Numbers are drawn only when rows are read.

    GPT-2 scales the 2 L matrices whose output is added to the residual stream by 1 / sqrt(2 L).
    """
    weights: dict[str, Rows] = {}  # Rows: weights[name][i:j] draws rows i to j of a tensor
    for name, p in model.named_parameters():
        # The table of n-gram embeddings starts at 0, so it has no effect before it is trained.
        if name.endswith("bias") or "ngrams" in name:
            weights[name] = constant(0.0, p.shape)
        elif p.dim() == 1:  # gain of a norm
            weights[name] = constant(1.0, p.shape)
        else:
            std = 0.02
            if "c_proj" in name:  # its output is added to the residual stream
                std *= (2 * config.n_layer) ** -0.5
            weights[name] = NormalRows(seed, name, p.shape, std)
    return weights


def draw_weights(model: nn.Module, config: GPTConfig) -> None:
    """Initialize the weights of a new model, in place, with a seed that torch.manual_seed
    determines. Do nothing within build_without_weights."""
    if next(model.parameters()).is_meta:  # within build_without_weights
        return
    seed = int(torch.randint(2**31, ()))
    for name, rows in initial_weights(model, config, seed).items():
        # rows[:] draws all rows of a parameter, as a Tensor on the CPU
        model.get_parameter(name).data.copy_(rows[:])


class NormalRows:
    """Matrix of normal random numbers with a standard deviation of `std`, drawn row by row.

    A row depends only on the seed, the name of the matrix and the index of the row, so every
    process draws the same. Seeds have 32 bits: among the 166,000 chunks of gpt3-175b, about three
    pairs share a seed.
    """

    def __init__(self, seed: int, name: str, shape: torch.Size, std: float) -> None:
        self.seed = seed
        self.name = name
        self.shape = shape
        self.std = std

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        # device="cpu", because torch's default device may be another
        indices = torch.arange(self.shape[0], device="cpu")[rows]  # (r,)
        drawn = torch.empty(len(indices), self.shape[1], device="cpu")
        chunks = indices // ROWS_PER_SEED  # (r,)
        for chunk in chunks.unique().tolist():
            chunk_seed = hash_seed(f"{self.seed} {self.name} {chunk}")
            generator = torch.Generator("cpu").manual_seed(chunk_seed)
            # draw the whole chunk even for one row, so that a row depends only on its index
            normal = torch.randn(ROWS_PER_SEED, self.shape[1], generator=generator, device="cpu")
            is_here = chunks == chunk  # (r,)
            drawn[is_here] = normal[indices[is_here] % ROWS_PER_SEED]
        return drawn.mul_(self.std)


def constant(value: float, shape: torch.Size) -> Rows:
    """Return a tensor that repeats one value and takes the memory of one number."""
    return torch.tensor(value, device="cpu").expand(shape)


# models whose weights come from a file, from another model, or row by row


class SkipInit(TorchFunctionMode):
    """Leave new parameters uninitialized. On the device "meta", torch.nn.init would import
    PyTorch's compiler, which takes two seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Skip the functions of torch.nn.init, whose results no module here uses, and call every
        other function of PyTorch as usual."""
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **kwargs or {})


def build_without_weights(model_class: type[Model], config: GPTConfig) -> Model:
    """Return a model on the device "meta", whose parameters have shapes but no memory. Callers
    count its parameters, or then give it weights by `load_state_dict(..., assign=True)` or by
    fill_model of training/parallel/own_rows.py."""
    with torch.device("meta"), SkipInit():
        return model_class(config)


def rebuild(model: Model, config: GPTConfig) -> Model:
    """Return a model with the weights of `model` and the architecture `config`, which differs only
    in a smaller vocabulary or less padding. Embedding and head lose their last rows; both models
    share all other weights."""
    state = model.state_dict()  # the tensors themselves, not copies
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in state:  # a tied model has no lm_head
            # cloned, because a view would keep the whole table in memory
            state[name] = state[name][: config.padded_vocab_size].clone()
    new_model = build_without_weights(type(model), config)
    new_model.load_state_dict(state, assign=True)
    return new_model
