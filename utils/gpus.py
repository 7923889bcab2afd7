"""GPUs by name: peak FLOP/s and memory, from the makers' data sheets."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Model of a GPU."""

    name: str
    """Words that the name of the device contains, all of them."""
    peak: float
    """Peak dense FLOP/s in `dtype`."""
    memory: int | None = None
    """GB of 1e9 bytes, for the GPUs that --dry_run --device names."""
    dtype: str = "bfloat16"
    """Dtype that --dtype auto takes."""


GPUS = (  # the first entry whose words are all in the device's name is used
    *(GPU("GB200", 2500e12), GPU("B200", 2250e12, 180), GPU("H200 NVL", 835e12)),
    *(GPU("H100 NVL", 835e12), GPU("H100 PCIe", 756e12), GPU("H800 PCIe", 756e12)),
    *(GPU("GH200", 989e12), GPU("H200", 989e12, 141), GPU("H100", 989e12, 80)),
    *(GPU("H800", 989e12), GPU("A100", 312e12, 80), GPU("A800", 312e12), GPU("L40S", 362e12)),
    *(GPU("RTX 5090", 209.5e12), GPU("RTX 4090", 165.2e12, 24), GPU("RTX 3090", 71e12)),
    *(GPU("MI300X", 1307e12), GPU("T4", 65e12, 16, "float16")),
)
NAMED_GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in GPUS if gpu.memory}
OTHER_CHIPS = {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}  # words of slower or partial devices


def find_gpu(device_name: str) -> GPU | None:
    """Return the GPU that the driver calls `device_name`, None if it is not listed."""
    words = set(re.split(r"[ -]", device_name))
    if words & OTHER_CHIPS:
        return None
    return next((gpu for gpu in GPUS if words >= set(gpu.name.split())), None)
