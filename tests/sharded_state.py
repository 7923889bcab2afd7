"""Under torchrun: how many bytes of parameters, gradients and optimizer state this process holds
for each --sharding, and the gradient norm of a step; rank 0 prints them as JSON."""

import json
import os
import sys

import torch
from conftest import train_options
from torch.distributed.tensor import DTensor

from model.config import GPTConfig
from model.gpt import GPT
from model.recipes import Recipe
from training import parallel
from training.optim import make_optimizers
from utils import distributed
from utils.devices import autocast

CONFIG = GPTConfig(block_size=16, vocab_size=256, n_layer=3, n_head=2, n_embd=64)


def held(tensors):
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def measure(process, sharding):
    torch.manual_seed(0)
    model = GPT(CONFIG)
    whole = held(model.parameters())
    wrapped = parallel.wrap(model, process, sharding, torch.float32)
    (optimizer,) = make_optimizers(model, train_options(), Recipe())
    x = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(1))
    x = x.chunk(process.world_size)[process.rank]
    for number, part in enumerate(x.chunk(2)):
        with parallel.sync_gradients(wrapped, sharding, last=number == 1):
            wrapped(part, part).backward()
    norm = parallel.clip_grad_norm(model, 1.0)
    optimizer.step()
    moments = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    return {
        "whole": whole,
        "parameters": held(model.parameters()),
        "gradients": held(p.grad for p in model.parameters()),
        "optimizer": held(moments),
        "norm": norm.item(),
        "residual": residual_dtype(process, sharding),
    }


def residual_dtype(process, sharding):
    """Return the dtype that the second LayerNorm of a block reads where matmuls are in bfloat16."""
    model, seen = GPT(CONFIG), []
    wrapped = parallel.wrap(model, process, sharding, torch.bfloat16)
    model.transformer.h[1].ln_2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.zeros(2, 16, dtype=torch.long)
    with autocast(process.device, torch.bfloat16):
        wrapped(x, x)
    return str(seen[0].dtype)


process = distributed.start("cpu")
found = {sharding: measure(process, sharding) for sharding in sys.argv[1:]}
if process.all_agree(True) and process.is_main:  # none leaves before the others are done with it
    print(json.dumps(found), flush=True)
distributed.stop()
os._exit(0)  # as the scripts end: gloo's threads can abort the interpreter's own end
