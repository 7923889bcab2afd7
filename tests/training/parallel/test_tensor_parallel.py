"""Tensor parallelism: losses, gradients and checkpoints are those of one process."""

import pytest
import torch
from conftest import bad, losses, script, slow, torchrun, train_args, weights

from model.config import GPTConfig
from model.gpt import GPT
from training.muon import orthogonalize
from training.parallel.tensor_parallel import row_order
from utils.logger import read_metrics

# four micro-steps of one process are two of two parts of the data; every gradient is clipped
FLAGS = ("--n_head", 4, "--grad_clip", 0.2, "--max_lr", 1e-3)
COMPILED = ("--use_torch_compile",)
RECOMPUTED = ("--activation_checkpointing", "block")


def tensor_parallel(number, sharding="zero2"):
    return ("--tensor_parallel", number, "--sharding", sharding)


def curve(run):
    """Return a row of loss and gradient norm for each step."""
    train = read_metrics(run / "logs")["train"]
    return torch.tensor([(row["loss"], row["grad_norm"]) for row in train], dtype=torch.float64)


def assert_same(run, reference):
    """Check that steps, losses, gradient norms and the last weights are those of another run."""
    torch.testing.assert_close(curve(run), curve(reference), rtol=0, atol=1e-5)
    ours, theirs = weights(run), weights(reference)
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("recipe", ["gpt2", slow("llama,n_kv_head=2"), slow("modern")])
def test_a_run_is_that_of_one_process_from_degree_to_degree(shards, tmp_path, recipe):
    """Two parts of the data and two processes for each; resumed by one process, and that by two.
    gpt2 has biases, llama a stack of unequal matrices and SwiGLU, modern Muon and NorMuon."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    # a constant rate after warmup, which does not depend on the number of steps
    flags = (*FLAGS, "--recipe", recipe, "--min_lr", 1e-3, "--warmup_steps", 1)
    flags += ("--eval_every", 3, "--val_tokens", 512)
    script(*train_args(shards, whole, 9, *flags))
    for last_step, processes, degree in (
        (3, 4, tensor_parallel(2)),
        (6, 1, tensor_parallel(1, "none")),
        (9, 2, tensor_parallel(2, "zero3")),
    ):
        args = train_args(shards, run, last_step, *flags, "--resume", "auto", *degree)
        torchrun(processes, *args)
    assert curve(whole)[:, 1].min() > 0.2  # the norm, which is clipped
    assert_same(run, whole)
    assert losses(run, "val") == pytest.approx(losses(whole, "val"), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, machine, flags",
    [
        (4, 4, tensor_parallel(2, "zero1")),
        (4, 4, tensor_parallel(2, "zero3")),
        (4, 4, tensor_parallel(4)),  # one part of the data
        (4, 2, tensor_parallel(2)),  # two machines, which are replicas
        (4, 2, (*tensor_parallel(2), "--shard_across", 4)),  # ... or divide one copy
        (6, 6, (*tensor_parallel(2), "--total_batch_size", 768)),  # uneven shards
        (4, 4, (*tensor_parallel(2), "--activation_checkpointing", "block")),
        (4, 4, (*tensor_parallel(2), "--activation_checkpointing", "cheap")),
        (2, 2, (*tensor_parallel(2), "--use_torch_compile")),
    ],
)
def test_every_way_to_divide_gives_one_model(shards, tmp_path, processes, machine, flags):
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    batch = flags[4:6] if "--total_batch_size" in flags else ()
    script(*train_args(shards, whole, 6, *FLAGS, *batch))
    args = train_args(shards, divided, 6, *FLAGS, *flags)
    torchrun(processes, *args, local_world_size=machine)
    assert_same(divided, whole)


REPLICAS = """
import os, sys
sys.path.insert(0, os.getcwd())
import torch, torch.distributed as dist, train
from model.layers import ScaledDotProduct
from training.saver import Saver

attend = ScaledDotProduct.forward
masks = []

def attend_and_note(self, q, k, v, mask=None):
    # with equal weights for all tokens and values of 1, the output tells how many were dropped
    if self.training:
        state = torch.get_rng_state()
        masks.append(attend(self, 0 * q.detach(), 0 * k.detach(), torch.ones_like(v), mask))
        torch.set_rng_state(state)
    return attend(self, q, k, v, mask)

def are_equal(tensor):
    both = [torch.empty_like(tensor), torch.empty_like(tensor)]
    dist.all_gather(both, tensor.contiguous())
    return torch.equal(*both)

def compare(saver):
    # the second save is the last one; outside of the blocks' linear layers weights are equal
    if saver.run.progress.step == 0:
        return finish(saver)
    replicas = are_equal(saver.model.transformer.wte.weight.to_local())
    heads = any(are_equal(mask) for mask in masks)
    os._exit(0 if replicas and not heads else 3)

finish = Saver.finish
Saver.finish = compare
if "--use_torch_compile" not in sys.argv:
    ScaledDotProduct.forward = attend_and_note
train.main()
"""


@pytest.mark.parametrize("flags", [(), slow(COMPILED), slow(RECOMPUTED)])
def test_dropout_is_common_to_what_a_group_has_in_common_alone(shards, tmp_path, flags):
    """What all processes of a group have is dropped alike, attention in each head for itself."""
    program = tmp_path / "replicas.py"
    program.write_text(REPLICAS)
    more = (*FLAGS, *tensor_parallel(2), "--dropout", 0.2, "--eval_every", 0, *flags)
    torchrun(2, program, *train_args(shards, tmp_path, 3, *more)[1:])


def test_what_does_not_divide_is_a_sentence(shards, tmp_path):
    def args(*flags):
        return train_args(shards, tmp_path, 2, *flags)

    bad(args("--tensor_parallel", 2), "need --sharding zero1, zero2 or zero3", tmp_path)
    bad(args(*tensor_parallel(2)), "does not divide the processes of a machine, 1", tmp_path)
    # --n_head 2; a dry run asks before processes connect
    said = script(*args(*tensor_parallel(3), "--dry_run", "--device", "3xt4"), code=2).stderr
    assert "must divide the 2 key/value heads" in said


def test_each_process_gets_its_heads_of_every_stacked_matrix():
    config = GPTConfig(n_head=4, n_embd=8, n_kv_head=2, n_inner=6, activation="swiglu")
    block = GPT(config).transformer.h[0]
    order = row_order(block.attn.c_attn.fused_rows, 2)
    # rows of queries are 0 to 7, of keys 8 to 11, of values 12 to 15; a head has two
    assert order.tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    gate_and_value = row_order(block.mlp.c_fc.fused_rows, 2)
    assert gate_and_value.tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]


def test_muon_sees_the_whole_matrices_of_reordered_rows():
    sizes = (8, 4, 4)
    stack = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    order = row_order(sizes, 2)
    update = orthogonalize(stack[:, order], (4, 2, 2))
    assert torch.equal(update, orthogonalize(stack, sizes)[:, order])
    assert not torch.allclose(update, orthogonalize(stack[:, order], sizes), atol=0.1)


def test_a_model_that_division_changes_is_refused():
    said = torchrun(2, "tests/divide_edited.py")[0].stdout
    lines = said.splitlines()
    assert lines[:6] == ["GPT: divided"] * 3 + ["SoftCapped: divided"] * 3
    message = "WithQueryScale: 2 processes cannot share the blocks of this model"
    assert all(line.startswith(message) for line in lines[6:]) and len(lines) == 9
