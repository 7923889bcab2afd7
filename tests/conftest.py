"""What the tests share: a small fixed corpus, its shards, and the scripts run as users run them."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import warm

from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"  # real text for those who have it; never needed
if (SHARED / "tiktoken").is_dir():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken"))
# xdist keeps all cores busy: threads of tiny matmuls would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a pool of compiling processes takes longer to start than the small models of the tests to compile
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
SMALL = (
    "--n_layer 2 --n_head 2 --n_embd 32 --block_size 32 --micro_batch_size 4 "
    "--total_batch_size 512 --max_lr 3e-3 --warmup_steps 5 --device cpu --dtype float32 "
    "--sample_every 0 --eval_every 10 --val_tokens 4096 --seed 7"
).split()


def read_page(path: str) -> str:
    """Return a page of the documentation."""
    return (ROOT / path).read_text(encoding="utf-8")


def train_options(**options: object):
    """Return resolved options of train.py."""
    from config import TrainOptions, resolve_from_recipe
    from recipes import parse_recipe

    given = TrainOptions(**options)
    return resolve_from_recipe(given, parse_recipe(given.recipe))


def environment() -> dict:
    """Return the environment of a user without network."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def start(
    *args: object,
    log: Path | str = os.devnull,
    files: list[Path | str] | None = None,
    env: dict | None = None,
    cwd: Path = ROOT,
    fork: bool = True,
    **options,
) -> subprocess.Popen | warm.Script:
    """Start `python ARGS` in the project or `cwd`, in a process group of its own.

    Its output goes to `log`, or `files` are those of standard input, output and error. A script is
    a fork of a process that has imported PyTorch, unless `fork` is false or subprocess.Popen gets
    `options`.
    """
    args = [str(x) for x in args]
    env = environment() if env is None else env
    files = files or [os.devnull, log, log]
    if fork and not options and args[0].endswith(".py"):
        return warm.Script(args, env, cwd, files)
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr = (stack.enter_context(open(file, "ab+")) for file in files)
        options |= {"stdin": stdin, "stdout": stdout, "stderr": stderr, "start_new_session": True}
        return subprocess.Popen([sys.executable, *args], env=env, cwd=cwd, **options)


def run_all(
    commands: list[list],
    envs: list[dict],
    codes: list[int | None],
    input: bytes = b"",
    timeout: float = 240,
    **options,
) -> list[subprocess.CompletedProcess]:
    """Run command lines side by side, as `start` does; fail unless they exit with `codes`, of which
    None allows any, and within `timeout` seconds."""
    processes, finished = [], []
    with tempfile.TemporaryDirectory() as folder:
        stdin = Path(folder, "in")
        stdin.write_bytes(input)
        try:
            for i, (args, env) in enumerate(zip(commands, envs, strict=True)):
                files = [stdin, Path(folder, f"{i}.out"), Path(folder, f"{i}.err")]
                processes.append((start(*args, files=files, env=env, **options), args, files[1:]))
            for process, args, files in processes:
                code = process.wait(timeout)
                outputs = [file.read_text() for file in files]
                finished.append(subprocess.CompletedProcess(args, code, *outputs))
        finally:
            for process, *_ in processes:
                if process.poll() is None:
                    kill(process)
    said = "".join(f"{x.args} -> {x.returncode}\n{x.stdout}{x.stderr}\n" for x in finished)
    for process, code in zip(finished, codes, strict=True):
        assert code in (None, process.returncode), said
    return finished


def script(
    *args: object,
    code: int = 0,
    env: dict | None = None,
    input: str | bytes = b"",
    **options,
) -> subprocess.CompletedProcess:
    """Run `python ARGS`; fail unless it exits with `code`. The options are those of run_all."""
    given = input.encode() if isinstance(input, str) else input
    return run_all([args], [env], [code], given, **options)[0]


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of all files in a folder but hidden ones."""
    return {path: path.read_bytes() for path in folder.rglob("[!.]*") if path.is_file()}


def bad(args: list, message: str, run: Path | None = None) -> None:
    """Check that a script ends with one sentence and exit code 2; in the folder `run`, nothing is
    written and nothing lost."""
    before = run and contents(run)
    done = script(*args, code=2)
    said = done.stderr + done.stdout
    assert message in said and "Traceback" not in said, said
    assert before == (run and contents(run))


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_ranks(
    commands: list[list],
    code: int | None = 0,
    env: dict | None = None,
    local_world_size: int = 0,
    **options,
) -> list[subprocess.CompletedProcess]:
    """Run a command line for each rank, in the environment that torchrun would give it."""
    world_size = len(commands)
    per_machine = local_world_size or world_size
    world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_machine}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    envs = []
    for rank in range(world_size):
        variables = world | {"RANK": rank, "LOCAL_RANK": rank % per_machine}
        launched = {name: str(value) for name, value in variables.items()}
        envs.append((env or environment()) | launched)
    return run_all(commands, envs, [code] * world_size, **options)


def torchrun(processes: int, *args: object, **options) -> list[subprocess.CompletedProcess]:
    """Run a script on so many processes, as torchrun would."""
    return run_ranks([args] * processes, **options)


def folders(run: Path) -> list:
    """Return the flags for the folders of a run in the folder `run`."""
    return ["--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs"]


def train_args(data: Path, run: Path, steps: int, *extra: object) -> list:
    """Return the command line of a small training run in the folder `run`."""
    return ["train.py", "--data_dir", data, *folders(run), "--max_steps", steps, *SMALL, *extra]


def kill(process: subprocess.Popen) -> None:
    """SIGKILL a process and all it started; torchrun's processes have groups of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    started = children.read_text().split() if children.exists() else []
    for group in (process.pid, *map(int, started)):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.kill()  # a fork that has no group yet
    process.wait()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests make their tensors, as cuda")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":
        import torch

        torch.set_default_device(config.getoption("--device"))


