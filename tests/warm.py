"""Scripts that start at once: forks of a process that has imported what takes seconds to import.

    python tests/warm.py FD    # answers requests on a listening socket until its stdin ends

A request is a command line, a folder, an environment and three standard streams. The answers are
the process id of the script and, once it ends, its exit code. Linux only.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
from typing import IO, NoReturn

ADDRESS = "TESTS_WARM_SOCKET"  # environment variable that names the server's socket
IMPORTED = (  # none of them starts a thread, which a fork would lack; nothing of this project
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "matplotlib.pyplot",
    "tyro",
    "safetensors.torch",
)


def start_server(address: str, env: dict) -> subprocess.Popen:
    """Start the process to fork from, which lives until its stdin is closed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        return subprocess.Popen(
            [sys.executable, __file__, str(listener.fileno())],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )


def serve(listener: socket.socket) -> None:
    """Fork once for each request."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    gc.freeze()
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def answer(connection: socket.socket) -> NoReturn:
    """Fork again for the script and wait for its end; kill it if nobody is left to be told."""
    message, streams, _, _ = socket.recv_fds(connection, 2**20, 3)
    pid = os.fork()
    if pid == 0:
        connection.close()
        run_script(streams=streams, **json.loads(message))
    connection.send(str(pid).encode())
    handle = os.pidfd_open(pid)
    if handle not in select.select([handle, connection], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.send(str(code).encode())
    finally:
        os._exit(0)


def run_script(args: list[str], cwd: str, env: dict, streams: list[int]) -> NoReturn:
    """Become `python ARGS` in a process group of its own."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    path = os.path.abspath(args[0])
    sys.path[0] = os.path.dirname(path)
    sys.path[1:1] = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.argv = args
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if os.path.basename(path) in ("train.py", "finetune.py"):  # drawing takes longer than the run
        sys.modules["matplotlib"] = None
    main.__file__ = path
    code = 0
    try:
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), main.__dict__)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Script:
    """A script that runs in a fork, to be used as a subprocess.Popen."""

    def __init__(self, args: list[str], cwd: object, env: dict, *streams: IO) -> None:
        self.args, self.returncode = args, None
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.connect(os.environ[ADDRESS])
        message = json.dumps({"args": args, "cwd": str(cwd), "env": env}).encode()
        streams = [stream.fileno() for stream in streams]
        socket.send_fds(self.connection, [message], streams)
        self.pid = int(self.connection.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.connection.settimeout(timeout)
            try:
                self.returncode = int(self.connection.recv(100))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()


def run_all(
    commands: list[list[str]], envs: list[dict], cwd: object, input: bytes, timeout: float
) -> list[tuple[int, bytes, bytes]]:
    """Run scripts side by side; the exit code, stdout and stderr of each."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:

        def temporary() -> IO[bytes]:
            return stack.enter_context(tempfile.TemporaryFile())

        stdin = temporary()
        stdin.write(input)
        stdin.seek(0)
        started = []
        for args, env in zip(commands, envs, strict=True):
            outputs = temporary(), temporary()
            script = Script(args, cwd, env, stdin, *outputs)
            stack.callback(script.kill)
            started.append((script, outputs))
        codes = [script.wait(max(0, deadline - time.monotonic())) for script, _ in started]
        for _, outputs in started:
            for file in outputs:
                file.seek(0)
        return [
            (code, out.read(), err.read())
            for code, (_, (out, err)) in zip(codes, started, strict=True)
        ]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
