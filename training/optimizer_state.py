"""What optimizers keep from step to step: how checkpoints save it, and how a run resumes it.

An optimizer may keep anything in its `state` (tensors of any shape, numbers, lists and dicts of
them) and numbers in its groups. A tensor that is divided among processes like its parameter is
saved by rows (training/parallel/own_rows.py), any other tensor whole. It must then be equal on all
processes. `check_state` refuses, after the first step, what a checkpoint would lose.
"""

import zlib
from collections.abc import Iterator, Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from model.formats.checkpoint import PLAIN_VALUES, flatten
from model.gpt import GPT
from recipes import Recipe
from training.parallel.own_rows import fill
from utils.distributed import Process
from utils.errors import UserError

# Entries of a group that are not its state: the parameters, the rate that set_learning_rates sets
# in each step, and `remember_groups`' own entry.
NOT_STATE = ("params", "lr", "initial")
# Types of attributes that do not change, or that checkpoints have: flags, settings, parameters.
UNCHANGING = (bool, str, type(None), torch.dtype, torch.device, Recipe, nn.Parameter)


def state_by_parameter(model: GPT, optimizers: list[Optimizer]) -> dict[str, dict]:
    """Return the state of optimizers by the name of the parameter, then by its own name, such as
    {"transformer.h.0.mlp.c_fc.weight": {"momentum_buffer": (3072, 768) float32}, ...}. Nothing is
    copied. It is {} before the first step."""
    state: dict[str, dict] = {}
    for name, p in model.named_parameters():
        for optimizer in optimizers:
            if p in optimizer.state:
                state[name] = optimizer.state[p]
    # Else a checkpoint would lose state. Saver.save calls free_gathered_weights before: while FSDP2
    # has gathered weights, named_parameters has other tensors than the optimizers train.
    assert len(state) == sum(len(optimizer.state) for optimizer in optimizers)
    return state


def groups_of(optimizers: list[Optimizer]) -> Iterator[dict]:
    """Yield the parameter groups of all optimizers."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


def remember_groups(optimizers: list[Optimizer]) -> None:
    """Keep in each group of new optimizers the values that it begins with, for group_values and
    fill_optimizers."""
    for group in groups_of(optimizers):
        # {"lr_scale": 1.0, "weight_decay": 0.1, ...}; deepcopy: a step may change a value in place
        group["initial"] = {key: deepcopy(group[key]) for key in group if key not in NOT_STATE}


def group_values(model: GPT, optimizers: list[Optimizer]) -> dict[str, dict]:
    """Return the values of groups that have changed since the optimizers were made, such as a
    counter, by the name of each parameter of the group: {"lm_head.weight": {"count": 3}, ...}. By
    names, because another number of processes may make other groups."""
    name_of = {p: name for name, p in model.named_parameters()}
    values_by_parameter: dict[str, dict] = {}
    for group in groups_of(optimizers):
        changed: dict[str, object] = {}
        for key in group:
            # Without "params", "lr" and "initial". Compare texts: `!=` of tensors is no bool.
            if key not in NOT_STATE and repr(group[key]) != repr(group["initial"].get(key)):
                changed[key] = group[key]
        if changed:
            for p in group["params"]:
                values_by_parameter[name_of[p]] = changed
    return values_by_parameter


def create_state(optimizers: list[Optimizer]) -> None:
    """Let new optimizers create their state, in the memory and with the division that they choose,
    by a step with gradients and a learning rate of 0."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def fill_state(model: GPT, name: str, created: dict, saved: dict) -> dict:
    """Return the state of the parameter `name`, such as {"momentum_buffer": (3072, 768) float32},
    with the content of `saved`, whose tensors are whole. A tensor that the optimizer has `created`
    in the same shape is filled in place."""
    # Pairs of path and leaf, and the structure. A path is a tuple of keys: for momentum_buffer
    # (MappingKey("momentum_buffer"),), for the second tensor of a list (MappingKey("factors"),
    # SequenceKey(1)).
    created_by_path = dict(tree_flatten_with_path(created)[0])
    saved_leaves, structure = tree_flatten_with_path(saved)
    leaves: list[object] = []
    for path, leaf in saved_leaves:
        x = created_by_path.get(path)  # perhaps a DTensor; None if not created
        if not isinstance(leaf, Tensor):  # a number or text
            leaves.append(leaf)
        elif isinstance(x, Tensor) and x.shape == leaf.shape:
            fill(model, name, x, leaf)  # in place: the rows of `leaf` that this process holds
            leaves.append(x)
        else:
            # Not created by create_state's step, whose gradients are 0, or in another shape: every
            # process keeps it whole. Without a copy it would, on a CPU, stay mapped and keep the
            # checkpoint's file open.
            leaves.append(leaf.to(model.get_parameter(name).device, copy=True))
    return tree_unflatten(leaves, structure)


