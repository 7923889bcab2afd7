"""What the tests share: a small fixed corpus, its shards, and the scripts run as users run them."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm

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


def train_options(**options: object):
    """Return resolved options of train.py."""
    from config import TrainConfig, resolve_from_recipe
    from model.recipes import parse_recipe

    given = TrainConfig(**options)
    return resolve_from_recipe(given, parse_recipe(given.recipe))


def environment() -> dict:
    """Return the environment of a user without network and without a launcher around the tests."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return {**env, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def can_fork(args: list[str], env: dict) -> bool:
    """Return whether a fork of tests/warm.py does as well as a new process: not for variables that
    imports read from the environment."""
    usual = environment()
    changed = {name for name in {*env, *usual} if env.get(name) != usual.get(name)}
    return (
        warm.ADDRESS in os.environ
        and args[0].endswith(".py")
        and not any(n.startswith(("OMP_", "PYTHON", "TORCH")) for n in changed - {"PYTHONPATH"})
    )


def script(
    *args: object,
    code: int = 0,
    timeout: float = 240,
    fork: bool = True,
    env: dict | None = None,
    cwd: Path = ROOT,
    input: str | bytes = "",
    text: bool = True,
    **options,
) -> subprocess.CompletedProcess:
    """Run `python ARGS` in the project or `cwd`; fail unless it exits with `code`.

    It runs in a fork of a process that has imported PyTorch, or in a process of its own where
    `fork` is false or `options` go to subprocess.run.
    """
    args = [os.fsdecode(a) if isinstance(a, bytes) else str(a) for a in args]
    env = environment() if env is None else env
    given = input.encode() if isinstance(input, str) else input
    if fork and not options and can_fork(args, env):
        ((status, out, err),) = warm.run_all([args], [env], cwd, given, timeout)
    else:
        options = {"cwd": cwd, "env": env, "input": given, "timeout": timeout, **options}
        done = subprocess.run([sys.executable, *args], capture_output=True, **options)
        status, out, err = done.returncode, done.stdout, done.stderr
    if text:
        out, err = out.decode(), err.decode()
    assert status == code, f"{args} -> {status}\n{out}{err}"
    return subprocess.CompletedProcess(args, status, out, err)


def bad(args: list, message: str, run: Path | None = None) -> None:
    """Check that a script ends with one sentence and exit code 2; in the folder `run`, nothing is
    written and nothing lost."""

    def files() -> dict:
        return {p: p.read_bytes() for p in run.rglob("[!.]*") if p.is_file()} if run else {}

    before = files()
    done = script(*args, code=2)
    said = done.stderr + done.stdout
    assert message in said and "Traceback" not in said, said
    assert files() == before


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def ranks(
    commands: list[list], local_world_size: int, env: dict, timeout: float
) -> list[tuple[int, str, str]]:
    """Run a command line for each rank without a launcher; exit code, stdout and stderr of each."""
    world = {
        "WORLD_SIZE": str(len(commands)),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    envs = [
        {**env, **world, "RANK": str(rank), "LOCAL_RANK": str(rank % local_world_size)}
        for rank in range(len(commands))
    ]
    commands = [[str(a) for a in args] for args in commands]
    found = warm.run_all(commands, envs, ROOT, b"", timeout)
    return [(code, out.decode(), err.decode()) for code, out, err in found]


def launch(commands: list[list], local_world_size: int, codes: list[int]) -> list[str]:
    """Run a command line for each rank, which must end with `codes`; return what stderr got."""
    found = ranks(commands, local_world_size, environment(), 120)
    assert [code for code, _, _ in found] == codes, found
    return [err for _, _, err in found]


def torchrun(
    processes: int, *args: object, code: int = 0, fork: bool = True, **options
) -> subprocess.CompletedProcess:
    """Run a script under torchrun, or in as many forks with the environment that it sets."""
    head = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    env, timeout = options.get("env", environment()), options.get("timeout", 240)
    if not fork or not can_fork([str(args[0])], env):
        return script(*head, *args, code=code, **options)
    found = ranks([list(args)] * processes, processes, env, timeout)
    assert int(any(status for status, _, _ in found)) == code, found
    out, err = ("".join(texts) for texts in list(zip(*found, strict=True))[1:])
    return subprocess.CompletedProcess(args, code, out, err)


def folders(run: Path) -> list:
    """Return the flags for the folders of a run in the folder `run`."""
    return ["--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs"]


def train_args(data: Path, run: Path, steps: int, *extra: object) -> list:
    """Return the command line of a small training run in the folder `run`."""
    return ["train.py", "--data_dir", data, *folders(run), "--max_steps", steps, *SMALL, *extra]


def start(
    *args: object, fork: bool = True, log: Path | str = os.devnull
) -> subprocess.Popen | warm.Script:
    """Start a script in a process group of its own, to be killed; its output goes to `log`."""
    args = [str(a) for a in args]
    with open(log, "w+b") as out:
        if fork and can_fork(args, environment()):
            return warm.Script(args, ROOT, environment(), out, out, out)
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        options = {"cwd": ROOT, "env": environment(), "start_new_session": True}
        return subprocess.Popen([sys.executable, *args], **streams, **options)


def kill(process: subprocess.Popen) -> None:
    """SIGKILL a process and all it started; torchrun's processes have groups of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    started = children.read_text().split() if children.exists() else []
    for group in (process.pid, *map(int, started)):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests make their tensors, as cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Start the process to fork scripts from, one for all workers of xdist."""
    if config.getoption("--device") != "cpu":
        import torch

        torch.set_default_device(config.getoption("--device"))
    if sys.platform == "linux" and not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp()
        os.environ[warm.ADDRESS] = f"{folder}/socket"
        server = warm.start_server(os.environ[warm.ADDRESS], environment())

        def stop() -> None:
            server.stdin.close()
            server.wait()
            shutil.rmtree(folder)

        config.add_cleanup(stop)


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
    """Return 600 fixed documents of made-up sentences, the same on every machine."""
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
        (folder / f"{i}.{'txt' if i == 2 else 'jsonl'}").write_text("".join(rows))
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
    """Return the loss by step of a run, as the project's own reader gives them."""
    from utils.logger import read_metrics

    return {row["step"]: row["loss"] for row in read_metrics(run / "logs")[split]}


def gap(run: Path, other: Path) -> float:
    """Return the largest difference of two runs' losses at the steps of the first."""
    found, expected = losses(run), losses(other)
    assert set(found) <= set(expected) and len(found) >= 5
    return max(abs(found[step] - expected[step]) for step in found)


def weights(run: Path, name: str = "model_last.pt") -> dict:
    """Return the float32 weights of a run's checkpoint."""
    from training.checkpoint import join_float32, load_checkpoint

    state = load_checkpoint(run / "checkpoints" / name)
    return {k: join_float32(v, state["model_low"][k]) for k, v in state["model"].items()}


def same_run(a: Path, b: Path) -> bool:
    """Return whether two runs have the same losses and end with the same weights, to the bit."""
    (first, second), equal = (weights(a), weights(b)), losses(a) == losses(b)
    return equal and all(first[name].equal(second[name]) for name in second)


def run_until(
    process: subprocess.Popen, condition: Callable[[], bool], timeout: float = 120
) -> None:
    """Wait for a condition, which must come before the process ends."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < timeout:
        assert process.poll() is None, "ended before it was stopped"
        time.sleep(0.01)


def rows_written(run: Path) -> int:
    """Return the rows of training in a run's log."""
    path = run / "logs" / "metrics.jsonl"
    return path.read_text().count('"train"') if path.exists() else 0
