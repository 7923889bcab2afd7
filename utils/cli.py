"""From the command line to the work of a script, and out again in a sentence if need be."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from config import ConfigError
from data.shards import DataError
from model.config import ModelError
from scripts.bench.measure import MeasurementError
from training.checkpoint import CheckpointError
from training.guard import TrainingError
from training.saver import finish_writing
from utils import distributed
from utils.distributed import DeviceError
from utils.logger import LogError

Config = TypeVar("Config")
USER_ERRORS = (
    ConfigError,
    DataError,
    ModelError,
    CheckpointError,
    DeviceError,
    LogError,
    TrainingError,
    MeasurementError,
)


def parse(
    config_class: type[Config], default: Config | None = None, *, positional: bool = False
) -> Config:
    """Settings from the command line; those not given come from `default`. `positional` ones that
    have to be given go without their flag. Exits 2 if wrong."""
    import tyro  # only here: what does without a command line does without it

    given = {} if default is None else {"default": default}
    if positional:
        given["config"] = (tyro.conf.PositionalRequiredArgs,)
    quiet = int(os.environ.get("RANK", 0)) > 0
    return tyro.cli(config_class, use_underscores=True, console_outputs=not quiet, **given)


def exit_with_sentence(work: Callable[[], None]) -> NoReturn:
    """Runs a script's work and ends: a user's mistake becomes one sentence and exit code 2."""
    message, code = "", 0
    try:
        work()
    except SystemExit as end:
        code = end.code or 0
    except USER_ERRORS as error:
        message, code = str(error), 2
    except (torch.OutOfMemoryError, MemoryError) as error:
        message, code = f"{str(error).split('. ')[0]}; lower --micro_batch_size or --num_samples", 2
    except BrokenPipeError:  # what reads the output has ended, as head does
        sys.stdout = open(os.devnull, "w")
        code = 128 + 13
    except RuntimeError as error:  # memory that the CPU does not have has no error of its own
        if "can't allocate memory" in str(error):
            message, code = "out of memory; lower --micro_batch_size or --num_samples", 2
        elif lost := distributed.lost_contact(error):
            message, code = lost, 2
        else:
            traceback.print_exc()
            code = 1
    except KeyboardInterrupt:
        message, code = "interrupted", 128 + 2
    except Exception:  # a fault of this code, but the end below is due all the same
        traceback.print_exc()
        code = 1
    if message:
        rank = os.environ.get("RANK")
        print(f"error{f' on rank {rank}' if rank else ''}: {message}", file=sys.stderr)
    finish_writing()
    sys.stdout.flush()
    sys.stderr.flush()
    # not the interpreter's own end: the reader threads of datasets can hold it up, and gloo's abort
    # it when they are still releasing a tensor (they need the lock that is being taken down)
    os._exit(code)


def run(
    main: Callable[[Config], None], config_class: type[Config], *, positional: bool = False
) -> NoReturn:
    """The last line of every script: parse the command line, work, end in a sentence."""
    exit_with_sentence(lambda: main(parse(config_class, positional=positional)))
