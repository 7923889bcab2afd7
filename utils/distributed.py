"""The processes of a distributed run: their ranks, their collectives and their signals.

torchrun starts one process for each device and numbers them (utils/launch.py). Every process
trains the same model and calls the same collectives (all-reduce, ...) in the same order: a
collective waits until all processes have called it.
training/parallel/data_parallel.py divides weights and gradients.

Nothing here watches for lost processes. When a process dies, its connections close and the
collectives of the other processes fail: with gloo at once, with NCCL perhaps only when torchrun
kills these processes. Then torchrun restarts all of them. TIMEOUT is for machines that go silent.
"""

import contextlib
import ctypes
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import Disconnected, UserError
from utils.launch import Launch, end_with_launcher, read_launch
from utils.network import announce_wait

Item = TypeVar("Item")
Output = TypeVar("Output")

# A collective fails after this time. Without a limit, the run would hang for good when a machine
# loses its power. The limit is longer than anything that one process does while the others wait,
# such as a download. A checkpoint may take longer: wait_until calls many short collectives for it.
TIMEOUT = timedelta(minutes=10)
POLL_SECONDS = 0.05  # wait_until sleeps this long between two collectives


class Stopped(Exception):
    """Raised after a signal, on all processes at the same place. The training loop catches it and
    saves a checkpoint. A training step that it interrupts is not counted."""


class StopSignal:
    """Remember the first SIGTERM, SIGINT, SIGUSR1 or SIGHUP, and ignore later ones, except for a
    second Ctrl-C without torchrun.

    `signal` is the number of the first signal, 0 before it; the run reads it between two batches.
    The main process prints what will happen. Schedulers and torchrun repeat their signals without
    any hurry, and SIGKILL ends a run that takes too long. Only a second Ctrl-C without torchrun is
    a person's, and exits at once.
    """

    def __init__(self) -> None:
        self.signal = 0  # no signal yet
        launch = read_launch()  # torchrun's RANK, WORLD_SIZE, ...; rank 0 without torchrun
        self.is_main = launch.rank == 0  # of all machines: it prints what the signal does
        self.is_launched = launch.address is not None  # by torchrun, which forwards its signals
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.receive)
        # SIGHUP says that the terminal was closed. nohup ignores it: leave that, the run goes on.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal; Python calls this between two instructions of the main thread."""
        if self.signal == 0:
            # only remembered: the run ends at a place where its state is consistent
            self.signal = number
            if self.is_main:
                # os.write, because the signal may have interrupted a print, which is not reentrant.
                # os.write raises OSError if nobody reads standard error any more, for example
                # after Ctrl-C to `train | tee`.
                message = "\nstopping soon, then saving"
                if not self.is_launched:
                    message += "; Ctrl-C again to stop now without saving"
                with contextlib.suppress(OSError):
                    os.write(2, f"{message}\n".encode())
        elif number == signal.SIGINT and not self.is_launched:
            raise SystemExit(128 + number)  # a second Ctrl-C of a person


