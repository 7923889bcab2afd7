"""How a model gets its first weights, and models that are built without weights.

`GPT._init_weights` in model/gpt.py says how the layers begin, and a constructor may give any
parameter or buffer another beginning. This file makes that work for models larger than memory:
while a model is built, its layers get no memory, and each function of torch.nn.init is only noted.
The numbers are drawn when a process reads them (Rows, model/rows.py). So each process of a sharded
run draws only the rows that it holds, and the numbers are the same for any number of processes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from model.config import GPTConfig
from model.rows import RowIndex, Rows
from utils.errors import UserError
from utils.seeds import hash_seed

Model = TypeVar("Model", bound=nn.Module)  # GPT or a subclass; model/gpt.py imports this file

# Rows that one generator draws (a chunk). With fewer rows, seeding generators would take most of
# the time.
ROWS_PER_SEED = 64

# Functions that ask a tensor for its shape or the like, and so need none of its numbers.
METADATA = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_contiguous,
    Tensor.__hash__,
    Tensor.requires_grad_,
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.grad_fn.__get__,  # type: ignore[union-attr]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}
# Functions that give all entries of a tensor the same number.
CONSTANT = (Tensor.zero_, Tensor.fill_, nn.init.constant_)


@contextmanager
def own_random_numbers(seed: int) -> Iterator[None]:
    """Return a context with the CPU's random numbers of a seed, after which the global ones
    continue. Random numbers of GPUs do not change."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
        yield


@dataclass(frozen=True)
class NormalRows:
    """Normal random numbers with a standard deviation of `std`, drawn row by row: row i of a matrix
    is its i-th vector, row i of a vector its i-th number.

    A row depends only on the seed, the name of the parameter and the index of the row, so every
    process draws the same. Seeds have 32 bits: among the 167,000 chunks of gpt3-175b, about three
    pairs share a seed.
    """

    seed: int
    name: str
    shape: torch.Size
    std: float

    def __getitem__(self, rows: RowIndex) -> Tensor:
        row_shape = self.shape[1:]  # (768,) of (50304, 768); () of a vector
        # device="cpu", because torch's default device may be another
        indices = torch.arange(self.shape[0], device="cpu")[rows]  # (r,), of the rows to return
        drawn = torch.empty(indices.shape + row_shape, device="cpu")  # (r, ...)
        chunk_of_row = indices // ROWS_PER_SEED  # (r,): 0 for the rows 0 to 63, 1 for 64 to 127
        for chunk in chunk_of_row.unique().tolist():
            chunk_seed = hash_seed(f"{self.seed} {self.name} {chunk}")  # "1337 lm_head.weight 0"
            generator = torch.Generator("cpu").manual_seed(chunk_seed)
            # draw the whole chunk even for one row, so that a row depends only on its index
            normal = torch.randn(ROWS_PER_SEED, *row_shape, generator=generator, device="cpu")
            in_chunk = chunk_of_row == chunk  # (r,)
            drawn[in_chunk] = normal[indices[in_chunk] % ROWS_PER_SEED]  # row 65: normal[1]
        return drawn.mul_(self.std)


@dataclass(frozen=True)
class Fill:
    """A function of PyTorch that overwrites a whole tensor, such as torch.nn.init.normal_."""

    function: Callable[..., Tensor]
    arguments: tuple
    """Positional arguments after the tensor: (0.0,) of x.fill_(0.0)."""
    options: dict
    """Named arguments: {"mean": 0.0, "std": 0.02}."""

    def __call__(self, x: Tensor) -> None:
        with torch.no_grad():
            self.function(x, *self.arguments, **self.options)

    @property
    def is_default_of_layer(self) -> bool:
        """True for PyTorch's defaults: of the weight and the bias of a linear layer or convolution,
        and of an embedding."""
        if self.function is nn.init.normal_:
            return self.options["std"] == 1  # nn.Embedding's
        # nn.Linear's weight, and its bias
        return self.function in (nn.init.kaiming_uniform_, nn.init.uniform_)

    def rows(self, seed: int, name: str, shape: torch.Size) -> Rows:
        """Return what this function gives the parameter `name`: a Tensor, which has all numbers, or
        NormalRows, which draw theirs when they are read. Both meet the protocol Rows."""
        if self.function is nn.init.normal_ and self.options["mean"] == 0 and len(shape) > 0:
            return NormalRows(seed, name, shape, self.options["std"])
        drawn_shape = shape
        if self.function in CONSTANT:
            drawn_shape = torch.Size([])  # one number, repeated, takes no memory
        x = torch.empty(drawn_shape, device="cpu")
        with own_random_numbers(hash_seed(f"{seed} {name}")):
            self(x)  # runs the function, which overwrites x
        return x.expand(shape)  # a view


