"""Processes of scripts/bench/worker.py that take turns at repeating what they measure."""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from model.config import GPTConfig
from utils.errors import UserError

Repeat = Callable[[], int]  # does the work once, gives how many units of it that was


class MeasurementError(UserError):
    """A measurement that did not come to an end."""


@dataclass(frozen=True)
class Job:
    """What to measure with: settings of bench.py, as far as the kind needs them."""

    shape: dict | None = None
    """Of a GPTConfig."""
    batch: int = 1
    """Sequences at a time, on each process."""
    dtype: str = "float32"
    device: str = "auto"
    compile: bool = False
    activation_checkpointing: str = "none"
    sharding: str = "none"
    processes: int = 1
    """That train together."""
    threads: int = 2
    peer: str | None = None
    files: tuple[str, ...] = ()

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(**self.shape)


@dataclass(frozen=True)
class Measurement:
    """A kind of scripts/bench/worker.py and what it works with."""

    kind: str
    job: Job


class Worker:
    """A process of scripts/bench/worker.py, warmed up and ready to repeat its measurement."""

    def __init__(self, measurement: Measurement) -> None:
        self.kind = measurement.kind
        self.rates: list[float] = []
        job, command = measurement.job, [sys.executable]
        if job.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc_per_node={job.processes}"]
        self.process = subprocess.Popen(
            [*command, "-m", "scripts.bench.worker", self.kind, json.dumps(asdict(job))],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.start_s = self.answer()["start_s"]

    def answer(self) -> dict:
        """The next line of the worker that is an answer; a peer may print others before it."""
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise MeasurementError(f"the measurement {self.kind} failed; its error is above")

    def repeat(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, as `answer` says
            print(file=self.process.stdin, flush=True)
        self.rates.append(self.answer()["rate"])

    def end(self) -> dict:
        """Its figures: units per second, bytes, seconds."""
        self.process.stdin.close()
        peak = self.answer()["peak_bytes"]
        self.process.wait()
        return {
            "rate": statistics.median(self.rates),
            "lowest": min(self.rates),
            "highest": max(self.rates),
            "peak_bytes": peak,
            "start_s": self.start_s,
        }


def measure(measurements: list[Measurement], repeats: int, *, in_turn: bool) -> list[dict]:
    """Figures of each, in turn; else one after the other, where memory is for one at a time."""
    if not in_turn and len(measurements) > 1:
        return [measure([one], repeats, in_turn=True)[0] for one in measurements]
    workers: list[Worker] = []
    try:
        for measurement in measurements:
            workers.append(Worker(measurement))
        for _ in range(repeats):
            for worker in workers:
                worker.repeat()
        return [worker.end() for worker in workers]
    finally:
        for worker in workers:
            worker.process.kill()
