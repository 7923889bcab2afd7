import json

import pytest
from conftest import ROOT, environment, gap, launch, losses, script, torchrun, train_args

from training.checkpoint import load_checkpoint
from utils.logger import read_metrics

MODES = ("none", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def reference(shards, tmp_path_factory):
    """20 steps of one process, four micro-steps each, a checkpoint at every fifth."""
    run = tmp_path_factory.mktemp("reference")
    script(*train_args(shards, run, 20, "--save_every", 5, "--keep_last", 9))
    return run


def test_a_chain_of_shardings_and_world_sizes_continues_one_curve(shards, reference, tmp_path):
    before = reference
    for step, processes, sharding in ((5, 4, "zero3"), (10, 2, "zero1"), (15, 1, "none")):
        run = tmp_path / sharding
        args = train_args(
            shards, run, 20, "--resume", before / f"checkpoints/model_step_{step:06d}.pt",
            "--sharding", sharding, "--micro_batch_size", 2, "--save_every", 5, "--keep_last", 9,
        )  # fmt: skip
        torchrun(processes, *args)
        assert sorted(losses(run)) == list(range(1, 21)) and gap(run, reference) < 1e-4
        before = run


def test_each_process_holds_its_share_and_steps_alike():
    # 4 processes; dimensions divide by 4, so shares are exact quarters
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    done = torchrun(4, "tests/sharded_state.py", *MODES, env=env)
    found = json.loads(done.stdout.splitlines()[-1])
    whole = found["none"]["whole"]
    assert found["none"]["optimizer"] == 2 * whole and found["none"]["parameters"] == whole
    assert {found[sharding]["residual"] for sharding in MODES} == {"torch.float32"}
    for sharding in MODES[1:]:
        assert found[sharding]["optimizer"] == 2 * whole / 4
        assert found[sharding]["parameters"] == found[sharding]["gradients"] == whole / 4
        assert abs(found[sharding]["norm"] - found["none"]["norm"]) < 1e-5


def test_two_machines_shard_within_and_replicate_across(shards, reference, tmp_path):
    args = ("--sharding", "zero2", "--micro_batch_size", 2, "--save_every", 0)
    launch([train_args(shards, tmp_path, 20, *args)] * 4, local_world_size=2, codes=[0] * 4)
    assert gap(tmp_path, reference) < 1e-4
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 20


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
    torchrun(processes, *train_args(shards, tmp_path, 20, *args))
    assert gap(tmp_path, reference) < 1e-4 and len(losses(tmp_path)) == 20
    assert "skipped" not in read_metrics(tmp_path / "logs")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["cheap", "block"])
def test_sharded_compiled_and_recomputed_equals_one_process(shards, reference, tmp_path, what):
    args = ("--sharding", "zero3", "--activation_checkpointing", what, "--use_torch_compile")
    torchrun(2, *train_args(shards, tmp_path, 20, *args, "--micro_batch_size", 2))
    assert gap(tmp_path, reference) < 1e-4 and len(losses(tmp_path)) == 20