class DeferredInit(TorchFunctionMode):
    """Context in which a model is built: the parameters of its layers get no memory.

    All layers of PyTorch make a parameter by torch.empty, which here returns a tensor on the device
    "meta". A function that fills such a parameter (normal_, zeros_, ...) is noted, and runs when
    the numbers are needed. Before anything else that a constructor does with a parameter, the
    parameter gets memory. Other tensors, such as torch.zeros(C) or a table of frequencies, are as
    usual.
    """

    current: ClassVar["DeferredInit | None"] = None
    """The context of the model that is being built; None outside of constructors."""

    def __init__(self) -> None:
        super().__init__()
        # The functions that fill each parameter, in order; the last one gives its content:
        # {wte.weight: [normal_ of nn.Embedding, normal_ of GPT._init_weights], ...}. A parameter
        # whose numbers are used gets memory, and is removed from here.
        self.fills: dict[Tensor, list[Fill]] = {}

    def __enter__(self) -> "DeferredInit":
        DeferredInit.current = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        DeferredInit.current = None
        super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Do for each function of PyTorch that a constructor calls what the class describes. In
        here PyTorch turns the mode off, so the calls below do not come back to this method."""
        kwargs = dict(kwargs or {})
        # how each layer of PyTorch makes a parameter, which gets no memory yet
        if func is torch.empty and kwargs.get("device") is None:
            return torch.empty(*args, **kwargs | {"device": "meta"})
        if func in METADATA:  # reads no numbers of a tensor
            return func(*args, **kwargs)
        # torch.nn.init passes on the tensor as tensor=..., the methods of a tensor as args[0]. From
        # here on it is args[0] in both cases.
        is_init = getattr(func, "__module__", "") == "torch.nn.init"
        if is_init:
            args = (kwargs.pop("tensor"), *args)
        overwrites = is_init or func in CONSTANT
        if overwrites and isinstance(args[0], nn.Parameter):
            # only noted; the numbers come later, from `materialize` or initial_rows
            self.fills.setdefault(args[0], []).append(Fill(func, args[1:], kwargs))
            return args[0]
        # everything else may need the numbers of its tensors
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self.materialize(x)
        return func(*args, **kwargs)

    def materialize(self, x: Tensor) -> None:
        """Give a tensor memory, if it has none, and the numbers that are noted for it, if any."""
        if x.is_meta:
            give_memory(x)
        if x in self.fills:
            last_fill = self.fills.pop(x)[-1]  # it overwrites the earlier ones
            last_fill(x)

    def initial_rows(self, model: nn.Module, seed: int) -> dict[str, Rows]:
        """Return the first content of the parameters and buffers in the state dict of a model, by
        name. Normal random numbers are drawn when rows are read, others now. Raises UserError for a
        parameter without numbers."""
        weights: dict[str, Rows] = {}
        # keep_vars=True gives the parameters themselves, the keys of `fills`
        for name, x in model.state_dict(keep_vars=True).items():
            if x in self.fills:
                last_fill = self.fills[x][-1]
                weights[name] = last_fill.rows(seed, name, x.shape)  # NormalRows, or a Tensor
            elif x.is_meta:
                raise UserError(
                    f"{name} has no first numbers: torch.empty or a lazy layer made it, and no "
                    "constructor fills it"
                )
            else:
                weights[name] = x.detach().cpu()  # computed by a constructor, or a buffer
        return weights


def give_memory(x: Tensor) -> None:
    """Give a tensor new memory on the default device, without content. Whoever refers to `x` still
    does."""
    # not torch.empty_like, which for the device "meta" imports PyTorch's compiler
    content = torch.empty(x.shape, dtype=x.dtype, device=torch.get_default_device())
    if isinstance(x, nn.Parameter):
        content = nn.Parameter(content, x.requires_grad)
    # Exchanges what both Python objects refer to, so `x` gets the memory of `content`. Not
    # torch.utils.swap_tensors: it would exchange attributes of `x`, too, and it refuses a tensor
    # with weak references, which nn.LSTM has to its weights.
    torch._C._swap_tensor_impl(x, content)  # type: ignore[attr-defined]


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give the parameters of a model memory on `device`, without content. Buffers move there with
    their content: no checkpoint has those that are not persistent."""
    # a new parameter for each of the model's, so that modules still share what they shared
    new_parameter_of: dict[Tensor, nn.Parameter] = {}
    for p in model.parameters():
        new_parameter_of[p] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            setattr(module, name, new_parameter_of[p])
        # Buffers are real tensors, unlike the parameters, which may be on "meta".
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def has_default(x: Tensor) -> bool:
    """Return True for a weight or bias that still has PyTorch's default: neither the constructor of
    its layer's owner nor a function that made the layer has given it another beginning. Only while
    a model is built."""
    deferred = DeferredInit.current
    assert deferred is not None, "weights have defaults only within deferred_init"
    fills = deferred.fills.get(x, [])  # those so far; the first is the layer's own
    return len(fills) == 1 and fills[0].is_default_of_layer


@contextmanager
def deferred_init(model: nn.Module) -> Iterator[None]:
    """Return a context for the constructor of a model: its layers get their weights at the end of
    the context, when `model` has said by functions of torch.nn.init how they begin. The numbers
    follow torch.manual_seed. Within new_model or build_without_weights, layers get none."""
    if DeferredInit.current is not None:
        yield
        return
    with DeferredInit() as deferred:
        yield
    if torch.get_default_device().type == "meta":
        return
    # Rows by name; NormalRows are drawn when `[...]` below reads them
    weights = deferred.initial_rows(model, seed=int(torch.randint(2**31, (), device="cpu")))
    for name, x in model.state_dict(keep_vars=True).items():
        if x in deferred.fills:
            give_memory(x)
            x.detach().copy_(weights[name][...])


def new_model(
    model_class: type[Model], config: GPTConfig, seed: int
) -> tuple[Model, dict[str, Rows]]:
    """Return a new model whose layers have no memory (they are on the device "meta"), and the first
    content of its parameters and buffers by name. fill_model of training/parallel/own_rows.py
    allocates the model and fills them in."""
    # the seed is for constructors that draw numbers themselves: torch.randn(C)
    with own_random_numbers(hash_seed(f"{seed}")), DeferredInit() as deferred:
        model = model_class(config)
    return model, deferred.initial_rows(model, seed)


def build_without_weights(model_class: type[Model], config: GPTConfig) -> Model:
    """Return a model whose parameters have shapes but no memory, for callers that count its
    parameters, or give it other weights by `load_state_dict(..., assign=True)`. Buffers have their
    content, because files lack those that are not persistent."""
    with DeferredInit():
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
    smaller_model = build_without_weights(type(model), config)
    smaller_model.load_state_dict(state, assign=True)
    return smaller_model
