"""What the tests share: a small fixed corpus, its shards, and the scripts run as users run them."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real text for those who have it; never needed
if (SHARED / "tiktoken").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
SMALL = (
    "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --micro_batch_size 4 "
    "--total_batch_size 512 --max_lr 3e-3 --warmup_steps 5 --device cpu --dtype float32 "
    "--sample_every 0 --eval_every 10 --val_tokens 4096 --seed 7"
).split()


def environment() -> dict:
    """The environment of a user without a network, and without a launcher around the tests."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def script(
    *args: object, code: int = 0, timeout: int = 240, **options
) -> subprocess.CompletedProcess:
    """Runs `python ARGS` in the project; fails unless it exits with `code`."""
    command = [sys.executable, *(a if isinstance(a, bytes) else str(a) for a in args)]
    options = {"cwd": ROOT, "env": environment(), "text": True, "capture_output": True, **options}
    done = subprocess.run(command, timeout=timeout, **options)
    assert done.returncode == code, f"{command} -> {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def launch(commands: list[list], local_world_size: int, codes: list[int]) -> list[str]:
    """Runs a command line for each rank without a launcher; `codes` are how they must end."""
    world = {"WORLD_SIZE": str(len(commands)), "LOCAL_WORLD_SIZE": str(local_world_size)}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
    processes = []
    for rank, args in enumerate(commands):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank % local_world_size)}
        processes.append(
            subprocess.Popen(
                [sys.executable, *map(str, args)],
                cwd=ROOT,
                env=environment() | world | store | own,
                stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        )
    try:
        texts = [process.communicate(timeout=120)[1] for process in processes]
        assert [p.returncode for p in processes] == codes, texts
        return texts
    finally:
        for process in processes:
            process.kill()


def torchrun(processes: int, *args: object, **options) -> subprocess.CompletedProcess:
    """Runs a script under torchrun."""
    return script(
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *args,
        **options,
    )


def train_args(data: Path, run: Path, steps: int, *extra: object) -> list:
    """The command line of a small training run in the folder `run`."""
    folders = ["--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs"]
    return ["train.py", "--data_dir", data, *folders, "--max_steps", steps, *SMALL, *extra]


def start(*args: object) -> subprocess.Popen:
    """Starts a script in a process group of its own, to be killed."""
    return subprocess.Popen(
        [sys.executable, *map(str, args)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all it started; torchrun's processes have groups of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    started = children.read_text().split() if children.exists() else []
    for group in (process.pid, *map(int, started)):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """The root of a file system of 2 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def documents() -> list[str]:
    """600 fixed documents of made-up sentences, the same on every machine."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgilmnoprstu", k=rng.randint(2, 7))) for _ in range(150)]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + "."

    return ["\n".join(sentence() for _ in range(rng.randint(2, 12))) for _ in range(600)]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The fixed documents as a jsonl file."""
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    return path


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """The fixed documents as five files, of which one is text."""
    folder = tmp_path_factory.mktemp("parts")
    for i in range(5):
        rows = [json.dumps({"text": text}) + "\n" for text in documents()[120 * i : 120 * (i + 1)]]
        (folder / f"{i}.jsonl").write_text("".join(rows))
    (folder / "2.txt").write_text((folder / "2.jsonl").read_text())
    (folder / "2.jsonl").unlink()
    return folder


@pytest.fixture(scope="session")
def shards(corpus, tmp_path_factory) -> Path:
    """Byte shards of the fixed documents, several of them, cut at odd places."""
    folder = tmp_path_factory.mktemp("shards")
    script(
        "data/fineweb-edu.py", "--input", corpus, "--local_dir", folder, "--tokenizer", "bytes",
        "--shard_size", 50_001, "--val_fraction", 0.05,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="session")
def trained(shards, tmp_path_factory) -> Path:
    """A folder with a run of 20 steps: checkpoints/ and logs/."""
    run = tmp_path_factory.mktemp("trained")
    script(*train_args(shards, run, 20, "--save_every", 10))
    return run


def losses(run: Path, split: str = "train") -> dict[int, float]:
    """Loss by step of a run, as the project's own reader gives them."""
    from utils.logger import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(run / "logs")[split]}


def weights(run: Path, name: str = "model_last.pt") -> dict:
    """The float32 weights of a run's checkpoint."""
    from training.checkpoint import join_float32, load_checkpoint

    state = load_checkpoint(run / "checkpoints" / name)
    return {k: join_float32(v, state["model_low"][k]) for k, v in state["model"].items()}


def run_until(
    process: subprocess.Popen, condition: Callable[[], bool], timeout: float = 120
) -> None:
    """Waits for a condition, which must come before the process ends."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < timeout:
        assert process.poll() is None, "ended before it was stopped"
        time.sleep(0.01)


def rows_written(run: Path) -> int:
    """Rows of training in a run's log."""
    path = run / "logs" / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0
