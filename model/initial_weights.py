"""How a new model gets its weights, and how one is built without any.

A weight is described first, as Rows (model/rows.py), and drawn when its rows are read. So a run
whose weights are divided among processes draws on each only the rows that it holds, and the numbers
are the same for any number of processes.
"""

from typing import TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.config import GPTConfig
from model.rows import Rows
from utils.seeds import hash_seed

Model = TypeVar("Model", bound=nn.Module)  # GPT, which is defined above this file

# Rows that one generator draws, a chunk: with fewer, seeding generators would take the time.
ROWS_PER_SEED = 64


def initial_weights(model: nn.Module, config: GPTConfig, seed: int) -> dict[str, Rows]:
    """Return a new model's weights by name: matrices from Normal(0, 0.02), biases of 0, gains of 1.
    Nothing is drawn before rows are read.

    GPT-2 scales the matrices that add to the residual stream, 2 L in number, by 1 / sqrt(2 L).
    """
    weights: dict[str, Rows] = {}
    for name, p in model.named_parameters():
        # Embeddings of n-grams begin at 0, as if there were none.
        if name.endswith("bias") or "ngrams" in name:
            weights[name] = constant(0.0, p.shape)
        elif p.dim() == 1:  # gain of a norm
            weights[name] = constant(1.0, p.shape)
        else:
            std = 0.02
            if "c_proj" in name:  # adds to the residual stream
                std *= (2 * config.n_layer) ** -0.5
            weights[name] = NormalRows(seed, name, p.shape, std)
    return weights


def draw_weights(model: nn.Module, config: GPTConfig) -> None:
    """Give a new model its weights, in place, by a seed that follows from torch.manual_seed. A
    model of build_without_weights stays without."""
    if next(model.parameters()).is_meta:
        return
    seed = int(torch.randint(2**31, ()))
    for name, rows in initial_weights(model, config, seed).items():
        # rows[:] draws all rows of a parameter, as a Tensor on the CPU
        model.get_parameter(name).data.copy_(rows[:])


class NormalRows:
    """Matrix of normal numbers with a standard deviation of `std`. A row follows from the seed, the
    name of the matrix and the index of the row, whoever draws it and whatever is drawn before.
    Seeds have 32 bits: of the 166,000 chunks of rows of a 175B some three pairs have one seed."""

    def __init__(self, seed: int, name: str, shape: torch.Size, std: float) -> None:
        self.seed = seed
        self.name = name
        self.shape = shape
        self.std = std

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        # device="cpu", because torch's default device may be another one
        indices = torch.arange(self.shape[0], device="cpu")[rows]  # (r,)
        drawn = torch.empty(len(indices), self.shape[1], device="cpu")
        chunks = indices // ROWS_PER_SEED  # (r,)
        for chunk in chunks.unique().tolist():
            chunk_seed = hash_seed(f"{self.seed} {self.name} {chunk}")
            generator = torch.Generator("cpu").manual_seed(chunk_seed)
            # draw the whole chunk even for one row, so that a row's numbers follow from its index
            normal = torch.randn(ROWS_PER_SEED, self.shape[1], generator=generator, device="cpu")
            is_here = chunks == chunk  # (r,)
            drawn[is_here] = normal[indices[is_here] % ROWS_PER_SEED]
        return drawn.mul_(self.std)


def constant(value: float, shape: torch.Size) -> Rows:
    """Return a tensor of one value, which takes the memory of one number."""
    return torch.tensor(value, device="cpu").expand(shape)


# models whose weights come from a file, from another model, or row by row


class SkipInit(TorchFunctionMode):
    """Leave new parameters uninitialised: torch.nn.init on the device "meta" would import
    PyTorch's compiler, which takes two seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Do nothing for functions of torch.nn.init, whose results no module here uses, and call
        every other function of PyTorch as usual."""
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **kwargs or {})


def build_without_weights(model_class: type[Model], config: GPTConfig) -> Model:
    """Return a model on the device "meta", with shapes and no memory: to count its parameters, or
    for weights that `load_state_dict(..., assign=True)` or fill_model gives it."""
    with torch.device("meta"), SkipInit():
        return model_class(config)


def rebuild(model: Model, config: GPTConfig) -> Model:
    """Return a model of `config`, which has fewer tokens than `model` or less padding, with the
    weights of `model`: embedding and head lose their last rows, and all others are shared."""
    state = model.state_dict()  # the tensors themselves, not copies
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in state:  # a tied model has no lm_head
            # cloned, because a view would keep the whole table in memory
            state[name] = state[name][: config.padded_vocab_size].clone()
    new_model = build_without_weights(type(model), config)
    new_model.load_state_dict(state, assign=True)
    return new_model