@dataclass(frozen=True)
class Process:
    """This process of a distributed run: its ranks, its device and its collectives.

    With tensor parallelism several processes have the same data_rank: they share each transformer
    block and read the same data. The methods below "collectives" wait for the other processes: all
    processes must call them, in the same order.
    """

    data_rank: int
    """Number of the part of the data that this process reads, from 0."""
    data_parallel: int
    """Number of parts of the data: world_size / tensor_parallel."""
    device: torch.device
    """Device of this process; a GPU has its number: cuda:0."""
    dtype: torch.dtype = torch.float32
    """Dtype of matmuls under `autocast`, the same on all processes."""
    replicas: int = 1
    """Copies of the training state under --sharding (HSDP if there are several). The processes of a
    copy divide it among them."""
    processes_per_machine: int = 1
    """Processes of each machine; the greatest common divisor of machines' different numbers."""
    stop: StopSignal | None = None
    """Signal handler of a run, which saves before it ends; None in scripts that a signal ends."""
    tensor_parallel: int = 1
    """Processes that share each block: tensor parallelism (training/parallel/tensor_parallel)."""
    tensor_rank: int = 0
    """Number of this process in its tensor-parallel group, from 0."""

    @property
    def world_size(self) -> int:
        """Number of all processes, as torchrun counts them."""
        return self.data_parallel * self.tensor_parallel

    @property
    def rank(self) -> int:
        """Number of this process among all, from 0, as torchrun counts them."""
        # the processes of a tensor-parallel group have consecutive ranks
        return self.data_rank * self.tensor_parallel + self.tensor_rank

    @property
    def signal(self) -> int:
        """Number of the first signal that `stop` (a StopSignal, or None) has received; 0 if there
        was none."""
        return self.stop.signal if self.stop is not None else 0

    @property
    def is_main(self) -> bool:
        """True on the process that prints, and that creates and replaces files."""
        return self.rank == 0

    def print(self, message: str) -> None:
        """Print a message on the main process."""
        if self.is_main:
            print(message, flush=True)

    def autocast(self, *, keep_weights: bool = True) -> torch.autocast:
        """Return a context in which matmuls run in `dtype`. `keep_weights` keeps the cast copy of
        each weight until the context ends, for several forward passes."""
        return autocast(self.device, self.dtype, keep_weights=keep_weights)

    def to_device(self, batches: Iterator[tuple]) -> Iterator[tuple]:
        """Yield batches, tuples of NumPy arrays such as token ids and targets (B, T), as tuples of
        tensors on the device."""
        for arrays in batches:
            yield tuple(self.copy_to_device(torch.from_numpy(array)) for array in arrays)

    def copy_to_device(self, cpu_tensor: Tensor) -> Tensor:
        """Return a copy of the tensor on the device. The host does not wait for a copy to a GPU."""
        if self.device.type == "cuda":
            # A copy is asynchronous only from pinned memory. CUDA kernels that use the tensor are
            # queued behind the copy.
            return cpu_tensor.pin_memory().to(self.device, non_blocking=True)
        return cpu_tensor.to(self.device)

    # collectives

    def map_across_processes(
        self, function: Callable[[Item], Output], items: Sequence[Item]
    ) -> list[Output]:
        """Divide items among the processes, round-robin, and call `function` on each. Return the
        outputs of all items, in the order of the items, on every process.

        Every process calls the function equally often, because a sharded model's forward is a
        collective: in the last round, processes beyond the end do the last item again. Of 5 items,
        process 0 of two does 0, 2 and 4, process 1 does 1, 3 and again 4. Before each
        item all processes meet, so none waits longer than one item takes (TIMEOUT): raises Stopped
        there after a signal. An error of `function` is of this process alone, and the others may
        wait for it in a forward: no caller goes on past it.
        """
        outputs: dict[int, Output] = {}  # of this process; the key is the index of the item
        # Processes that share each block have one data_rank: they do the same item, together.
        for round_start in range(0, len(items), self.data_parallel):
            self.end_if_stopped()
            index = min(round_start + self.data_rank, len(items) - 1)  # or the last one again
            outputs[index] = function(items[index])
        outputs = self.merge(outputs)  # now the outputs of all processes
        return [outputs[index] for index in range(len(items))]

    def end_if_stopped(self) -> None:
        """Raise Stopped on every process if one of the processes got a signal."""
        # A scheduler may signal one machine only. The others would wait for it in a collective.
        if not self.all_agree(self.signal == 0):
            raise Stopped

    def all_done(self, is_done: bool) -> bool:
        """Return whether `is_done` is True on every process; raise Stopped after a signal.

        Text generation calls this every few tokens, so that all processes run equally many
        forwards: a sharded forward is a collective.
        """
        self.end_if_stopped()
        return self.all_agree(is_done)

    def all_agree(self, condition: bool) -> bool:
        """Return whether the condition holds on every process."""
        return self.min(int(condition)) == 1

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait until `is_done` returns True on every process, however long that takes."""
        while not self.all_agree(is_done()):
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Return a context that raises on every process if its body raises on one of them. The
        failing process raises its own error, the others a UserError with the same text.

        Use it where a process may catch the error and go on, and where only one process changes a
        file that others read afterwards. Elsewhere the failing process ends, and with it the run.
        """
        error: Exception | None = None
        message_by_rank: dict[int, str] = {}  # of this process
        try:
            yield
        except Exception as local_error:
            error = local_error  # raised below, after the other processes know of it
            message_by_rank[self.rank] = str(error)
        messages = list(self.merge(message_by_rank).values())  # of all processes that failed
        if messages and error is None:  # another process failed
            error = UserError(messages[0])
        if error is not None:
            raise error

    @contextlib.contextmanager
    def without_timeout(self) -> Iterator[None]:
        """Return a context that ends when the bodies of all processes have ended, however long that
        takes: a collective at its end would fail after TIMEOUT, which a large file, or a judge on
        the network, may need. Its body calls no collective."""
        is_done = threading.Event()
        # The collectives run in a thread, and the body here: functions of users may set signal
        # handlers, as math-verify does for its time limit, and only the main thread can do that.
        with ThreadPoolExecutor(1) as executor:
            # wait_until calls a short collective (all_agree) again and again, until all bodies have
            # ended. is_done.wait returns True once this one has, else False after 0.05 seconds.
            waiting = executor.submit(self.wait_until, lambda: is_done.wait(POLL_SECONDS))
            try:
                yield
            finally:
                is_done.set()
                waiting.result()  # waits for the other processes, and raises the thread's error

    def read_on_all(self, read: Callable[[], Output]) -> Output:
        """Call `read` on every process and return its result; raise on all processes if one fails.
        The main process reads first and fills the cache, so that a file is downloaded only once."""
        for is_turn_of_main in (True, False):
            # If one process left alone with an error, the others would wait forever. So each round
            # ends on all processes together.
            with self.raise_on_all():
                if self.is_main == is_turn_of_main:
                    content = read()
        return content

    def check_equal(self, number: int, message: str) -> None:
        """Raise UserError with the message on every process unless all give the same number, which
        must be below 2^63."""
        # -min(-number) is the maximum; it equals the minimum if all numbers are equal
        if self.min(number) != -self.min(-number):
            raise UserError(message)

    def min(self, number: int) -> int:
        """Return the smallest of the processes' numbers."""
        if self.world_size == 1:  # there is no process group
            return number
        minimum = torch.tensor(number, device=self.device)  # NCCL needs a tensor on the GPU
        with errors_as_disconnected():
            dist.all_reduce(minimum, dist.ReduceOp.MIN)  # in place
        return int(minimum)

    def sum(self, x: Tensor) -> Tensor:
        """Sum a float tensor over all parts of the data, in place, and return the tensor."""
        if self.world_size > 1:
            with errors_as_disconnected():
                dist.all_reduce(x)  # in place, over all processes
            # With tensor parallelism, `tensor_parallel` processes add the same number for one part
            # of the data. All processes divide the same sum, so they get the same bits.
            x /= self.tensor_parallel
        return x

    def merge(self, outputs: dict[int, Output]) -> dict[int, Output]:
        """Return the dicts of all processes merged into one: {0: "a"} on one process and {1: "b"}
        on another give {0: "a", 1: "b"} on both. The keys are indices of items or ranks. If two
        processes have the same key, they must have equal outputs for it."""
        gathered = [outputs]  # one dict for each process
        if self.world_size > 1:
            gathered = [{}] * self.world_size  # placeholders: the collective fills the list
            with errors_as_disconnected():
                dist.all_gather_object(gathered, outputs)
        merged: dict[int, Output] = {}
        for process_outputs in gathered:
            merged.update(process_outputs)
        return merged


