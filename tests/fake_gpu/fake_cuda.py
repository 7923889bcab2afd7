"""A CUDA device that computes on the CPU, for builds of PyTorch without CUDA.

    python tests/fake_gpu/fake_cuda.py SCRIPT ARGS

runs a script on it. What a script does only on GPUs is executed, with true values. An operation
that a GPU would refuse, for CPUs only or on tensors of two devices, raises Refused. The last line
of standard error is JSON: `syncs`, how often each line of the project made the host wait for the
GPU, and `attention`, whether cuDNN was allowed for queries and keys of each length.

The one idea: OnGPU is a tensor without memory that says that it is on cuda:0 and holds a CPU tensor
with its values. Its operations run on these, and their results become OnGPU again. Compilation,
DDP and FSDP are not covered; attention is the sum of matmuls and a softmax.
"""

import collections
import contextlib
import json
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

from cuda_hooks import NUM_GPUS  # first: PyTorch asks these hooks while it is imported

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map_only

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# operations that take tensors of two devices
BETWEEN_DEVICES = {"copy_", "_to_copy", "index", "index_put_", "index_put", "set_"}
# operations whose result the host needs before it goes on
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}
INDEXING = {"index", "index_put_", "index_put"}

syncs: collections.Counter[str] = collections.Counter()  # by line
attention: set[tuple[int, int, bool, bool]] = set()  # queries, keys, has a mask, cuDNN is allowed


class Refused(RuntimeError):
    """A GPU could not do this."""


class OnGPU(Tensor):
    """A tensor that says that it is on the GPU; `values` is on the CPU."""

    @staticmethod
    def __new__(cls, values):
        return Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=GPU,
        )

    def __init__(self, values):
        assert not isinstance(values, OnGPU)
        self.values = values

    def tolist(self):
        return self.cpu().tolist()  # PyTorch has none for subclasses

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class FakeGPU(TorchDispatchMode):
    """Make new tensors on the GPU where a program asks for it by `device=`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """Run an operation on the CPU; its results are on the GPU if its tensors or `device` are."""
    name = func._schema.name.split("::")[1]
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    asked_devices = [x for x in leaves if isinstance(x, torch.device)]
    uses_gpu = any(isinstance(x, OnGPU) for x in tensors)
    if uses_gpu:
        refuse(func, name, tensors)
    count_syncs(name, args, kwargs, asked_devices, uses_gpu)
    if name == "is_pinned":
        return False
    if name == "_pin_memory":
        return args[0].clone()

    values_args, values_kwargs = tree_map_only(OnGPU, lambda x: x.values, (args, kwargs))
    values_args, values_kwargs = tree_map_only(
        torch.device, lambda device: CPU, (values_args, values_kwargs)
    )
    result = func(*values_args, **values_kwargs)
    if name == "copy_":
        result_on_gpu = isinstance(args[0], OnGPU)
    elif asked_devices:
        result_on_gpu = asked_devices[0].type == "cuda"
    else:
        result_on_gpu = uses_gpu
    if not result_on_gpu:
        return result
    wrapped = tree_map_only(Tensor, lambda x: x if isinstance(x, OnGPU) else OnGPU(x), result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def refuse(func, name, tensors):
    """Raise Refused for an operation with a tensor on the GPU that a GPU would not do."""
    if func.namespace in ("mkldnn", "onednn", "mkl") or "_cpu" in name:
        raise Refused(f"{func} is for CPUs and got a CUDA tensor")
    if name in BETWEEN_DEVICES:
        return
    others = [tuple(x.shape) for x in tensors if not isinstance(x, OnGPU) and x.dim() > 0]
    if others:
        raise Refused(f"{func}: tensors on cuda:0 and on the CPU, of shapes {others}")


def count_syncs(name, args, kwargs, asked_devices, uses_gpu):
    """Count an operation in `syncs` if the host waits in it for the GPU."""
    if name == "copy_":
        to_gpu, from_gpu = isinstance(args[0], OnGPU), isinstance(args[1], OnGPU)
    elif name == "_to_copy" and asked_devices:
        to_gpu, from_gpu = asked_devices[0].type == "cuda", uses_gpu
    else:
        to_gpu = from_gpu = uses_gpu
    waits = name in READS and uses_gpu
    if from_gpu != to_gpu:
        is_async = kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,))
        waits = not (to_gpu and is_async)
    if name in INDEXING and uses_gpu:  # by a mask: the number of results has to be known
        waits = any(x is not None and x.dtype is torch.bool for x in args[1])
    if waits:
        syncs[line_of_project()] += 1


def line_of_project():
    """Return the line of the project that runs."""
    for frame in reversed(traceback.extract_stack()):
        if "torch/" not in frame.filename and frame.filename != __file__ and "<" not in frame.name:
            return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"
    return "?"


def install():
    """Answer in the place of the driver what torch.cuda asks it."""

    class Properties:
        name, total_memory, multi_processor_count = "NVIDIA H100 80GB HBM3", 80 * 10**9, 132
        major, minor = 9, 0

    answers = {
        "is_available": True,
        "_lazy_init": None,
        "device_count": NUM_GPUS,
        "current_device": 0,
        "set_device": None,
        "manual_seed_all": None,
        "get_device_properties": Properties,
        "get_device_capability": (Properties.major, Properties.minor),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch._C._set_only_lift_cpu_tensors(True)  # FakeGPU sees torch.tensor(..., device=)
    torch.__future__.set_swap_module_params_on_conversion(True)  # `data` keeps no subclass
    attend = F.scaled_dot_product_attention

    def attend_and_note(query, key, value, mask, *args):
        if isinstance(query, OnGPU):  # the narrow copies of model/proof.py are on the CPU
            with_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
            attention.add((query.size(2), key.size(2), mask is not None, with_cudnn))
        return attend(query, key, value, mask, *args)

    F.scaled_dot_product_attention = attend_and_note
    run_thread = threading.Thread.run

    def run_with_gpu(thread):
        with FakeGPU():  # each thread has modes of its own
            run_thread(thread)

    threading.Thread.run = run_with_gpu


def run_script(path):
    """Run a script of the project on the fake GPU; print what was counted when it exits."""
    exit_process = os._exit  # by which the scripts end

    def report_and_exit(code):
        counted = {"syncs": syncs, "attention": sorted(attention)}
        print(json.dumps(counted), file=sys.stderr, flush=True)
        exit_process(code)

    os._exit = report_and_exit
    sys.path.insert(0, str(Path(path).resolve().parent))
    with FakeGPU():
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    run_script(sys.argv[0])
