"""Run jobs in worker processes (scripts/bench/worker.py), which take turns at their repeats."""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from config import parse_recipe
from model.config import GPTConfig
from utils.errors import UserError

Repeat = Callable[[], int]  # does the work of a job once and returns how many units that was


@dataclass(frozen=True)
class Job:
    """One measurement: its kind and the settings that this kind uses."""

    kind: str
    """Key of KINDS in scripts/bench/worker.py."""
    shape: dict | None = None
    """Fields of GPTConfig that the recipe does not have."""
    batch: int = 1
    """Sequences in a forward on each process."""
    dtype: str = "float32"
    device: str = "auto"
    use_torch_compile: bool = False
    activation_checkpointing: str = "none"
    sharding: str = "none"
    recipe: str = "gpt2"
    processes: int = 1
    """Processes that train together, started by torchrun."""
    threads: int = 2
    """Threads that tokenize."""
    peer: str | None = None
    """Checkout of nanoGPT."""
    files: tuple[str, ...] = ()
    """Text files to shard, or the folder of shards to read."""
    command: tuple[str, ...] = ()
    """Command to time."""
    units: int = 0
    """Units of work that `command` does."""
    unit: str = "tokens"
    """Unit of work in the report."""

    @property
    def config(self) -> GPTConfig:
        sizes = GPTConfig(**self.shape)
        recipe = parse_recipe(self.recipe)
        return GPTConfig(**self.shape, **recipe.shape(sizes.block_size, sizes.vocab_size))


class Worker:
    """A worker process that has warmed up and waits for requests to repeat its job."""

    def __init__(self, job: Job) -> None:
        self.kind = job.kind
        self.rates: list[float] = []
        command = [sys.executable]
        if job.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={job.processes}"]
        self.process = subprocess.Popen(
            [*command, "-m", "scripts.bench.worker", json.dumps(asdict(job))],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_s = self.receive("start_s")

    def receive(self, name: str) -> float:
        """Return the figure of the worker's next answer, skipping lines that a peer prints."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)[name]
        raise UserError(f"the measurement {self.kind} failed; its error is above")

    def repeat(self) -> None:
        """Run the job once and record its rate."""
        with contextlib.suppress(BrokenPipeError):  # the process has ended; receive() raises
            print(file=self.process.stdin, flush=True)
        self.rates.append(self.receive("rate"))

    def finish(self) -> dict:
        """End the process and return its rates in units/s, peak memory in bytes, start in s."""
        self.process.stdin.close()
        peak = self.receive("peak_bytes")
        self.process.wait()
        rates = {"lowest": min(self.rates), "highest": max(self.rates)}
        return {
            "rate": statistics.median(self.rates), **rates,
            "peak_bytes": peak, "start_s": self.start_s,
        }  # fmt: skip


def measure(jobs: list[Job], repeats: int, *, in_turn: bool) -> list[dict]:
    """Return the figures of each job (see Worker.finish); `in_turn` interleaves their repeats, else
    one job at a time has the device's memory. Raises UserError."""
    if not in_turn and len(jobs) > 1:
        return [measure([job], repeats, in_turn=True)[0] for job in jobs]
    workers: list[Worker] = []
    try:
        for job in jobs:
            workers.append(Worker(job))
        for _ in range(repeats):
            for worker in workers:
                worker.repeat()
        return [worker.finish() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