@contextlib.contextmanager
def errors_as_disconnected() -> Iterator[None]:
    """Return a context for the code of one collective: it replaces any error by Disconnected."""
    try:
        yield
    except Exception as error:
        # explain_lost_process returns None if no process was lost
        reason = explain_lost_process(error) or f"a collective failed: {error!s:.200}"
        raise Disconnected(reason) from error


# For a call by this process alone of a function that several processes would otherwise call
# together: in a script, or in the thread that saves while training goes on. Its collectives return
# at once.
ALONE = Process(0, 1, torch.device("cpu"))


def launcher() -> str:
    """Return the command that starts a script on as many processes as now, for messages."""
    launch = read_launch()
    if launch.world_size > launch.processes_per_machine:
        return "torchrun, on each machine as before,"
    if launch.world_size == 1:
        return "python"
    return f"torchrun --standalone --nproc_per_node={launch.processes_per_machine}"


def count_shards(
    world_size: int, processes_per_machine: int, tensor_parallel: int, shard_across: int | None
) -> int:
    """Return the number of shards of one copy of the training state, --shard_across /
    --tensor_parallel: tensor parallelism has divided the copy already.

    By default the processes of a machine divide one copy (HSDP); all processes do if machines have
    one process each. Raises UserError for numbers that do not divide.
    """
    # A dry run of 12xh100 passes 8 of 12 processes: its machines have 8 and 4. Take 4, as `start`
    # does in a run.
    processes_per_machine = math.gcd(processes_per_machine, world_size)
    if processes_per_machine % tensor_parallel:
        raise UserError(
            f"tensor_parallel {tensor_parallel} does not divide the processes of a machine, "
            f"{processes_per_machine}: start a multiple of it by torchrun --nproc_per_node"
        )
    if shard_across is not None:
        if world_size % shard_across or shard_across % processes_per_machine:
            raise UserError(
                f"shard_across {shard_across} must divide the {world_size} processes and be "
                f"a multiple of the {processes_per_machine} processes of a machine"
            )
        processes_per_copy = shard_across
    elif processes_per_machine > 1:
        processes_per_copy = processes_per_machine  # links within a machine are the fastest
    else:
        processes_per_copy = world_size  # there is nothing to divide within a machine
    return processes_per_copy // tensor_parallel  # a tensor-parallel group holds one shard


