"""Rows of bench.py and scripts/bench_gpu.py: a measurement beside a peer's and beside limits."""

import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.config import GPTConfig
from model.gpt import skeleton
from scripts.bench.measure import Job, Measurement, measure
from utils.distributed import is_emulated, pick_device, pick_dtype
from utils.throughput import flops_per_token, peak_flops


@dataclass(frozen=True)
class Comparison:
    """What ours reaches, beside a peer and beside limits: "matrix", in FLOP/s, and "copy"."""

    what: str
    unit: str
    ours: Measurement
    peer: Measurement | None = None
    limits: tuple[Measurement, ...] = ()
    flops: int = 0
    """Arithmetic of one unit."""


def steps(name: str, ours: Job, theirs: Job, peer: Path | None) -> Comparison:
    """Training of two jobs, if there is a peer, beside the limits of ours."""
    shape, alone = ours.shape, replace(ours, processes=1)
    parameters = skeleton(GPTConfig(**shape)).num_multiplying()
    what = f"training {name}, {ours.batch} x {shape['block_size']}, {mode(ours)}"
    if peer and mode(theirs) != mode(ours):
        what += f" (peer: {mode(theirs)})"
    return Comparison(
        what,
        "tokens",
        Measurement("train", ours),
        Measurement("train_nanogpt", replace(theirs, peer=str(peer.resolve()))) if peer else None,
        (Measurement("matrix", alone), Measurement("copy", alone)),
        flops_per_token(parameters, shape["n_layer"], shape["n_embd"], shape["block_size"]),
    )


def mode(job: Job) -> str:
    """How a job trains or samples, in words."""
    several = f", {job.processes} processes, {job.sharding}" if job.processes > 1 else ""
    return job.dtype + (", compiled" if job.compile else "") + several


def figures(comparison: Comparison, repeats: int) -> dict:
    """A row of the report."""
    device = pick_device(comparison.ours.job.device)
    others = [comparison.peer] if comparison.peer else []
    all_of_it = [comparison.ours, *others, *comparison.limits]
    found = measure(all_of_it, repeats, in_turn=device.type == "cpu")
    by_kind = dict(zip((m.kind for m in all_of_it), found, strict=True))
    ours = found[0]
    row = {"what": comparison.what, "unit": comparison.unit, "measured": by_kind}
    if comparison.peer:
        row["peer"] = comparison.peer.kind
        row["ratio"] = ours["rate"] / found[1]["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / found[1]["peak_bytes"]
    if comparison.flops:
        reached = ours["rate"] * comparison.flops / comparison.ours.job.processes
        row["share_of_matrix"] = reached / by_kind["matrix"]["rate"]
        peak = peak_flops(device, pick_dtype(comparison.ours.job.dtype, device))
        row["mfu"] = reached / peak if peak else None
    return row


def line(row: dict) -> str:
    """A row as text."""
    ours, *_ = row["measured"].values()
    text = f"{row['what']}: {ours['rate']:,.4g} {row['unit']}/s, {ours['peak_bytes'] / 1e9:.2f} GB"
    if "peer" in row:
        theirs = row["measured"][row["peer"]]
        text += (
            f"; {row['peer']} {theirs['rate']:,.4g} {row['unit']}/s, "
            f"{theirs['peak_bytes'] / 1e9:.2f} GB: {row['ratio']:.2f}x the speed, "
            f"{row['memory_ratio']:.2f}x the memory"
        )
    if "share_of_matrix" in row:
        matrix, copy = (row["measured"][kind]["rate"] for kind in ("matrix", "copy"))
        text += (
            f"; {row['share_of_matrix']:.0%} of the {matrix / 1e9:,.0f} GFLOP/s of its matrix "
            f"products alone, memory copies {copy / 1e9:.1f} GB/s"
        )
        text += f"; MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return text


def processor() -> str:
    """The name of the CPU, which Linux tells in a file of its own."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hardware(device: torch.device) -> dict:
    """What the figures are of."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    if is_emulated(torch.bfloat16, device):
        name += " without bfloat16"
    return {
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
