"""Speed of training: peak FLOP/s of known GPUs, and the time, tokens/s and MFU of a step.

MFU, model FLOPs utilization (Chowdhery et al. 2022, PaLM), is the FLOP/s that the model's formula
needs at the measured tokens/s, divided by the peak of the devices.
"""

import re
import time
from dataclasses import dataclass

import torch

from utils.distributed import Process

NETWORK_BANDWIDTH = 50e9  # bytes/s of a 400 Gbit/s network card, one per GPU


@dataclass(frozen=True)
class GPU:
    """Model of a GPU, from the maker's data sheet."""

    name: str
    """Words that are all in the name that the driver gives, such as "NVIDIA H100 80GB HBM3"."""
    peak_flops: float
    """Peak FLOP/s of dense matmuls in 16 bits that add up in float32."""
    memory_gb: int = 0
    """GB of 1e9 bytes, for the GPUs that --dry_run --device can name."""
    dtype: str = "bfloat16"
    """Dtype that --dtype auto takes on it."""
    bandwidth: float = 0.0
    """Bytes/s that it sends to GPUs of its machine, by NVLink or else PCIe; 0: not known."""


# The first entry that fits is used: "H200 NVL" comes before "H200", which would fit, too.
GPUS = (
    GPU("GB200", 2500e12),
    GPU("B200", 2250e12, memory_gb=180, bandwidth=900e9),
    GPU("H200 NVL", 835e12),
    GPU("H100 NVL", 835e12),
    GPU("H100 PCIe", 756e12),
    GPU("H800 PCIe", 756e12),
    GPU("GH200", 989e12),
    GPU("H200", 989e12, memory_gb=141, bandwidth=450e9),
    GPU("H100", 989e12, memory_gb=80, bandwidth=450e9),
    GPU("H800", 989e12),
    GPU("A100", 312e12, memory_gb=80, bandwidth=300e9),
    GPU("A800", 312e12),
    GPU("L40S", 362e12),
    GPU("L4", 121e12, memory_gb=24, bandwidth=32e9),
    GPU("A10G", 70e12, memory_gb=24, bandwidth=32e9),
    GPU("RTX PRO 6000 Max Q", 438.9e12),
    GPU("RTX PRO 6000 Workstation", 503.8e12, memory_gb=96, bandwidth=64e9),
    GPU("RTX A6000", 154.8e12, memory_gb=48, bandwidth=32e9),
    GPU("RTX 5090", 209.5e12, memory_gb=32, bandwidth=64e9),
    GPU("RTX 5080", 112.6e12, memory_gb=16, bandwidth=64e9),
    GPU("RTX 4090", 165.2e12, memory_gb=24, bandwidth=32e9),
    GPU("RTX 4080", 97.5e12, memory_gb=16, bandwidth=32e9),
    GPU("RTX 3090", 71e12),
    GPU("RTX 3080", 59.5e12, memory_gb=10, bandwidth=32e9),
    # An eighth of 1 PFLOP/s in sparse FP4, the only peak that the maker gives.
    GPU("GB10", 125e12, memory_gb=128),
    GPU("MI300X", 1307e12),
    GPU("V100 PCIE", 112e12, dtype="float16"),
    GPU("V100", 125e12, memory_gb=16, dtype="float16", bandwidth=150e9),
    GPU("T4", 65e12, memory_gb=16, dtype="float16", bandwidth=16e9),
)
# GPUs that --dry_run --device can name, by that name, such as "rtx4090"
NAMED_GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in GPUS if gpu.memory_gb}
# Words in the names of variants ("RTX 4090 Laptop GPU") and of parts of a GPU (MIG), whose peak is
# not that of the table.
VARIANTS = {"MIG", "Laptop", "D", "Ti", "SUPER", "FHHL"}


def find_gpu(device_name: str) -> GPU | None:
    """Return the GPU that the driver calls `device_name`, None if its peak is not known."""
    # names are written like "NVIDIA H100 80GB HBM3" or "A100-SXM4-80GB"
    words = set(re.split("[ -]", device_name))
    if words & VARIANTS:
        return None
    for gpu in GPUS:
        if words.issuperset(gpu.name.split()):
            return gpu
    return None


def gpu_of(device: torch.device, dtype: torch.dtype) -> GPU | None:
    """Return the GPU that a device is, None if its peak of matmuls in `dtype` is not known, as for
    CPUs and float32."""
    # The table holds the peak of float16 and bfloat16. float32 reaches a fraction of it.
    if device.type != "cuda" or dtype is torch.float32:
        return None
    return find_gpu(torch.cuda.get_device_name(device))


class StepTimer:
    """Measure the time of training steps on the equal devices of all processes."""

    def __init__(self, flops_per_token: int, process: Process) -> None:
        self.flops_per_token = flops_per_token  # forward and backward
        self.gpu = gpu_of(process.device, process.dtype)  # None if its peak is not known
        self.num_devices = process.world_size
        self.start_seconds = 0.0  # time.perf_counter() at the start of the step

    def start(self) -> None:
        """Begin a step."""
        self.start_seconds = time.perf_counter()

    def stop(self, num_tokens: int) -> dict[str, float | None]:
        """End a step on `num_tokens` tokens of all devices; return columns for the log:
        tokens/s, MFU, milliseconds.

        The step must have ended with a host sync, or a GPU is still at work on it.
        """
        seconds = time.perf_counter() - self.start_seconds
        tokens_per_second = num_tokens / seconds
        mfu = None  # a share, 0 to 1; None on CPUs and unknown GPUs
        if self.gpu is not None:
            total_peak_flops = self.num_devices * self.gpu.peak_flops
            mfu = self.flops_per_token * tokens_per_second / total_peak_flops
        return {
            "tokens_per_s": tokens_per_second,
            "mfu": mfu,
            "ms": 1000 * seconds,
        }
