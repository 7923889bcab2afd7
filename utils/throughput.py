"""Speed of training: peak FLOP/s of known GPUs, and the time, tokens/s and MFU of a step.

MFU (model FLOPs utilization; Chowdhery et al. 2022, PaLM) is the model's FLOPs per token, by
formula, times the measured tokens/s, divided by the peak FLOP/s of all devices.
"""

import re
import time
from dataclasses import dataclass

import torch

from utils.distributed import Process
from utils.launch import Launch

NETWORK_BANDWIDTH = 50e9  # bytes/s of a 400 Gbit/s network card, one per GPU


@dataclass(frozen=True)
class GPU:
    """Model of a GPU, with numbers of the maker's data sheet."""

    name: str
    """Words that the driver's name of the GPU, such as "NVIDIA H100 80GB HBM3", must all hold."""
    peak_flops: float
    """Peak FLOP/s of dense 16-bit matmuls that accumulate in float32."""
    memory_gb: int = 0
    """Memory in GB of 1e9 bytes; 0 for GPUs that --dry_run --device cannot name."""
    dtype_name: str = "bfloat16"
    """Dtype that --dtype auto takes on this GPU."""
    bandwidth: float = 0.0
    """Bytes/s from this GPU to others of its machine, by NVLink or else PCIe; 0: not known."""


# find_gpu takes the first entry that fits, so "H200 NVL" comes before "H200", which fits it, too.
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
    GPU("RTX 5070", 61.7e12, memory_gb=12, bandwidth=64e9),
    GPU("RTX 4090", 165.2e12, memory_gb=24, bandwidth=32e9),
    GPU("RTX 4080", 97.5e12, memory_gb=16, bandwidth=32e9),
    GPU("RTX 4070", 58.3e12, memory_gb=12, bandwidth=32e9),
    GPU("RTX 4060", 30.2e12, memory_gb=8, bandwidth=16e9),
    GPU("RTX 3090", 71e12, memory_gb=24, bandwidth=32e9),
    GPU("RTX 3080", 59.5e12, memory_gb=10, bandwidth=32e9),
    GPU("RTX 3060", 25.5e12, memory_gb=12, bandwidth=32e9),
    # an eighth of 1 PFLOP/s in sparse FP4, which is the only peak that the maker gives
    GPU("GB10", 125e12, memory_gb=128),
    GPU("MI300X", 1307e12),
    GPU("V100 PCIE", 112e12, dtype_name="float16"),
    GPU("V100", 125e12, memory_gb=16, dtype_name="float16", bandwidth=150e9),
    GPU("T4", 65e12, memory_gb=16, dtype_name="float16", bandwidth=16e9),
)
GPUS_PER_MACHINE = 8  # planned for, unless --device says otherwise
# GPUs that --dry_run --device can name, such as "rtx4090"
NAMED_GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in GPUS if gpu.memory_gb}
# Words in the names of variants ("RTX 4090 Laptop GPU") and of parts of a GPU (MIG). Their peaks
# differ from the table.
VARIANTS = {"MIG", "Laptop", "D", "Ti", "SUPER", "FHHL"}


def plan_gpus(device: str) -> tuple[GPU, Launch] | None:
    """Return the GPU that --device names for a dry run, and the numbers of processes; None for a
    device of this machine. "16xh100" are 16 GPUs on two machines, "4x4xh100" are 16 on four."""
    match = re.fullmatch(r"(?:([1-9]\d*)x)?(?:([1-9]\d*)x)?(\w+)", device)
    if match is None or match[3] not in NAMED_GPUS:
        return None
    # ("4", "8", "h100") of "4x8xh100", ("16", None, "h100") of "16xh100"
    first_number, second_number, gpu_name = match.groups()
    if second_number is not None:  # "4x8xh100": 4 machines of 8
        processes_per_machine = int(second_number)
        world_size = int(first_number) * processes_per_machine
    else:  # "16xh100": machines of 8
        world_size = int(first_number or 1)
        processes_per_machine = min(GPUS_PER_MACHINE, world_size)
    launch = Launch(world_size=world_size, processes_per_machine=processes_per_machine)
    return NAMED_GPUS[gpu_name], launch


def find_gpu(device_name: str) -> GPU | None:
    """Return the entry of GPUS for the driver's name of a GPU; None if its peak is not known."""
    # such as "NVIDIA H100 80GB HBM3" or "A100-SXM4-80GB"
    words = set(re.split("[ -]", device_name))
    if words & VARIANTS:
        return None
    for gpu in GPUS:
        if words.issuperset(gpu.name.split()):
            return gpu
    return None


def gpu_of(device: torch.device, dtype: torch.dtype) -> GPU | None:
    """Return the entry of GPUS for a device, whose peak gives the MFU. Return None if the peak of
    matmuls in `dtype` is not known, as for CPUs and for float32."""
    # The table holds the peak of float16 and bfloat16. float32 reaches only a fraction of it.
    if device.type != "cuda" or dtype is torch.float32:
        return None
    return find_gpu(torch.cuda.get_device_name(device))


class StepTimer:
    """Measure the time, tokens/s and MFU of training steps; all processes have equal devices."""

    def __init__(self, flops_per_token: int, process: Process) -> None:
        self.flops_per_token = flops_per_token  # of forward and backward pass
        # a GPU, with the peak FLOP/s of its matmuls in 16 bits; None, and so no MFU, in float32 and
        # on devices whose peak is not known
        self.gpu = gpu_of(process.device, process.dtype)
        self.num_devices = process.world_size  # each with the peak of self.gpu
        self.start_seconds = 0.0  # time.perf_counter() at the start of the step

    def start(self) -> None:
        """Start the clock of a step."""
        self.start_seconds = time.perf_counter()

    def stop(self, num_tokens: int) -> dict[str, float | None]:
        """Stop the clock of a step on `num_tokens` tokens, counted over all devices. Return columns
        for the log, such as {"tokens_per_s": 1.2e6, "mfu": 0.41, "ms": 437.0} (milliseconds).

        The step must have ended with a host sync; else a GPU may still be working on it.
        """
        seconds = time.perf_counter() - self.start_seconds
        tokens_per_second = num_tokens / seconds
        mfu = None  # a fraction, 0 to 1; None on CPUs, on unknown GPUs and in float32
        if self.gpu is not None:
            total_peak_flops = self.num_devices * self.gpu.peak_flops
            mfu = self.flops_per_token * tokens_per_second / total_peak_flops
        return {
            "tokens_per_s": tokens_per_second,
            "mfu": mfu,
            "ms": 1000 * seconds,
        }
