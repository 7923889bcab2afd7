"""Training on several processes: wrap the model, accumulate with one gradient reduction a step,
gather and load the whole model's state by parameter name."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from utils.checkpoint import CheckpointError
from utils.distributed import Process


def wrap(model: nn.Module, process: Process) -> nn.Module:
    """The module to train: the model itself on one process, DistributedDataParallel on several."""
    if process.world_size == 1:
        return model
    device_ids = [process.device.index] if process.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)


def accumulating(module: nn.Module, last: bool) -> AbstractContextManager:
    """Around forward and backward of a micro-step: gradients are reduced on the last alone."""
    if last or not isinstance(module, DistributedDataParallel):
        return nullcontext()
    return module.no_sync()


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """Optimizer state by parameter name, on the CPU."""
    return {
        name: {key: value.cpu() for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state
    }


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Tensor]]
) -> None:
    """The opposite of optimizer_state. Raises CheckpointError where names or shapes do not
    fit."""
    parameters = dict(model.named_parameters())
    if set(state) - set(parameters) or (state and set(parameters) - set(state)):
        raise CheckpointError("the checkpoint's optimizer state is of other parameters")
    for name, values in state.items():
        for key, value in values.items():
            if value.dim() and value.shape != parameters[name].shape:
                raise CheckpointError(
                    f"the checkpoint's optimizer state {key} of {name} has shape "
                    f"{tuple(value.shape)}, the parameter {tuple(parameters[name].shape)}"
                )
        device = parameters[name].device  # the fused optimizer keeps its step count there too
        optimizer.state[parameters[name]] = {k: v.clone().to(device) for k, v in values.items()}
