from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import train_options
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from model.config import GPTConfig
from model.execution import Execution
from model.gpt import GPT
from model.recipes import Recipe, parse_recipe
from training.optim import make_optimizers
from training.parallel import clip_grad_norm, gather_state, load_optimizer_state, sync_gradients
from utils.devices import autocast

CONFIG = GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8)
CPU = torch.device("cpu")
X = 37 * torch.arange(16).view(2, 8) % 64


def stepped(seed=0):
    """Return a model and its optimizer after one step."""
    torch.manual_seed(seed)
    model = GPT(CONFIG)
    (optimizer,) = make_optimizers(model, train_options(), Recipe())
    model(X, X).backward()
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, 0])
def test_gradients_are_clipped_as_by_pytorch(max_norm):
    (ours, _), (theirs, _) = stepped(), stepped()
    norm = clip_grad_norm(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or torch.inf)
    assert norm == expected > 1e-3
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_saving_before_the_first_update_leaves_the_optimizer_as_it_was():
    model = GPT(CONFIG)
    optimizers = make_optimizers(model, train_options(), Recipe())
    weights, state = gather_state(model, optimizers)
    assert state == {} and not optimizers[0].state
    load_optimizer_state(model, optimizers, state)
    assert set(weights) == set(dict(model.named_parameters())) and not optimizers[0].state


def test_gradients_are_reduced_on_the_last_micro_step_alone(tmp_path):
    reductions = []

    def count(state, bucket):
        reductions.append(step)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(GPT(CONFIG))
        wrapped.register_comm_hook(None, count)
        for step in range(8):  # two steps of four micro-steps, as train.py runs them
            with sync_gradients(wrapped, "none", last=step % 4 == 3):
                wrapped(X, X).backward()
    finally:
        dist.destroy_process_group()
    assert set(reductions) == {3, 7}


@pytest.mark.parametrize("checkpointing", ["cheap", "block"])
@pytest.mark.parametrize(("dtype", "dropout"), [(torch.float32, 0.2), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("recipe", ["gpt2", "speedrun,ngram_rows=1000", "llama,n_kv_head=1"])
def test_recomputation_changes_no_gradient(checkpointing, dtype, dropout, recipe):
    gradients, flops = {}, {}
    idx = torch.randint(0, 257, (2, 16))
    shape = GPTConfig(n_layer=2, n_head=2, **parse_recipe(recipe).shape(32, 16, 257))
    for mode in ("none", checkpointing):
        torch.manual_seed(0)
        model = GPT(replace(shape, dropout=dropout), Execution(mode))
        with FlopCounterMode(display=False) as counter:
            with autocast(CPU, dtype, keep_weights=False):
                loss = model(idx, idx)
            loss.backward()
        gradients[mode] = {name: p.grad for name, p in model.named_parameters()}
        flops[mode] = counter.get_total_flops()
    for name, gradient in gradients["none"].items():
        assert torch.equal(gradient, gradients[checkpointing][name]), name
    if checkpointing == "block":
        assert flops["block"] > flops["none"]
    elif not dropout:  # no matmul is done twice; attention with dropout has no kernel to keep
        assert flops["cheap"] == flops["none"]
