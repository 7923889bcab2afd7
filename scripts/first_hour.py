"""Check a machine against known numbers before a long run: loss, resume, speed, memory, a score.

    python scripts/first_hour.py            # a GPU: 250 steps of 124M on FineWeb-Edu
    python scripts/first_hour.py --small    # a CPU, offline: a small model on generated text

The script prints a verdict for each check. The exit code is 1 if a check fails. On a GPU the script
downloads 0.6 GB of text, HellaSwag and OpenAI's 124M. Shards and runs are under --out.

If the nodes with GPUs have no network, download on the login node first. Both nodes need the same
HF_HOME and TIKTOKEN_CACHE_DIR, on a shared disk:

    python data/fineweb-edu.py --max_shards 2 --local_dir runs/first_hour/shards
    python evaluate.py --model gpt2 --tasks hellaswag --limit 8
    HF_HUB_OFFLINE=1 python scripts/first_hour.py        # on the node with GPUs
"""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Python puts scripts/ on the path, not the project's folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch

from evaluation.table import PUBLIC_RUN, PUBLISHED
from training.forecast.step_time import ASSUMED_UTILIZATION
from utils.cli import start_script
from utils.errors import UserError
from utils.logger import read_metrics

# Step 250 is in the 715 warmup steps of the public run (evaluation/table.py). --max_steps is 1430
# because a warmup takes at most half of a run.
FLAGS_124M = "--max_steps 1430 --warmup_steps 715 --eval_every 250"
FLAGS_SMALL = (
    "--device cpu --dtype float32 --n_layer 2 --n_head 2 --n_embd 64 --block_size 64 "
    "--micro_batch_size 8 --total_batch_size 512 --max_lr 3e-3 --val_tokens 8192 "
    "--max_steps 200 --warmup_steps 20 --eval_every 50"
)
# The learning rate is constant because the compared runs differ in --max_steps.
FLAGS_RESUME = "--resume auto --eval_every 0 --warmup_steps 0 --max_lr 1e-4 --min_lr 1e-4"
# Validation loss of FLAGS_SMALL at step 50 on a CPU, in nats per byte.
SMALL_LOSS = 1.206


@dataclass(frozen=True)
class FirstHourOptions:
    """Check a machine before a long run."""

    small: bool = False
    """Train a small model on a CPU instead, on generated text."""
    out: Path = Path("runs/first_hour")
    """Folder for shards and runs."""


def run_script(command: str) -> str:
    """Run a script of this project and return its standard output. `command` is the path of the
    script from the current folder, with flags. Raise UserError if the script fails."""
    # Standard error goes to the console: it has progress, and the reason why a command failed.
    script = subprocess.run([sys.executable, *command.split()], stdout=subprocess.PIPE, text=True)
    if script.returncode:
        raise UserError(f"this command failed: python {command}")
    return script.stdout


def print_verdict(quantity: str, measured: float, low: float, high: float) -> bool:
    """Return whether low <= measured <= high, and print the verdict."""
    is_right = low <= measured <= high  # False for NaN
    verdict = "ok   " if is_right else "WRONG"
    print(f"{verdict} {quantity}: {measured:.4g}, expected {low:.4g} to {high:.4g}", flush=True)
    return is_right


def check_loss(flags: str, folder: Path, step: int, expected: float, tolerance: float) -> bool:
    """Train in the new `folder`, stop the run by SIGTERM at the validation of `step`, and check the
    validation loss. `expected` and `tolerance` are in nats per token (a byte with check_small)."""
    # flags: "--max_steps 1430 ... --data_dir runs/first_hour/shards"; --sample_every 0: no samples
    command = [sys.executable, *f"train.py --run_dir {folder} --sample_every 0 {flags}".split()]
    loss = math.nan  # NaN gives the verdict WRONG if the run ends before `step`
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # because of stdout=PIPE
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(f"step {step}: validation loss "):  # Logger.log_evaluation
                loss = float(line.split()[4])  # of "step 250: validation loss 6.1670 of ..."
                process.terminate()  # SIGTERM: the run saves and ends
    quantity = f"validation loss at step {step}"
    return print_verdict(quantity, loss, expected - tolerance, expected + tolerance)


