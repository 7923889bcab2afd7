"""Processes that train together: who they are, what they exchange, how a signal ends them.

torchrun starts one process for each device and numbers them in environment variables (RANK,
WORLD_SIZE, ...). Every process trains the same model and calls the same collectives (all-reduce,
...) in the same order: a collective waits until all processes have called it. How weights and
gradients are divided is the subject of training/parallel/data_parallel.py.

Nothing here watches for lost processes. When one dies, its connections close, the collectives of
the others fail (of gloo at once; NCCL may wait until torchrun kills the others), and torchrun
restarts all of them; TIMEOUT is for machines that go silent.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError

Item = TypeVar("Item")
Output = TypeVar("Output")

# A collective fails after this time. Without a limit, a machine that lost its power would stop the
# run for good. The limit is longer than anything that one process does while the others wait, such
# as a download. (A checkpoint may take longer: wait_until calls many short collectives.)
TIMEOUT = timedelta(minutes=10)
POLL_SECONDS = 0.05  # between two collectives of wait_until

STOP_MESSAGE = "\nstopping soon, then saving"
HURRY_MESSAGE = "; Ctrl-C again to stop now without saving"  # only without a launcher


class Stopped(Exception):
    """Raised after a signal, on all processes in the same place. The loop of a run catches it and
    saves; a training step that it interrupts is not counted."""


class StopSignal:
    """Remember the first SIGTERM, SIGINT, SIGUSR1 or SIGHUP, and ignore those after it.

    `signal` is its number, 0 before one has come; the run looks at it between two batches. On the
    main process the first signal prints what will happen. Schedulers and torchrun repeat their
    signals although nobody is in a hurry, and SIGKILL ends a run that takes too long. Only a
    Ctrl-C that comes second to a process without a launcher is a person's, and exits at once.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.is_launched = "RANK" in os.environ  # by torchrun, which forwards its signals
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.receive)
        # SIGHUP: the terminal was closed. Under nohup it is ignored, so that the run goes on.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.receive)

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal; Python calls this between two instructions of the main thread."""
        if self.signal == 0:
            # only remembered: the run ends at a place where its state is consistent
            self.signal = number
            if is_main_process():
                # os.write, because the signal may have interrupted a print, which is not reentrant.
                # It raises OSError if nobody reads standard error any more, for example after
                # Ctrl-C to `train | tee`.
                message = STOP_MESSAGE if self.is_launched else STOP_MESSAGE + HURRY_MESSAGE
                with contextlib.suppress(OSError):
                    os.write(2, f"{message}\n".encode())
        elif number == signal.SIGINT and not self.is_launched:
            raise SystemExit(128 + number)


@dataclass(frozen=True)
class Process:
    """This process among those that train together.

    With tensor parallelism several processes have the same data_rank: they share each block, and
    read the same data. Methods below "collectives" wait for the other processes: all must call
    them, in the same order.
    """

    data_rank: int
    """Number of the part of the data that this process reads, from 0."""
    data_parallel: int
    """Parts of the data; the number of processes without tensor parallelism."""
    device: torch.device
    """Device of this process, with a number if it is a GPU: cuda:0."""
    dtype: torch.dtype = torch.float32
    """Dtype of matmuls under `autocast`, the same on all processes."""
    replicas: int = 1
    """Copies of the state under --sharding; the processes of each one divide it."""
    stop: StopSignal | None = None
    """Signal handler of a run, which saves before it ends; None in scripts that just end."""
    tensor_parallel: int = 1
    """Processes that share each block: training/parallel/tensor_parallel.py."""
    tensor_rank: int = 0
    """Number of this process among them."""

    @property
    def world_size(self) -> int:
        """Number of all processes, as torchrun counts them."""
        return self.data_parallel * self.tensor_parallel

    @property
    def rank(self) -> int:
        """Number of this process among all, from 0, as torchrun counts them."""
        # the processes that share each block have consecutive ranks
        return self.data_rank * self.tensor_parallel + self.tensor_rank

    @property
    def signal(self) -> int:
        """Number of the signal that told this process to stop; 0 without one."""
        return self.stop.signal if self.stop is not None else 0

    @property
    def is_main(self) -> bool:
        """True on the process that prints and writes files."""
        return self.rank == 0

    def print(self, message: str) -> None:
        """Print a message on the main process."""
        if self.is_main:
            print(message, flush=True)

    def autocast(self, *, keep_weights: bool = True) -> torch.autocast:
        """Return a context in which matmuls run in `dtype`: see utils.devices.autocast."""
        return autocast(self.device, self.dtype, keep_weights=keep_weights)

    def to_device(self, batches: Iterator[tuple]) -> Iterator[tuple]:
        """Yield batches, tuples of NumPy arrays, as tuples of tensors on the device. The caller
        runs it in a thread, so that the next batch is copied while a step computes."""
        for arrays in batches:
            yield tuple(self.copy_to_device(torch.from_numpy(array)) for array in arrays)

    def copy_to_device(self, cpu_tensor: Tensor) -> Tensor:
        """Return a tensor on the device; a GPU copies it while the host goes on."""
        if self.device.type == "cuda":
            # A copy is asynchronous only from pinned memory. CUDA kernels that use the tensor are
            # queued behind it.
            return cpu_tensor.pin_memory().to(self.device, non_blocking=True)
        return cpu_tensor.to(self.device)

    # collectives

    def map(self, function: Callable[[Item], Output], items: Sequence[Item]) -> list[Output]:
        """Return what `function` returns for each item, which the processes take round-robin. All
        of them get the same list.

        Every process calls the function equally often, because a sharded model's forward is a
        collective: in the last round, processes beyond the end do the last item again. Raises
        Stopped between two items.
        """
        outputs: dict[int, Output] = {}  # this process's outputs by the index of the item
        for round_start in range(0, len(items), self.data_parallel):
            self.end_if_stopped()
            index = min(round_start + self.data_rank, len(items) - 1)
            outputs[index] = function(items[index])
        outputs = self.merge(outputs)  # now the outputs of all processes
        return [outputs[index] for index in range(len(items))]

    def end_if_stopped(self) -> None:
        """Raise Stopped on every process if one of them got a signal."""
        # a scheduler may signal one machine alone; the others would wait for it in a collective
        if self.stop is not None and not self.all_agree(self.signal == 0):
            raise Stopped

    def all_done(self, is_done: bool) -> bool:
        """Return whether every process has generated its texts; raise Stopped after a signal.

        Generation calls this every few tokens, so that all processes run equally many forwards.
        """
        self.end_if_stopped()
        return self.all_agree(is_done)

    def all_agree(self, condition: bool) -> bool:
        """Return whether the condition holds on every process."""
        return self.min(int(condition)) == 1

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait, without a limit of time, until `is_done` returns True on every process."""
        while not self.all_agree(is_done()):
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a context that raises on every process if its body raises on one: there what it
        raised, on the others UserError with its text."""
        error: Exception | None = None
        try:
            yield
        except Exception as local_error:
            error = local_error  # raised below, once the others know of it
        # the messages of all errors, by the rank of the process
        messages = self.merge({} if error is None else {self.rank: str(error)})
        # raise this process's own error, or else the first error of another process
        for message in messages.values():
            raise error or UserError(message)

    def read_on_all(self, read: Callable[[], Output]) -> Output:
        """Return the result of `read` on every process; raise an error on all if one of them
        cannot. The main process reads first, and the others after it, so that a download happens
        once and the others find it in the cache."""
        for is_turn_of_main in (True, False):
            # If one process left alone with an error, the others would wait forever. So each round
            # ends on all processes together, and raises the error on all.
            with self.together():
                if self.is_main == is_turn_of_main:
                    content = read()
        return content

    def all_equal(self, number: int) -> bool:
        """Return whether every process has the same number, below 2^63."""
        # -min(-number) is the maximum, which equals the minimum if all numbers are equal
        return self.min(number) == -self.min(-number)

    def min(self, number: int) -> int:
        """Return the smallest of the processes' numbers."""
        if self.world_size == 1:  # there is no process group
            return number
        minimum = torch.tensor(number, device=self.device)  # NCCL needs a tensor on the GPU
        dist.all_reduce(minimum, dist.ReduceOp.MIN)  # in place
        return int(minimum)

    def sum(self, x: Tensor) -> Tensor:
        """Sum a tensor of floats over all parts of the data, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(x)
            # Under tensor parallelism a loss is in the sum once for each process that computed it.
            # All processes divide the same sum, so they get the same bits.
            x /= self.tensor_parallel
        return x

    def merge(self, outputs: dict[int, Output]) -> dict[int, Output]:
        """Return the outputs of all processes in one dict, by the index of an item or a rank.
        Where two processes have one key, their outputs are equal."""
        gathered = [outputs]  # one dict for each process
        if self.world_size > 1:
            gathered = [{}] * self.world_size  # filled by the next line
            dist.all_gather_object(gathered, outputs)
        merged: dict[int, Output] = {}
        for process_outputs in gathered:
            merged.update(process_outputs)
        return merged


# The only process of a script, for functions that scripts share with training runs. Its collectives
# return at once.
ALONE = Process(0, 1, torch.device("cpu"))


def launched(name: str, default: int = 0) -> int:
    """Return a number that the launcher has set in the environment, as RANK or WORLD_SIZE."""
    return int(os.environ.get(name, default))


def is_main_process() -> bool:
    """Return whether this is the main process, also before `start` has made a Process."""
    return launched("RANK") == 0  # 0 without a launcher, too


def launcher() -> str:
    """Return the command that starts a script on as many processes as there are now."""
    per_machine = launched("LOCAL_WORLD_SIZE", 1)
    if launched("WORLD_SIZE", 1) > per_machine:
        return "torchrun, on each machine as before,"
    if per_machine == 1:
        return "python"
    return f"torchrun --standalone --nproc_per_node={per_machine}"


def count_shards(
    world_size: int, per_machine: int, tensor_parallel: int, shard_across: int | None
) -> int:
    """Return the number of parts into which sharding divides what a process of each tensor group
    holds: --shard_across / --tensor_parallel.

    By default the `per_machine` processes of a machine divide one copy of the state; all processes
    do if each machine has one, or if machines have different numbers of them. Raises UserError for
    numbers that do not divide.
    """
    if per_machine % tensor_parallel:
        raise UserError(
            f"tensor_parallel {tensor_parallel} does not divide the processes of a machine, "
            f"{per_machine}: start a multiple of it by torchrun --nproc_per_node"
        )
    if shard_across is None:
        shard_across = per_machine  # links within a machine are the fastest
        # Machines of one process each have nothing to divide within a machine, and where their
        # numbers of processes differ, copies could not be divided alike.
        if per_machine == 1 or world_size % per_machine:
            shard_across = world_size
    elif world_size % shard_across or shard_across % per_machine:
        raise UserError(
            f"shard_across {shard_across} has to divide the {world_size} processes, and to be "
            f"a multiple of the {per_machine} of a machine"
        )
    return shard_across // tensor_parallel  # a tensor group holds one shard


def start(
    device_name: str,
    dtype_name: str,
    *,
    catch_signals: bool = False,
    tensor_parallel: int = 1,
    shard_across: int | None = None,
) -> Process:
    """Return this process, after joining the process group if a launcher has started several.

    Both names may be "auto". With `catch_signals` a signal no longer ends it, but is remembered for
    the run to end itself. `tensor_parallel` processes with consecutive ranks share each block, and
    `shard_across` divide one copy of the state. The backend is NCCL between GPUs and gloo between
    CPUs. Raises UserError if the device is not there, lacks the dtype, or is one that several
    processes cannot share, and if the processes do not divide.
    """
    # RANK and WORLD_SIZE count processes, data_rank and data_parallel the parts of the data.
    rank = launched("RANK")  # 0 without a launcher
    local_rank = launched("LOCAL_RANK")
    world_size = launched("WORLD_SIZE", 1)
    per_machine = launched("LOCAL_WORLD_SIZE", world_size)
    num_shards = count_shards(world_size, per_machine, tensor_parallel, shard_across)
    device = pick_device(device_name, local_rank)
    # "cuda:1" names one GPU; with "cuda" each process takes the GPU of its local rank
    if world_size > 1 and (device.type == "mps" or ":" in device_name):
        raise UserError(f"device {device_name} is one device, which several processes cannot share")
    if device.type == "cuda":
        # NCCL and "cuda" without a number use the current device
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    # Under tests/fake_gpu a group is initialized already, which counts what would be sent.
    if world_size > 1 and not dist.is_initialized():
        if device.type == "cpu":
            dist.init_process_group("gloo", timeout=TIMEOUT)
        else:
            # device_id: connect now, so that a GPU that cannot be reached fails here
            dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    data_parallel = world_size // tensor_parallel
    process = Process(
        data_rank=rank // tensor_parallel,
        data_parallel=data_parallel,
        device=device,
        replicas=data_parallel // num_shards,
        stop=StopSignal() if catch_signals else None,
        tensor_parallel=tensor_parallel,
        tensor_rank=rank % tensor_parallel,
    )
    # last, as the processes have to agree on a dtype: gradients of two could not be summed
    return replace(process, dtype=pick_dtype(dtype_name, device, process.all_agree))


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory for the next allocation.

    By default it returns large allocations, such as activations, to the kernel, which zeroes them
    again page by page when the next step allocates them.
    """
    libc = ctypes.CDLL(None)  # the C library that Python itself uses
    if hasattr(libc, "mallopt"):  # other C libraries have none
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no allocation gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing


def explain(error: Exception) -> str | None:
    """Return a sentence for a collective that failed because another process has ended, else None.

    gloo raises a plain RuntimeError, in whose text only its own name tells where it comes from.
    """
    # DistError is raised by NCCL, and by the store where the processes meet
    if dist.is_initialized() and (isinstance(error, dist.DistError) or "gloo" in str(error)):
        return f"another process has ended; its own error says why ({error!s:.200})"
    return None


def stop() -> None:
    """Leave the process group at the normal end of a run."""
    # NCCL waits for the other processes here. What gloo holds ends with the process, and gloo could
    # deadlock here: one of its threads may wait for the interpreter lock.
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.destroy_process_group()