def start(
    device_name: str,
    dtype_name: str,
    *,
    catch_signals: bool = False,
    tensor_parallel: int = 1,
    shard_across: int | None = None,
) -> Process:
    """Return this process; join the process group first if torchrun has started several processes.

    Both names may be "auto". With `catch_signals` a signal does not end the process: StopSignal
    remembers it, and the run ends itself. `tensor_parallel` processes with consecutive ranks share
    each block (tensor parallelism), and `shard_across` processes divide one copy of the training
    state (None: see count_shards). The backend is NCCL between GPUs and gloo between CPUs. Raises
    UserError if the device is missing, lacks the dtype or cannot be shared by several processes,
    and if the processes do not divide.
    """
    launch = read_launch()
    rank = launch.rank
    world_size = launch.world_size
    end_with_launcher()
    # Only for its UserError, before the processes connect. A machine with 8 of 12 processes cannot
    # check yet, because another one has fewer: the call below does.
    if world_size % launch.processes_per_machine == 0:
        count_shards(world_size, launch.processes_per_machine, tensor_parallel, shard_across)
    device = set_up_device(device_name, launch)  # cuda:3 on local rank 3
    if rank > 0:
        # Only the first process prints the notes of model/ and of the tokenizers, which have no
        # Process.
        logging.getLogger("notes").setLevel(logging.ERROR)
    # tests/fake_gpu has already initialized a process group, which counts the bytes sent.
    if world_size > 1 and not dist.is_initialized():
        join(launch, device)
    # Without dtype and replicas yet: the processes agree on them through its collectives below.
    process = Process(
        data_rank=rank // tensor_parallel,  # of ranks 0 to 3: 0, 0, 1, 1 for groups of 2
        data_parallel=world_size // tensor_parallel,
        device=device,
        stop=StopSignal() if catch_signals else None,  # replaces this process's signal handlers
        tensor_parallel=tensor_parallel,
        tensor_rank=rank % tensor_parallel,  # of ranks 0 to 3: 0, 1, 0, 1
    )
    # The types of all devices by rank: ["cuda", ..., "cpu", ...] if a machine has lost its GPUs, on
    # which the device auto is the CPU.
    device_types = list(process.merge({rank: device.type}).values())
    if len(set(device_types)) > 1:
        raise UserError(
            f"some processes found no GPU, such as rank {device_types.index('cpu')}, and others "
            "did: see nvidia-smi on that machine, or take device cpu on all"
        )
    # `launch` counts the processes of this machine. Machines with 8 and 4 processes divide each
    # copy of the training state among 4 neighbors.
    processes_by_rank = process.merge({rank: launch.processes_per_machine})  # {0: 8, ..., 11: 4}
    processes_per_machine = math.gcd(*processes_by_rank.values())
    shards_per_copy = count_shards(world_size, processes_per_machine, tensor_parallel, shard_across)
    # pick_dtype asks by all_agree, because gradients of different dtypes could not be summed.
    return replace(
        process,
        dtype=pick_dtype(dtype_name, device, process.all_agree),
        processes_per_machine=processes_per_machine,
        replicas=process.data_parallel // shards_per_copy,  # copies of the training state
    )