def check_resume(flags: str, out: Path, tolerance: float) -> bool:
    """Check that a resumed run has the training losses of a run without a pause: train 20 steps at
    once, and 10 steps and then 10 more. `tolerance` is the largest difference in nats per token."""
    for name, max_steps in (("whole", 20), ("resumed", 10), ("resumed", 20)):
        # FLAGS_RESUME has --resume auto, so the second "resumed" continues from the first one, and
        # a constant learning rate, so that runs of 10 and 20 steps train alike. Of two equal flags
        # the last one wins: --max_steps here, not that of `flags`.
        run_script(
            f"train.py --run_dir {out / name} {flags} {FLAGS_RESUME} --max_steps {max_steps}"
        )
    # metrics of the 20 steps, [{"step": 1, "loss": 10.9, ...}, ...]
    whole = read_metrics(out / "whole")["train"]
    resumed = read_metrics(out / "resumed")["train"]
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, resumed, strict=True))
    return print_verdict("difference after a resume", difference, 0, tolerance)


def check_small(out: Path) -> list[bool]:
    """Train a small model on squares of numbers, and return the result of each check."""
    text = "".join(f"The square of {n} is {n * n}.\n" for n in range(20_000))
    (out / "squares.txt").write_text(text)
    input_flags = f"--input {out}/squares.txt --tokenizer bytes"
    run_script(f"data/fineweb-edu.py {input_flags} --local_dir {out}/shards")
    flags = f"{FLAGS_SMALL} --data_dir {out}/shards"
    return [
        # nats per byte of the validation text
        check_loss(flags, out / "run", step=50, expected=SMALL_LOSS, tolerance=0.02),
        check_resume(flags, out, tolerance=0),  # CPUs resume bit for bit
    ]


def check_124m(out: Path) -> list[bool]:
    """Check 124M on the GPU, and return the result of each check."""
    # 250 steps read 131M tokens, and a shard has 100M.
    run_script(f"data/fineweb-edu.py --max_shards 2 --local_dir {out}/shards")
    flags = f"{FLAGS_124M} --data_dir {out}/shards"  # the model is train.py's default, 124M
    results = [  # True for each check that passes
        # 6.167 nats per token. Another data order or dtype changes it by less than 0.15.
        check_loss(flags, out / "run", step=250, expected=PUBLIC_RUN[250], tolerance=0.15),
        # GPU kernels do not sum in a fixed order, so two runs differ a little.
        check_resume(flags, out, tolerance=2e-3),
    ]

    # {"rate": 1.2e5, "peak_bytes": 7.1e9, "mfu": 0.41} in the JSON in the last line of bench.py
    bench = run_script("scripts/bench.py --device cuda --use_torch_compile --micro_batch_size 16")
    measured = json.loads(bench.splitlines()[-1])["measured"]["ours"]
    if measured["mfu"] is None:
        print("not checked: the MFU, because the peak FLOPS of this GPU are not known")
    else:
        # ASSUMED_UTILIZATION is 0.40, the MFU that --dry_run assumes for its forecast of the time
        results.append(print_verdict("MFU", measured["mfu"], 0.8 * ASSUMED_UTILIZATION, 1))
    forecast = run_script(f"train.py --dry_run --micro_batch_size 16 --run_dir {out}/forecast")
    # the forecast prints "X  in all": X is GB of GPU memory
    forecast_gb = float(forecast.partition("  in all")[0].split()[-1])
    peak_gb = measured["peak_bytes"] / 1e9
    results.append(print_verdict("peak GB", peak_gb, 0.85 * forecast_gb, 1.1 * forecast_gb))

    # HellaSwag of OpenAI's 124M against the published score, an accuracy from 0 to 1
    run_script(f"evaluate.py --model gpt2 --tasks hellaswag --out {out}/gpt2.json")
    scores = json.loads((out / "gpt2.json").read_text())["results"]
    accuracies = {(row["task"], row["protocol"], row["metric"]): row["value"] for row in scores}
    key = ("hellaswag", "build-nanogpt", "acc_norm")
    published_accuracy = PUBLISHED[key].by_model_type["gpt2"]  # 0.2955
    low, high = published_accuracy - 2e-3, published_accuracy + 2e-3
    results.append(print_verdict("HellaSwag of OpenAI's 124M", accuracies[key], low, high))
    return results


def main(options: FirstHourOptions) -> None:
    if not options.small and not torch.cuda.is_available():
        raise UserError("there is no CUDA GPU here; --small checks a CPU")
    for name in ("run", "whole", "resumed"):  # remove the runs of an earlier check
        shutil.rmtree(options.out / name, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    check = check_small if options.small else check_124m
    if not all(check(options.out)):
        sys.exit(1)


if __name__ == "__main__":
    start_script(main, FirstHourOptions)
