"""From the command line to the work of a script, and out again with one sentence if need be."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

from utils import distributed
from utils.errors import UserError

Config = TypeVar("Config")
OUT_OF_MEMORY = "lower --micro_batch_size or --num_samples"


def parse(
    config_class: type[Config], default: Config | None = None, *, positional: bool = False
) -> Config:
    """Parse the command line into a dataclass; exit with code 2 where it is wrong.

    Options that are not given come from `default`. With `positional`, required ones go without
    their flag.
    """
    import tyro  # not at the top: modules that use UserError alone do not need it

    options = {} if default is None else {"default": default}
    if positional:
        options["config"] = (tyro.conf.PositionalRequiredArgs,)
    quiet = int(os.environ.get("RANK", 0)) > 0
    return tyro.cli(config_class, use_underscores=True, console_outputs=not quiet, **options)


def run(
    main: Callable[[Config], None], config_class: type[Config], *, positional: bool = False
) -> NoReturn:
    """Run a script: parse the command line, call `main`, exit."""
    run_and_exit(lambda: main(parse(config_class, positional=positional)))


def run_and_exit(
    work: Callable[[], None], before_exit: Callable[[], None] | None = None
) -> NoReturn:
    """Call `work`, then `before_exit`, and exit: a UserError prints its sentence and exits 2."""
    message, code = None, 0
    try:
        work()
    except SystemExit as end:
        code = end.code or 0
    except BrokenPipeError:  # the reader of the output has ended, as head does
        sys.stdout = open(os.devnull, "w")
        code = 128 + 13
    except KeyboardInterrupt:
        message, code = "interrupted", 128 + 2
    except Exception as error:
        message, code = describe(error), 2
        if message is None:  # a fault of this code
            traceback.print_exc()
            code = 1
    if message:
        rank = os.environ.get("RANK")
        print(f"error{f' on rank {rank}' if rank else ''}: {message}", file=sys.stderr)
    if before_exit:
        before_exit()
    sys.stdout.flush()
    sys.stderr.flush()
    # not the interpreter's own exit: the reader threads of datasets can hold it up, and gloo aborts
    # it while they still release a tensor (they need the lock that is being taken down)
    os._exit(code)


def describe(error: Exception) -> str | None:
    """Return the sentence that a user's mistake or a lack of memory deserves, None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"{str(error).split('. ')[0]}; {OUT_OF_MEMORY}"
    if isinstance(error, RuntimeError):
        if "can't allocate memory" in str(error):  # a CPU's has no class of its own
            return f"out of memory; {OUT_OF_MEMORY}"
        return distributed.explain_lost_contact(error)
    return None
