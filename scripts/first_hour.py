"""Check a machine before a long run: loss, resume, speed, memory and a score, by known figures.

    python scripts/first_hour.py            # a GPU: 250 steps of 124M on FineWeb-Edu
    python scripts/first_hour.py --small    # a CPU, offline: a small model on generated text

Prints a verdict for each check; the exit code is 1 if one fails. On a GPU it downloads 0.5 GB of
text, HellaSwag and OpenAI's 124M. All files lie under --out.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

from evaluation.table import PUBLIC_RUN, PUBLISHED
from training.dry_run import MFU
from utils.cli import start_script
from utils.logger import read_metrics

ROOT = Path(__file__).resolve().parents[1]
# The public run's step 250 lies in its warmup of 715 steps, which these 1,430 steps have, too.
RUN_OF_GPU = ["--max_steps", "1430", "--warmup_steps", "715", "--eval_every", "250"]
RUN_OF_CPU = (
    "--device cpu --dtype float32 --n_layer 2 --n_head 2 --n_embd 64 --block_size 64 "
    "--micro_batch_size 8 --total_batch_size 512 --max_steps 200 --warmup_steps 20 --max_lr 3e-3 "
    "--val_tokens 8192 --eval_every 50"
).split()
SMALL_LOSS = 2.102  # at step 50 of RUN_OF_CPU
SECONDS_BETWEEN_LOOKS = 0.5  # at the log of a run


@dataclass(frozen=True)
class FirstHourConfig:
    """Check a machine before a long run."""

    small: bool = False
    """Train a small model on a CPU instead, on generated text."""
    out: Path = Path("runs/first_hour")
    """Folder for shards and runs."""


def run(*command: object) -> str:
    """Run a script of this project and return its output; raise CalledProcessError if it fails."""
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def verdict(name: str, measured: float, low: float, high: float) -> bool:
    """Print whether a figure lies in its range, and return it."""
    is_right = low <= measured <= high
    word = "ok   " if is_right else "WRONG"
    print(f"{word} {name}: {measured:.4g}, expected {low:.4g} to {high:.4g}", flush=True)
    return is_right


def train_until(step: int, run_dir: Path, *flags: object) -> float:
    """Train in `run_dir` up to the validation at `step`, stop by SIGTERM, and return its loss."""
    command = [sys.executable, "train.py", "--run_dir", run_dir, "--sample_every", 0, *flags]
    process = subprocess.Popen(list(map(str, command)), cwd=ROOT)
    losses: dict[int, float] = {}  # of validations, by step
    while step not in losses and process.poll() is None:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if (run_dir / "logs/metrics.jsonl").exists():
            rows = read_metrics(run_dir).get("val", [])
            losses = {row["step"]: row["loss"] for row in rows}
    process.terminate()
    process.wait()
    return losses[step]


def resume_gap(out: Path, flags: list[object]) -> float:
    """Return the largest difference of a training loss between 20 steps at a stretch, and 10 steps
    and then 10 more."""
    losses = []
    for name, stops in (("whole", [20]), ("resumed", [10, 20])):
        for steps in stops:
            run_dir = out / name
            # the rate follows --max_steps unless it is constant
            schedule = ["--warmup_steps", 0, "--max_lr", 1e-4, "--min_lr", 1e-4]
            run("train.py", "--run_dir", run_dir, "--resume", "auto", *flags, *schedule,
                "--max_steps", steps, "--eval_every", 0, "--sample_every", 0)  # fmt: skip
        losses.append([row["loss"] for row in read_metrics(run_dir)["train"]])
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def generated_text() -> str:
    """Return 200 kB of sums, the same on every machine."""
    rng = random.Random(0)
    lines = []
    for _ in range(15_000):
        a, b = rng.randrange(100), rng.randrange(100)
        lines.append(f"{a} + {b} = {a + b}\n")
    return "".join(lines)


def main(config: FirstHourConfig) -> None:
    out = config.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shards = out / "shards"
    results = []
    if config.small:
        (out / "sums.txt").write_text(generated_text())
        source = ["--input", out / "sums.txt", "--tokenizer", "bytes"]
        flags = [*RUN_OF_CPU, "--data_dir", shards]
        step, expected, tolerance, gap = 50, SMALL_LOSS, 0.02, 0.0
    else:
        source = ["--max_shards", 2]
        flags = [*RUN_OF_GPU, "--data_dir", shards]
        # another order of the data and another dtype differ by less
        step, expected, tolerance, gap = 250, PUBLIC_RUN[250], 0.15, 2e-3
    run("data/fineweb-edu.py", "--local_dir", shards, *source)
    loss = train_until(step, out / "run", *flags, "--overwrite")
    name = f"validation loss at step {step}"
    results.append(verdict(name, loss, expected - tolerance, expected + tolerance))
    results.append(verdict("loss after a resume, difference", resume_gap(out, flags), 0, gap))
    if not config.small:
        bench = run("scripts/bench.py", "--device", "cuda", "--use_torch_compile",
                    "--micro_batch_size", 16)  # fmt: skip
        measured = json.loads(bench.splitlines()[-1])["measured"]["ours"]
        results.append(verdict("MFU", measured["mfu"], 0.8 * MFU, 1))
        forecast = run("train.py", "--dry_run", "--micro_batch_size", 16)
        gigabytes = float(forecast.partition("  in all")[0].split()[-1])
        peak = measured["peak_bytes"] / 1e9
        results.append(verdict("peak memory, GB", peak, 0.85 * gigabytes, 1.1 * gigabytes))
        score = out / "gpt2.json"
        run("evaluate.py", "--model", "gpt2", "--tasks", "hellaswag", "--out", score)
        for result in json.loads(score.read_text())["results"]:
            key = (result["task"], result["protocol"], result["metric"])
            if key == ("hellaswag", "build-nanogpt", "acc_norm"):
                published = PUBLISHED[key].values["gpt2"]
                low, high = published - 0.002, published + 0.002
                results.append(verdict("HellaSwag of OpenAI's 124M", result["value"], low, high))
    if not all(results):
        sys.exit(1)


if __name__ == "__main__":
    start_script(main, FirstHourConfig)
