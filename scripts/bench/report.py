"""Rows of a benchmark's report: a job beside a peer and beside the limits of the hardware."""

import json
import platform
import re
from dataclasses import replace
from pathlib import Path

import torch

from model.empty import empty_gpt
from scripts.bench.measure import Job, measure
from utils.devices import is_emulated, pick_device, pick_dtype
from utils.errors import UserError
from utils.files import atomic_write
from utils.throughput import peak_flops


def nanogpt_job(job: Job, peer: Path | None) -> Job | None:
    """Return `job` for nanoGPT; None without a peer. Raises UserError if it has no model.py."""
    if peer is None:
        return None
    if not (peer / "model.py").is_file():
        raise UserError(f"--peer {peer} has no model.py; give a checkout of nanoGPT")
    return replace(job, kind="train_nanogpt", peer=str(peer.resolve()))


def format_modes(job: Job, peer: Job | None = None) -> str:
    """Return dtype, compilation and processes as text, and the peer's where they differ."""
    modes = [job.dtype, *["compiled"] * job.use_torch_compile]
    if job.processes > 1:
        modes += [f"{job.processes} processes", job.sharding]
    mode = ", ".join(modes)
    other = format_modes(peer) if peer else mode
    return mode if other == mode else f"{mode} (peer: {other})"


def training_title(name: str, job: Job, peer: Job | None = None) -> str:
    """Return the title of a row of training steps."""
    return f"training {name}, {job.batch} x {job.config.block_size}, {format_modes(job, peer)}"


def measure_row(title: str, job: Job, peer: Job | None, repeats: int) -> dict:
    """Return a row of the report: a job, its peer and, for training, the limits of the hardware.

    Raises UserError.
    """
    device, is_training = pick_device(job.device), job.kind.startswith("train")
    jobs = [job, peer] if peer else [job]
    if is_training:
        jobs += [replace(job, kind=kind, processes=1) for kind in ("matrix", "copy")]
    figures = measure(jobs, repeats, in_turn=device.type == "cpu")
    measured = dict(zip((job.kind for job in jobs), figures, strict=True))
    ours, row = figures[0], {"what": title, "unit": job.unit, "measured": measured}
    if peer:
        row["peer"] = peer.kind
        row["ratio"] = ours["rate"] / figures[1]["rate"]
        row["memory_ratio"] = ours["peak_bytes"] / figures[1]["peak_bytes"]
    if is_training:
        reached = ours["rate"] * empty_gpt(job.config).flops_per_token() / job.processes  # FLOP/s
        row["share_of_matrix"] = reached / measured["matrix"]["rate"]
        peak = peak_flops(device, pick_dtype(job.dtype, device))
        row["mfu"] = reached / peak if peak else None
    return row


def format_row(row: dict) -> str:
    """Return a row of the report as one line of text."""

    def speed(figures: dict) -> str:
        return f"{figures['rate']:,.4g} {row['unit']}/s, {figures['peak_bytes'] / 1e9:.2f} GB"

    text = f"{row['what']}: {speed(next(iter(row['measured'].values())))}"
    if "peer" in row:
        text += f"; {row['peer']} {speed(row['measured'][row['peer']])}: "
        text += f"{row['ratio']:.2f}x the speed, {row['memory_ratio']:.2f}x the memory"
    if "share_of_matrix" in row:
        matmul, copy = (row["measured"][kind]["rate"] / 1e9 for kind in ("matrix", "copy"))
        text += f"; {row['share_of_matrix']:.0%} of the {matmul:,.0f} GFLOP/s of matmuls alone"
        text += f", memory copies {copy:.1f} GB/s"
        text += f"; MFU {row['mfu']:.1%}" if row["mfu"] else ""
    return text


def start_report(device: torch.device) -> dict:
    """Print the hardware and return a report that holds it and no rows."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    if is_emulated(torch.bfloat16, device):
        name += " without bfloat16"
    hardware = {
        "device": f"{device.type} {name}",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    print(", ".join(f"{key} {value}" for key, value in hardware.items()))
    return {"hardware": hardware, "rows": []}


def finish_report(report: dict, out: Path | None) -> None:
    """Write a report to `out`, if given, and print it as one line of JSON."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as file:
            file.write(json.dumps(report, indent=1).encode())
    print(json.dumps(report))


def cpu_name() -> str:
    """Return the model name of the CPU, from /proc/cpuinfo on Linux."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)", info.read_text() if info.exists() else "", re.M)
    return found[1] if found else platform.processor() or platform.machine()
