"""Scripts that start at once: forks of a process that has imported what takes seconds to import."""

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
CONTEXT = multiprocessing.get_context("forkserver")
# with it PyTorch looks for GPUs without starting CUDA, which a fork could not use
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
# None of them starts a thread, which a fork would lack. Nothing of this project is loaded.
CONTEXT.set_forkserver_preload(
    [
        "torch._inductor.compile_fx",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "matplotlib.pyplot",
        "tyro",
        "safetensors.torch",
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)


class Script(CONTEXT.Process):
    """`python ARGS` in a process group of its own, to be used as a subprocess.Popen."""

    def __init__(self, args: list[str], env: dict, cwd: Path, files: list[Path]) -> None:
        """Start it; `files` are those of standard input, output and error."""
        super().__init__(daemon=True)  # ends with the tests
        for file in files:
            open(file, "ab").close()  # it is there at once
        self.command = args
        self.env = env
        self.cwd = cwd
        self.files = files
        self.start()

    def run(self) -> None:
        """Become the script; multiprocessing calls this in the fork."""
        gc.freeze()  # garbage collection need not visit what the server has imported
        os.setsid()
        multiprocessing.set_start_method(None, force=True)  # the usual one again
        for number, file in enumerate(self.files):
            # two streams of one file take turns
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
        sys.stdin = open(0)  # multiprocessing has put the null device in its place
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.env)
        # huggingface_hub has read the variables of the server: read those of this script
        importlib.reload(sys.modules["huggingface_hub.constants"])
        # the path of a new interpreter, without what pytest has added
        installed = [path for path in sys.path if "site-packages" in path or ROOT not in path]
        given = self.env.get("PYTHONPATH", "").split(os.pathsep)
        folder = os.path.dirname(os.path.abspath(self.command[0]))
        sys.path[:] = [folder, *filter(None, given), *installed]
        sys.argv = self.command
        runpy.run_path(self.command[0], run_name="__main__")

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.command, timeout)
        return self.exitcode
