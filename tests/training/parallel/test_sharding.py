import shutil

import pytest
from conftest import bad, gap, losses, run_ranks, script, slow, torchrun, train_args, user_error

from data.manifest import read_manifest, write_manifest
from model.formats.checkpoint import BEST, LAST, load_checkpoint
from utils.distributed import count_shards


@pytest.fixture(scope="module")
def reference(shards, tmp_path_factory):
    """6 steps of one process, four micro-steps each."""
    run = tmp_path_factory.mktemp("reference")
    script(*train_args(shards, run, 6))
    return run


@pytest.mark.parametrize(
    "recipe, max_lr",
    [
        ("gpt2", 3e-3),
        # also the state of Muon and NorMuon, which is scattered and gathered
        slow("modern", 0.02),
    ],
)
def test_a_chain_of_machines_and_shardings_continues_one_curve(shards, tmp_path, recipe, max_lr):
    whole, run = tmp_path / "whole", tmp_path / "run"
    # a constant rate after warmup, which does not depend on the number of steps
    flags = ("--recipe", recipe, "--max_lr", max_lr, "--min_lr", max_lr, "--warmup_steps", 1)
    flags += ("--eval_every", 0)
    script(*train_args(shards, whole, 15, *flags))
    for last_step, processes, per_machine, sharding, shard_across in (
        (3, 4, 1, "zero1", 2),  # four machines hold two copies
        (6, 4, 2, "zero2", 2),  # two machines hold a copy each
        (9, 4, 2, "zero3", 4),  # ... or one in common
        (12, 2, 2, "zero3", 2),
        (15, 1, 1, "none", 1),
    ):
        more = ("--sharding", sharding, "--shard_across", shard_across, "--micro_batch_size", 2)
        args = train_args(shards, run, last_step, *flags, *more, "--resume", "auto")
        torchrun(processes, *args, local_world_size=per_machine)
    assert losses(run) == pytest.approx(losses(whole), abs=1e-4)


def test_shards_that_do_not_divide_are_a_sentence_before_processes_connect(
    shards, tmp_path, monkeypatch
):
    launch = {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**launch, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    args = train_args(shards, tmp_path, 2, "--shard_across")
    bad([*args, 4], "--shard_across need --sharding zero1, zero2 or zero3")
    message = "must divide the 8 processes and be a multiple of the 2 processes of a machine"
    for more in ((), ("--dry_run",)):
        bad([*args, 3, "--sharding", "zero2", *more], message)
    for num_shards in (1, 6, 16):
        with user_error(message):
            count_shards(8, 2, 1, num_shards)
    with user_error("does not divide the processes of a machine, 4"):
        count_shards(12, 8, 8, None)  # machines of 8 and 4


def test_machines_of_eight_and_four_divide_a_copy_among_four():
    assert count_shards(12, 8, 1, None) == 4  # as 12xh100 has


def test_machines_with_other_files_are_told_so(shards, reference, tmp_path):
    """By what the files hold: a copy in another place will do."""
    ours = train_args(shards, reference, 8, "--resume", "auto", "--micro_batch_size", 2)
    other, copy, changed = (tmp_path / name for name in ("other", "copy", "changed"))
    shutil.copytree(shards, copy)
    shutil.copytree(shards, changed)
    manifest = read_manifest(changed)
    last_val = [entry for entry in manifest.shards if entry.split == "val"][-1]
    last_val.sha256 = "of another text"
    write_manifest(changed, manifest)
    script(*train_args(shards, other, 6, "--seed", 8))
    elsewhere = ["--checkpoint_dir", other / "checkpoints", "--log_dir", other]
    begun = train_args(shards, tmp_path / "new", 2, "--micro_batch_size", 2, "--sharding", "zero2")
    best = "checkpoints/model_best.pt"
    for first, second in (
        (ours, [*ours, *elsewhere]),
        (ours, [*ours, "--data_dir", changed]),
        ([*begun, "--init_from", reference / best], [*begun, "--init_from", other / best]),
    ):
        for rank in run_ranks([first, second], code=2, local_world_size=1):
            assert "the processes have different" in rank.stderr and "Traceback" not in rank.stderr
    assert not list((tmp_path / "new").rglob("*.json*"))
    best = shutil.copy(reference / "checkpoints/model_best.pt", tmp_path)
    elsewhere = [*begun, "--data_dir", copy, "--init_from", best]
    begun += ["--init_from", reference / "checkpoints/model_best.pt"]
    run_ranks([begun, elsewhere], local_world_size=1)


def test_machines_need_a_common_folder_only_where_they_divide_one_copy(shards, reference, tmp_path):
    def machines(first, second, *flags):
        args = ("--micro_batch_size", 2, "--sharding", "zero2", "--val_tokens", 512, *flags)
        runs = [train_args(shards, tmp_path / name, 6, *args) for name in (first, second)]
        return [runs[0], runs[0], runs[1], runs[1]]

    run_ranks(machines("one", "two"), local_world_size=2)  # the second one is a replica
    assert losses(tmp_path / "one") == pytest.approx(losses(reference), abs=1e-4)
    checkpoints = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.pt")}
    assert checkpoints == {"one/checkpoints/model_best.pt", "one/checkpoints/model_last.pt"}
    divided = machines("three", "four", "--shard_across", 4)
    said = "".join(rank.stderr for rank in run_ranks(divided, code=2, local_world_size=2))
    assert "model_last.pt could not be written: [Errno 2] No such file" in said
    assert "Traceback" not in said


FULL_DISK = """
import os, sys
sys.path.insert(0, os.getcwd())
import train
from training import writer

def write(*arguments):
    global saves
    saves += 1
    if saves == 2 and os.environ["RANK"] == "1":
        raise OSError(28, "No space left on device")
    write_own_rows(*arguments)

saves = 0
write_own_rows = writer.write_own_rows
writer.write_own_rows = write
train.main()
"""


def test_a_save_that_one_process_cannot_write_is_made_up_for_by_the_next(shards, tmp_path):
    program = tmp_path / "full_disk.py"
    program.write_text(FULL_DISK)
    flags = ("--sharding", "zero3", "--save_every", 2, "--eval_every", 0, "--keep_last", 3)
    main_rank, _ = torchrun(2, program, *train_args(shards, tmp_path, 4, *flags)[1:])
    assert "No space left on device; the run continues" in main_rank.stdout
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == [".lock", "model_best.pt", "model_last.pt", "model_step_000004.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["cheap", "block"])
def test_compiled_shards_equal_one_process(shards, reference, tmp_path, checkpointing):
    flags = ("--use_torch_compile", "--activation_checkpointing", checkpointing)
    args = train_args(shards, tmp_path, 6, *flags, "--sharding", "zero3", "--micro_batch_size", 2)
    torchrun(2, *args)
    assert gap(tmp_path, reference) < 1e-4 and len(losses(tmp_path)) == 6


@pytest.mark.parametrize("sharding", [slow("zero1"), "zero2", slow("zero3")])
def test_the_best_checkpoint_of_a_sharded_run_has_all_optimizer_state(shards, tmp_path, sharding):
    """An evaluation leaves whole weights in the model, just before the file is written."""
    flags = ("--sharding", sharding, "--micro_batch_size", 2, "--val_tokens", 256)
    torchrun(2, *train_args(shards, tmp_path, 4, *flags))
    best, last = (load_checkpoint(tmp_path / "checkpoints" / name) for name in (BEST, LAST))
    assert best["step"] == last["step"] == 4 and best["checksums"] == last["checksums"]
    assert best["optimizer"].keys() == best["model"].keys()
