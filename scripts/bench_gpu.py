"""Run the benchmarks of scripts/bench_gpu.sh, which describes them and sets the environment."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import torch

from scripts.bench import correctness, small, xl
from scripts.bench.gpu import Bench, Item, Skipped, free_everything
from utils.devices import pick_device

CALLS: dict[str, dict[str, Item]] = {
    "correctness": correctness.ITEMS,
    "small": small.ITEMS,
    "xl": xl.ITEMS,
}


def parse_args() -> argparse.Namespace:
    """Parse the command line with argparse: the script runs without tyro."""
    parser = argparse.ArgumentParser(prog="bench_gpu.sh", description=__doc__)
    parser.add_argument("call", choices=list(CALLS))
    parser.add_argument("--peer", type=Path, help="checkout of nanoGPT, for small")
    parser.add_argument("--data", type=Path, help="folder of shards to train on, for small")
    parser.add_argument("--items", nargs="+", help="items to measure; all unless given")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    parser.add_argument("--out", type=Path, default=Path("logs/bench_gpu.jsonl"), help="JSON lines")
    parser.add_argument("--seconds", type=float, default=480, help="start no item after this long")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for any machine")
    args = parser.parse_args()
    known = CALLS[args.call]
    if unknown := set(args.items or ()) - set(known):
        parser.error(f"--items {' '.join(sorted(unknown))}: {args.call} has {' '.join(known)}")
    return args


def measure(item: Item, bench: Bench) -> dict:
    """Return the figures of an item, or why there are none; what it prints goes to a file."""
    began = time.perf_counter()
    try:
        with open(bench.folder / "output.txt", "a") as output, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(output))
            stack.enter_context(contextlib.redirect_stderr(output))
            figures = item(bench)
    except Skipped as reason:
        figures = {"skipped": str(reason)}
    except Exception as error:  # the other items are still measured
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}"[:2000]}
    free_everything()
    return {"seconds": round(time.perf_counter() - began, 2), **figures}


def append(row: dict, path: Path) -> None:
    """Append a row to a file, so that it outlives this process, and print it."""
    line = json.dumps(row)
    with open(path, "a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(line, flush=True)


def main() -> None:
    args, began = parse_args(), time.perf_counter()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    failed = False
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        logs = args.out.with_suffix("")
        bench = Bench(device, Path(folder), logs, args.tiny, args.peer, args.data)
        for name in args.items or CALLS[args.call]:
            row = {"call": args.call, "item": name}
            if time.perf_counter() - began > args.seconds:
                row["skipped"] = f"--seconds {args.seconds:.0f} are over"
            else:
                row |= measure(CALLS[args.call][name], bench)
            failed |= "error" in row or row.get("ok") is False
            append(row, args.out)
    sys.exit(failed)


if __name__ == "__main__":
    main()
