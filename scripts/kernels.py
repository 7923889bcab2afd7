"""The kernels of a training step: the milliseconds of each, and of each kind.

`python scripts/bench.py --profile` measures them, after the steps whose time counts, because the
profiler slows steps down. `bash scripts/bench_gpu.sh variants` prints several programs as tables.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.measure import Measurement, MeasureOptions, Program, measure_steps, start_training

PROFILED_STEPS = 5
NUM_LONGEST = 20  # kernels in the JSON and in the tables
# The kind of a kernel is the first one whose regular expression is found in its name. The compiler
# names a kernel after the operations that it fuses: triton_per_fused_add_native_layer_norm_view_5.
KINDS = {
    # First, because the names of flash attention hold "cutlass", too. The last two prepare and end
    # the backward pass of cuDNN's attention.
    "attention": r"flash|fmha|sdpa|scaled_dot_product|dot_do_o|convert_dq",
    # nvjet, xmma, CUTLASS and gemm are of cuBLAS, triton_tem of the compiler, aten::addmm and
    # aten::mm of a CPU. Those of Muon count here, too.
    "matmul": r"nvjet|xmma|cutlass|gemm|splitk|triton_tem|mm\b|linear",
    # with clipping, which takes the norm of the gradients: before "norm"
    "optimizer": r"adam|multi_tensor|foreach|vector_norm|lpnorm",
    # the operations of cross_entropy_ and cross_entropy_by_rows_ in model/chunked_loss.py
    "loss": r"softmax|amax|masked_fill|nll_loss|cross_?entropy",
    "activation": r"gelu|silu",
    # The residual stream is what is added, alone or in the kernel of the next norm.
    "norms and residual": r"norm|add_|_add\b|::add\b",
    "other": "",  # casts of weights, copies, gradients of biases and embeddings
}


def measure_and_profile(
    build: Callable[..., Program], options: MeasureOptions
) -> tuple[Measurement, dict[str, float]]:
    """Build a program, measure its training steps, then profile some more. Return the measurement
    and the milliseconds of a step in each kernel, by name, the longest first. On a CPU the kernels
    are PyTorch's operators, each without the time of the operators that it calls. Call it in a new
    process."""
    train_step, device = start_training(build, options)
    measurement = measure_steps(train_step, device, options)
    is_cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    # acc_events=True silences a warning about schedules of several cycles; here is one cycle.
    with profile(activities=[activity], acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            train_step()
    microseconds_by_kernel: Counter[str] = Counter()
    for event in profiler.key_averages():
        name = event.key  # "aten::mm", or "nvjet_hsh_128x256_64x4" of a GPU
        # Add, because a name may come twice: as an operator and as an annotation.
        if not is_cuda:
            microseconds_by_kernel[name] += event.self_cpu_time_total
        # A GPU's timeline also has calls of the host, and annotations, which span kernels.
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            microseconds_by_kernel[name] += event.self_device_time_total
    kernel_ms = {
        name: microseconds / 1000 / PROFILED_STEPS
        for name, microseconds in microseconds_by_kernel.most_common()
    }
    return measurement, kernel_ms


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    # in the order of KINDS, {"attention": r"flash|...", ..., "other": ""}: "" fits every name
    return next(kind for kind, regex in KINDS.items() if re.search(regex, kernel, re.IGNORECASE))


def summarize(kernel_ms: dict[str, float], step_ms: float) -> dict[str, dict[str, float]]:
    """Return milliseconds of a step by kind, and the longest kernels.

    "waiting" is the time of a step outside all kernels. On a CPU, which the profiler slows down, it
    may be negative.
    """
    kind_ms = dict.fromkeys(KINDS, 0.0)  # {"attention": 0.0, "matmul": 0.0, ...}
    for kernel, ms in kernel_ms.items():
        kind_ms[kind_of(kernel)] += ms
    # step_ms is of steps without the profiler, kernel_ms of steps with it
    kind_ms["waiting"] = step_ms - sum(kernel_ms.values())
    # the first 20 of kernel_ms, which has the longest kernels first
    return {"kind_ms": kind_ms, "kernel_ms": dict(list(kernel_ms.items())[:NUM_LONGEST])}


def print_tables(path: str) -> None:
    """Print a file of JSON lines of scripts/bench.py, each with the name of its "variant": a table
    of kinds, then the longest kernels of each."""
    # {"variant": "baseline", "torch": "2.13.0", "measured": {"ours": {"kind_ms": {...}, ...}}}
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    kinds = list(KINDS) + ["waiting"]  # ["attention", "matmul", ..., "waiting"], as in summarize
    print(f"| ms of a step | torch | all | {' | '.join(kinds)} |")
    print("|---|---" + "|---" * (1 + len(kinds)) + "|")
    for row in rows:
        kind_ms = row["measured"]["ours"]["kind_ms"]
        step_ms = sum(kind_ms.values())  # with "waiting"
        cells = " | ".join(f"{kind_ms[kind]:.1f}" for kind in kinds)
        print(f"| {row['variant']} | {row['torch']} | {step_ms:.1f} | {cells} |")
    for row in rows:
        print(f"\n{row['variant']}: ms of a step in the longest kernels")
        for kernel, ms in row["measured"]["ours"]["kernel_ms"].items():
            print(f"{ms:8.2f}  {kind_of(kernel)}: {kernel[:120]}")
