"""GPUs by name: peak FLOP/s and memory, from the makers' data sheets."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Model of a GPU."""

    name: str
    """Words that the name of the device contains, all of them."""
    tflops: float
    """Peak dense bfloat16 TFLOP/s."""
    memory: int | None = None
    """GB of 1e9 bytes, for the GPUs that --dry_run --device names."""

    @property
    def peak(self) -> float:
        """Peak bfloat16 FLOP/s."""
        return self.tflops * 1e12


GPUS = (  # the first entry whose words are all in the device's name is used
    GPU("GB200", 2500.0),
    GPU("B200", 2250.0, 180),
    GPU("H200 NVL", 835.0),
    GPU("H100 NVL", 835.0),
    GPU("H100 PCIe", 756.0),
    GPU("H800 PCIe", 756.0),
    GPU("GH200", 989.0),
    GPU("H200", 989.0, 141),
    GPU("H100", 989.0, 80),
    GPU("H800", 989.0),
    GPU("A100", 312.0, 80),
    GPU("A800", 312.0),
    GPU("L40S", 362.0),
    GPU("RTX 5090", 209.5),
    GPU("RTX 4090", 165.2, 24),
    GPU("RTX 3090", 71.0),
    GPU("MI300X", 1307.0),
)
NAMED_GPUS = {gpu.name.lower().replace(" ", ""): gpu for gpu in GPUS if gpu.memory}
OTHER_CHIPS = {"MIG", "Laptop", "D", "Ti", "SUPER", "Max"}  # words of slower or partial devices


def find_gpu(device_name: str) -> GPU | None:
    """Return the GPU that the driver calls `device_name`, None if it is not listed."""
    words = set(re.split(r"[ -]", device_name))
    if words & OTHER_CHIPS:
        return None
    return next((gpu for gpu in GPUS if words >= set(gpu.name.split())), None)
