"""One process fails in a run of several: all end, the cause is named, the last checkpoint opens."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, SMALL, environment, folders, run_ranks, slow, torchrun, write_rows

from model.formats.checkpoint import load_checkpoint, verify

TINY = [*SMALL, "--micro_batch_size", 1, "--total_batch_size", 192, "--val_tokens", 96]
OFTEN = "--save_every 1 --eval_every 2 --keep_last 1 --sample_every 2 --hellaswag_every 4".split()


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """A folder with what the commands read: a run, shards, questions and pairs."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(shards, folder / "shards")
    question = {"ctx": "The ", "endings": ["end", "cat", "a", "b"], "label": 0}
    write_rows(folder / "hellaswag.jsonl", [question] * 4)
    pairs = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(6)]
    write_rows(folder / "pairs.jsonl", pairs)
    torchrun(1, *commands(folder)["plain"])
    (folder / "new").rename(folder / "run")
    return folder


def commands(folder: Path) -> dict[str, list]:
    """Return command lines by name. They read and write in the folder."""
    run = folder / "run"
    hellaswag = ["--hellaswag_data", folder / "hellaswag.jsonl"]
    train = ["train.py", "--data_dir", folder / "shards", *TINY, *OFTEN, *hellaswag]
    resume = [*train, *folders(run), "--max_steps", 4, "--resume", "auto"]
    checkpoint = run / "checkpoints/model_last.pt"
    score = ["--tasks", "val", "hellaswag", "--data_dir", folder / "shards"]
    score += ["--data", folder / "hellaswag.jsonl"]
    dpo = ["--method", "dpo", "--init_from", checkpoint, "--data", folder / "pairs.jsonl"]
    new = ["--checkpoint_dir", folder / "dpo", "--device", "cpu", "--dtype", "float32"]
    small = ["--batch_size", 6, "--max_steps", 2, "--save_every", 1, "--plain"]
    return {
        "plain": [*train, *folders(folder / "new"), "--max_steps", 2],
        "resume": resume,
        "sharded": [*resume, "--sharding", "zero2"],
        "overwrite": [*train, *folders(run), "--max_steps", 2, "--overwrite", "--seed", 8],
        "evaluate": ["evaluate.py", "--checkpoint", checkpoint, "--device", "cpu", *score],
        "dpo": ["finetune.py", *dpo, *new, *small],
    }


def fail(name: str, processes: int, fault: str, base: Path, folder: Path) -> str:
    """Run a command on some processes, one of which meets a fault. Return what they print."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    Path(f"{folder}_ended").unlink(missing_ok=True)
    env = environment() | {"FAULT": fault, "FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
    args = ["tests/failing.py", *commands(folder)[name]]
    done = run_ranks([args] * processes, code=None, env=env, timeout=60)
    printed = "".join(process.stdout + process.stderr for process in done)
    if any(process.returncode != 0 for process in done):
        assert "an injected fault" in printed, printed
        assert "Traceback" not in printed, printed
    for path in folder.rglob("*.pt"):  # whole, or not there
        checkpoint = load_checkpoint(path)
        for section in ("model", "model_low", "optimizer"):
            verify(checkpoint, section)
    assert (folder / "run/checkpoints/model_last.pt").exists() or name == "overwrite"
    return printed


def count_calls(name: str, processes: int, rank: int, base: Path, folder: Path) -> dict[str, int]:
    """Return the number of calls of each kind on a process that meets no fault."""
    fail(name, processes, f"none {rank} 0", base, folder)
    return json.loads(Path(f"{folder}_counts").read_text())


@pytest.mark.parametrize(
    "name, fault",
    [
        ("sharded", "write 1 1"),
        ("sharded", "collective 0 40"),
        ("overwrite", "write 0 3"),
        ("evaluate", "read 1 4"),
    ],
)
def test_a_fault_of_one_process_ends_all_with_its_cause(base, tmp_path, name, fault):
    fail(name, 2, fault, base, tmp_path / "copy")


@pytest.mark.parametrize(
    "name, processes",
    [slow(name, n) for n in (2, 3) for name in commands(Path())],
)
def test_every_fault_of_one_process_ends_all_with_its_cause(base, tmp_path, name, processes):
    """At each call of a collective, a read and a write, on the main process and on the last."""
    tried = 0
    failures = []
    for rank in {0, processes - 1}:
        counts = count_calls(name, processes, rank, base, tmp_path / "copy")
        for kind, number in counts.items():
            for k in range(1, number + 1):
                tried += 1
                try:
                    fail(name, processes, f"{kind} {rank} {k}", base, tmp_path / "copy")
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    failures.append(f"{kind} {rank} {k}: {error}")
                    print(failures[-1])
    print(f"{name} on {processes}: {tried} faults, {len(failures)} failures")
    assert not failures, "\n\n".join(failures)
