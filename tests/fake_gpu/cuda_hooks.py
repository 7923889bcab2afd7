"""What PyTorch's C++ asks about CUDA, answered as on a machine with one GPU.

Importing this module compiles the answers, the first time, and loads them. fake_cuda.py imports it
above torch, which asks while it is imported.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path

NUM_GPUS = 1

# the autograd engine has a thread for each device
HOOKS = r"""
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_GPUS; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
};
namespace at { REGISTER_CUDA_HOOKS(CUDAHooks) }
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, Guard) }
"""


def load_hooks():
    """Compile HOOKS, the first time, and load them; it has to come before `import torch`."""
    assert "torch" not in sys.modules
    torch_folder = Path(find_spec("torch").origin).parent
    version = (torch_folder / "version.py").read_text()
    # the folder, too: the library looks for PyTorch there, and another environment may be gone
    checksum = zlib.crc32(f"{HOOKS} {NUM_GPUS} {version} {torch_folder}".encode())
    name = f"fake_cuda_{os.getuid()}_{checksum:08x}.so"
    library = Path(tempfile.gettempdir()) / name
    if not library.exists():
        unfinished = f"{library}.{os.getpid()}"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", "-w", "-xc++", "-", "-o", unfinished]
        command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-Wl,--no-as-needed"]
        command += ["-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_folder}/lib"]
        command += [f"-DNUM_GPUS={NUM_GPUS}"]
        subprocess.run(command, input=HOOKS.encode(), check=True)
        os.replace(unfinished, library)
    ctypes.CDLL(str(library))


load_hooks()