def set_up_device(device_name: str, launch: Launch) -> torch.device:
    """Return the device of this process, and set up the process for it: the current GPU, or malloc.
    Raises UserError if the device is missing or cannot be shared by several processes."""
    device = pick_device(device_name, launch.local_rank)
    # "cuda:1" names one GPU. With "cuda" each process takes the GPU of its local rank.
    if launch.world_size > 1 and (device.type == "mps" or ":" in device_name):
        raise UserError(f"several processes cannot share one device, {device_name}")
    if device.type == "cuda":
        # NCCL and "cuda" without a number use the current device
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    return device


def join(launch: Launch, device: torch.device) -> None:
    """Join the process group of a launch, once all of its processes have come. Raises UserError if
    they do not come within TIMEOUT."""
    # address: "host:29500", where the processes meet
    waiting = f"waiting for {launch.world_size} processes at {launch.address}"
    try:
        # The main process says at once what a run waits for. Another one says it after ten seconds:
        # it may be alone, as one whose variables are left over from an earlier launch.
        with announce_wait(waiting, seconds=0 if launch.rank == 0 else 10):
            # Opened here, and not by init_process_group: its backend depends on the device types,
            # which the processes exchange through the store.
            store = next(dist.rendezvous("env://", timeout=TIMEOUT))[0]  # of (store, rank, size)
            store.set(f"device of {launch.rank}", device.type)
            keys = [f"device of {rank}" for rank in range(launch.world_size)]
            device_types = store.multi_get(keys)  # waits for all; [b"cuda", b"cuda", ...]
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{waiting} has failed: {reason:.300}") from error
    # If some processes have no GPU, all meet without one, and `start` says so.
    is_on_gpu = b"cpu" not in device_types
    with errors_as_disconnected():
        dist.init_process_group(
            backend="nccl" if is_on_gpu else "gloo",
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=TIMEOUT,
            # connect now, so that an unreachable GPU raises its error here
            device_id=device if is_on_gpu else None,
        )


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next allocation.

    By default malloc returns large allocations, such as activations, to the kernel. When the next
    step allocates them again, the kernel zeroes them page by page, which takes time.
    """
    libc = ctypes.CDLL(None)  # the C library that Python itself uses
    if hasattr(libc, "mallopt"):  # only glibc has it
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no allocation gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing to the kernel


def explain_lost_process(error: Exception) -> str | None:
    """Return a sentence for a collective that failed because another process has ended; None for
    any other error.

    gloo raises a plain RuntimeError; only the word "gloo" in its text tells where it comes from.
    """
    # NCCL raises DistError, and so does the store through which the processes find each other
    if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return f"another process has ended; its own error says why ({error!s:.200})"
    return None


def stop() -> None:
    """Leave the process group at the normal end of a run."""
    # NCCL waits for the other processes here. gloo needs no call, as its resources end with the
    # process, and could deadlock here: one of its threads may wait for the interpreter lock.
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.destroy_process_group()