@cache
def documents() -> list[str]:
    """Return 600 fixed documents of made-up sentences, the same on every machine."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgilmnoprstu", k=rng.randint(2, 7))) for _ in range(150)]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + "."

    return ["\n".join(sentence() for _ in range(rng.randint(2, 12))) for _ in range(600)]


def user_error(message: str):
    """Expect a sentence to the user, in which a regular expression is found, in a `with` block."""
    return pytest.raises(UserError, match=message)


def slow(*values: object):
    """Return a row of a parametrized test that takes minutes."""
    return pytest.param(*values, marks=pytest.mark.slow)


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write rows as lines of JSON; return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# a stand-in for the package: rows arrive when a run is finished, as they are sent by a thread
WANDB = """
import json, os
class Run:
    rows = []
    def define_metric(self, *_, **__): pass
    def log(self, row): self.rows.append(row["step"])
    def finish(self, exit_code):
        with open(os.environ["ARRIVED"], "w") as file:
            json.dump([exit_code, *self.rows], file)
init = lambda **_: Run()
"""


def wandb_variables(folder: Path) -> dict[str, str]:
    """Return environment variables with which a script finds a stand-in for wandb, which writes the
    exit code and the steps of a run to the file `arrived` in a folder."""
    (folder / "wandb.py").write_text(WANDB)
    return {"PYTHONPATH": f"{ROOT}:{folder}", "ARRIVED": str(folder / "arrived")}


def write_texts(path: Path, texts: Iterable[object]) -> Path:
    """Write texts as rows of JSON; return the path."""
    return write_rows(path, [{"text": text} for text in texts])


def read_rows(path: Path) -> list[dict]:
    """Return the lines of JSON in a file."""
    with path.open() as file:
        return [json.loads(line) for line in file]


def write_commands(folder: Path, **scripts: str) -> dict:
    """Write scripts of bash by their names; return an environment that finds them first."""
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    env = environment()
    return env | {"PATH": f"{folder}{os.pathsep}{env['PATH']}"}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """The fixed documents as a jsonl file."""
    return write_texts(tmp_path_factory.mktemp("corpus") / "text.jsonl", documents())


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
    """Return the loss by step of a run, as the project's own reader gives them."""
    from utils.logger import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(run / "logs")[split]}


def gap(run: Path, other: Path) -> float:
    """Return the largest difference of two runs' losses at the steps of the first."""
    found, expected = losses(run), losses(other)
    assert set(found) <= set(expected) and len(found) >= 5
    return max(abs(found[step] - expected[step]) for step in found)


def weights(run: Path, name: str = "model_last.pt") -> dict:
    """Return the float32 weights of a run's checkpoint, and other buffers."""
    from model.formats.checkpoint import join_float32, load_checkpoint

    state = load_checkpoint(run / "checkpoints" / name)
    low = state["model_low"]
    return {k: join_float32(v, low[k]) if k in low else v for k, v in state["model"].items()}


def same_run(a: Path, b: Path) -> bool:
    """Return whether two runs have the same losses at the steps of the first, and end with the same
    weights, to the bit."""
    ours, theirs = weights(a), weights(b)
    same_losses = losses(a).items() <= losses(b).items()
    return same_losses and all(ours[name].equal(theirs[name]) for name in theirs)


def run_until(
    process: subprocess.Popen, condition: Callable[[], bool], timeout: float = 120
) -> None:
    """Wait for a condition, which must come before the process ends."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < timeout:
        assert process.poll() is None, "ended before it was stopped"
        time.sleep(0.01)


def kill_after(rows: int, run: Path, args: list) -> None:
    """Start a training run, and kill it once its log has so many rows of training."""
    process = start(*args)
    run_until(process, lambda: rows_written(run) >= rows)
    kill(process)


def without(args: list, *flags: str) -> list:
    """Return a command line without these flags and their values."""
    left = list(args)
    for flag in flags:
        index = left.index(flag)
        del left[index : index + 2]
    return left


def rows_written(run: Path) -> int:
    """Return the rows of training in a run's log."""
    path = run / "logs" / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0