def fill_optimizers(
    model: GPT,
    optimizers: list[Optimizer],
    saved_state: Mapping[str, dict],
    saved_values: Mapping[str, dict],
) -> None:
    """Resume optimizers: fill in the part of the state that this process holds, and the values of
    groups. `saved_state` has what state_by_parameter returned when the checkpoint was saved, with
    each divided tensor whole, `saved_values` what group_values returned. Both are empty before the
    first step."""
    if not saved_state and not saved_values:
        return
    create_state(optimizers)
    name_of = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group |= group["initial"]  # create_state may have counted a step
            for p in group["params"]:
                name = name_of[p]
                group |= saved_values.get(name, {})  # {"count": 3}, the same for the whole group
                # Take out what create_state made, and put it back filled. A parameter that no
                # gradient has reached (an unused expert's) has nothing saved, and keeps no state.
                created = optimizer.state.pop(p, {})  # {"exp_avg": Tensor, ...}
                if name in saved_state:
                    optimizer.state[p] = fill_state(model, name, created, saved_state[name])


# the check after the first step


def attributes_of(optimizer: Optimizer) -> dict[str, list]:
    """Return what an optimizer keeps in attributes of its own, by the name of the attribute: copies
    of numbers and tensors, and the types of objects that may change unseen, such as {"count": [3],
    "seen": [set]}. No checkpoint has them."""
    attributes: dict[str, list] = {}
    for name, attribute in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        attributes[name] = []
        for leaf in tree_leaves(attribute):
            # constants (a flag, a dtype, a function), and parameters, which checkpoints have
            if isinstance(leaf, UNCHANGING) or callable(leaf):
                continue
            if isinstance(leaf, Tensor):
                leaf = leaf.detach().cpu().tolist()  # a copy, to compare with later
            elif not isinstance(leaf, int | float):
                leaf = type(leaf)
            attributes[name].append(leaf)
    return attributes


def find_unsaved(
    model: GPT, optimizers: list[Optimizer], attributes_before: list[dict[str, list]]
) -> str | None:
    """Return what a checkpoint would lose of the optimizers on this process, None if nothing.
    `attributes_before` is what attributes_of returned before the first step, by optimizer."""
    parameters = set(model.parameters())
    for optimizer, before in zip(optimizers, attributes_before, strict=True):
        class_name = type(optimizer).__name__
        for name, leaves in attributes_of(optimizer).items():
            # attributes_of gives the type of an object that may change unseen, such as `set`
            has_objects = any(isinstance(leaf, type) for leaf in leaves)
            if has_objects or leaves != before.get(name):
                return f"{class_name}.{name} may change: keep it in `state` or in a group"
        if not parameters.issuperset(optimizer.state):
            return f"{class_name}.state has an entry that is of no parameter"
    for values in group_values(model, optimizers).values():
        for key, value in values.items():
            if not isinstance(value, PLAIN_VALUES):  # bool, int, float, str, None
                return f"{key} of a group is no number: keep it in `state`"
    for name, state in state_by_parameter(model, optimizers).items():
        for leaf in tree_leaves(state):
            if not isinstance(leaf, (Tensor, *PLAIN_VALUES)):
                return f"the state of {name} has a {type(leaf).__name__}"
        rows_shape = model.get_parameter(name).shape[:1]  # (50304,), or () for a single number
        for key, x in flatten({name: state}).items():  # "lm_head.weight exp_avg", its tensor
            # own_rows.py finds the rows of a process by those of the parameter
            if isinstance(x, DTensor) and x.shape[:1] != rows_shape:
                if any(placement.is_shard() for placement in x.placements):
                    return f"{key} is divided among processes, but has other rows than {name}"
    return None


def check_state(
    model: GPT,
    optimizers: list[Optimizer],
    attributes_before: list[dict[str, list]],
    process: Process,
) -> None:
    """Raise UserError on every process if a checkpoint would lose state of the optimizers. Call it
    after the first step that was not skipped. `attributes_before` is what attributes_of returned
    before it, such as {"count": [3]} for each optimizer."""
    with process.raise_on_all():
        unsaved = find_unsaved(model, optimizers, attributes_before)  # a message, or None
        if unsaved is not None:
            raise UserError(f"this run could not be resumed: {unsaved}")
    if process.world_size > 1:
        process.check_equal(
            checksum_of_state(model, optimizers),
            "this run could not be resumed: the processes keep different optimizer state, of which "
            "a checkpoint would hold one process's",
        )


def checksum_of_state(model: GPT, optimizers: list[Optimizer]) -> int:
    """Return a checksum of what all processes must keep alike: the names, shapes and dtypes of all
    tensors, and the content of those that are not divided, which the main process saves."""
    checksum = 0
    for key, x in flatten(state_by_parameter(model, optimizers)).items():  # "...wte.weight exp_avg"
        checksum = zlib.crc32(f"{key} {x.shape} {x.dtype}".encode(), checksum)
        if not isinstance(x, DTensor):
            # as bytes, because NumPy has no bfloat16
            tensor_bytes = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
            checksum = zlib.crc32(tensor_bytes.numpy(), checksum)
    return checksum
