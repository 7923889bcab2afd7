import json

import pytest
from conftest import ROOT, environment, gap, launch, losses, script, torchrun, train_args

from utils.logger import read_metrics

MODES = ("none", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def reference(shards, tmp_path_factory):
    """12 steps of one process, four micro-steps each, a checkpoint at every fourth."""
    run = tmp_path_factory.mktemp("reference")
    script(*train_args(shards, run, 12, "--save_every", 4, "--keep_last", 9))
    return run


def test_a_chain_of_machines_and_shardings_continues_one_curve(shards, reference, tmp_path):
    """Two machines of two processes, which shard within and replicate across; two processes; one"""
    before = reference
    for step, processes, sharding in ((4, 4, "zero2"), (8, 2, "zero3"), (10, 1, "none")):
        run = tmp_path / sharding
        args = train_args(
            shards, run, 12, "--resume", before / f"checkpoints/model_step_{step:06d}.pt",
            "--sharding", sharding, "--micro_batch_size", 2, "--save_every", 2, "--keep_last", 9,
        )  # fmt: skip
        launch([args] * processes, local_world_size=min(2, processes), codes=[0] * processes)
        assert sorted(losses(run)) == list(range(1, 13)) and gap(run, reference) < 1e-4
        before = run


def test_each_process_holds_its_share_and_steps_alike():
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    done = torchrun(2, "tests/sharded_state.py", *MODES, env=env)
    measured = json.loads(done.stdout.splitlines()[-1])
    whole = measured["none"]["whole"]
    for sharding, figures in measured.items():
        assert figures["residual"] == "torch.float32"
        assert abs(figures["norm"] - measured["none"]["norm"]) < 1e-5
        share = whole if sharding == "none" else whole / 2  # dimensions divide by 2
        assert figures["parameters"] == figures["gradients"] == share
        assert figures["optimizer"] == 2 * share


def test_machines_that_do_not_share_their_checkpoints_are_told_so(shards, reference, tmp_path):
    ours = train_args(shards, reference, 30, "--resume", "auto", "--micro_batch_size", 2)
    theirs = [*ours, "--checkpoint_dir", tmp_path / "elsewhere", "--log_dir", tmp_path]
    texts = launch([ours, theirs], local_world_size=1, codes=[2, 2])
    assert all("a folder that all machines share?" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("sharding", MODES)
def test_any_sharding_equals_one_process(shards, reference, tmp_path, sharding, processes):
    args = ("--sharding", sharding, "--micro_batch_size", 2, "--save_every", 0)
    torchrun(processes, *train_args(shards, tmp_path, 12, *args))
    assert gap(tmp_path, reference) < 1e-4 and len(losses(tmp_path)) == 12
    assert "skipped" not in read_metrics(tmp_path / "logs")


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["cheap", "block"])
def test_sharded_compiled_and_recomputed_equals_one_process(
    shards, reference, tmp_path, checkpointing
):
    args = ("--activation_checkpointing", checkpointing, "--sharding", "zero3")
    args += ("--use_torch_compile", "--micro_batch_size", 2)
    torchrun(2, *train_args(shards, tmp_path, 12, *args))
    assert gap(tmp_path, reference) < 1e-4 and len(losses(tmp_path)) == 12
