import pytest
import torch
import torch.distributed as dist
from conftest import train_options
from torch.nn.parallel import DistributedDataParallel

from model.config import GPTConfig
from model.gpt import GPT
from recipes import Recipe
from training.optimizer_state import fill_optimizers, group_values, state_by_parameter
from training.optimizers import make_optimizers
from training.parallel.data_parallel import clip_grad_norm, sync_gradients

CONFIG = GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8)
X = 37 * torch.arange(16).view(2, 8) % 64


@pytest.mark.parametrize("max_norm", [1e-3, 1e3, 0])
def test_gradients_are_clipped_as_by_pytorch(max_norm):
    ours, theirs = GPT(CONFIG), GPT(CONFIG)
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model(X, X).backward()
    norm = clip_grad_norm(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or torch.inf)
    assert norm == expected > 1e-3
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


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
            with sync_gradients(wrapped, "none", is_last=step % 4 == 3):
                wrapped(X, X).backward()
    finally:
        dist.destroy_process_group()
    assert set(reductions) == {3, 7}


def test_saving_before_the_first_update_leaves_the_optimizer_as_it_was():
    model = GPT(CONFIG)
    optimizers = make_optimizers(model, train_options(), Recipe())
    state, values = state_by_parameter(model, optimizers), group_values(model, optimizers)
    assert state == values == {} and not optimizers[0].state
    fill_optimizers(model, optimizers, state, values)
    assert not optimizers[0].state


def test_a_changed_value_of_a_group_resumes_for_an_optimizer_without_state():
    model = GPT(CONFIG)
    optimizers = make_optimizers(model, train_options(), Recipe())
    fill_optimizers(model, optimizers, {}, {"transformer.wte.weight": {"count": 3}})
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert [group["count"] for group in groups if "count" in group] == [3]
    assert not any(optimizer.state for optimizer in optimizers)
