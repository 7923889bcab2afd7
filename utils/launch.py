"""The launch of this process: its number among the processes that a launcher has started together.

torchrun sets these environment variables, and only here are they read. Nothing here imports
PyTorch: the command line needs to know the main process, too.
"""

import ctypes
import os
import signal
from dataclasses import dataclass

from utils.errors import UserError

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PLACE = ("MASTER_ADDR", "MASTER_PORT")  # where the processes meet; harmless without NUMBERS


@dataclass(frozen=True)
class Launch:
    """Numbers of a process, as torchrun gives them; the default is a process without torchrun."""

    rank: int = 0
    """Number of this process among all, from 0."""
    world_size: int = 1
    """Number of all processes."""
    local_rank: int = 0
    """Number of this process on its machine, from 0."""
    processes_per_machine: int = 1
    """Number of the processes on this machine."""
    address: str | None = None
    """Where the processes meet, as host:port; None without a launcher."""


def read_launch() -> Launch:
    """Return the launch of this process. Raises UserError unless the environment has all of its
    variables, and they fit together, or none of NUMBERS: a variable that is left over in a shell
    would otherwise make a process wait for others that nobody has started."""
    # {"RANK": "3", "WORLD_SIZE": "16", ..., "MASTER_PORT": "29500"}
    variables = {name: os.environ[name] for name in NUMBERS + PLACE if os.environ.get(name)}
    if not variables.keys() & set(NUMBERS):
        return Launch()
    launch = parse_launch(variables)
    if launch is None:
        settings = " ".join(f"{name}={value}" for name, value in variables.items())
        raise UserError(
            f"the environment has {settings}, which is no launch of torchrun: that sets "
            f"{', '.join(NUMBERS + PLACE)}, and each rank is below its number of processes; "
            f"to start without torchrun type: unset {' '.join(variables)}"
        )
    return launch


def parse_launch(variables: dict[str, str]) -> Launch | None:
    """Return the launch that torchrun's variables describe; None if one is missing or no number, or
    if the numbers do not fit together."""
    try:
        rank, world_size, local_rank, processes_per_machine = [
            int(variables[name]) for name in NUMBERS
        ]
        address = f"{variables['MASTER_ADDR']}:{int(variables['MASTER_PORT'])}"
    except (KeyError, ValueError):
        return None
    if not 0 <= local_rank < processes_per_machine <= world_size:
        return None
    if not local_rank <= rank < world_size:
        return None
    return Launch(rank, world_size, local_rank, processes_per_machine, address)


def is_main_process() -> bool:
    """Return whether this is the main process, which prints and writes files."""
    return read_launch().rank == 0


def end_with_launcher() -> None:
    """Let Linux send SIGTERM to this process when torchrun ends. After a SIGKILL of torchrun, its
    processes would otherwise train on and hold their folders, unseen."""
    # Only torchrun's: a launcher that starts processes in a short-lived thread would end them here.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        libc = ctypes.CDLL(None)  # the C library that Python itself uses
        if hasattr(libc, "prctl"):  # only Linux has it
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
