"""Entry point of all scripts: the command line as a dataclass, errors as sentences, exit codes.

Options are a list of flags wherever they come from: a file, a checkpoint, a sweep. Flags that come
later win, so that those of the user are put last.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from utils.errors import UserError, is_out_of_memory

Config = TypeVar("Config")


def parse(config_class: type[Config], args: list[str] | None = None) -> Config:
    """Parse flags, or the command line, into a dataclass; exit with code 2 if they are wrong.
    Dataclasses named ...Options that it inherits from are the groups of --help, last one first."""
    import tyro  # here, so that importing this module does not require it

    is_main = os.environ.get("RANK", "0") == "0"
    options = {"use_underscores": True, "args": args, "console_outputs": is_main}
    groups = [base for base in reversed(config_class.__bases__) if is_dataclass(base)]
    if not groups:
        found = vars(tyro.cli(config_class, **options))
    else:
        parts = [
            (group.__name__.removesuffix("Options").lower(), tyro.conf.OmitArgPrefixes[group])
            for group in groups
        ]
        namespace = {"__doc__": config_class.__doc__}
        grouped = make_dataclass(config_class.__name__, parts, namespace=namespace)
        start = {f.name: f.default for f in fields(config_class)}  # a subclass may change a default
        values = [group(**{f.name: start[f.name] for f in fields(group)}) for group in groups]
        filled = tyro.cli(grouped, default=grouped(*values), **options)
        found = {k: v for part in vars(filled).values() for k, v in vars(part).items()}
    return config_class(**{name: expand_home(value) for name, value in found.items()})


def expand_home(value: object) -> object:
    """Return the value of an option with the home folder for ~ in a path, or in each of several."""
    if isinstance(value, tuple):
        return tuple(map(expand_home, value))
    return value.expanduser() if isinstance(value, Path) else value


def to_flags(values: dict) -> list[str]:
    """Return options as the flags that parse to them; None stands for the default."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list | tuple):
            flags += [f"--{name}", *map(str, value)] if value else []
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags


def named_flags(flags: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the name of each flag, and the value after it or after its equals sign, if any."""
    for word, following in zip(flags, [*flags[1:], "--"], strict=False):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            following = None if following.startswith("--") else following
            yield name[2:].replace("-", "_"), value if equals else following


def flag_value(flags: list[str], name: str) -> str | None:
    """Return the value of the last flag of this name, None without one."""
    return dict(named_flags(flags)).get(name)


def start_script(main: Callable[[Config], None], config_class: type[Config]) -> NoReturn:
    """Run a script: parse the command line, call `main`, exit."""
    call_and_exit(lambda: main(parse(config_class)))


def call_and_exit(
    work: Callable[[], None],
    before_exit: Callable[[], None] = lambda: None,
    explain: Callable[[Exception], str | None] = lambda error: None,
) -> NoReturn:
    """Call `work`, then `before_exit`, and exit: with code 2 and a sentence for a UserError, or for
    what `explain` has one for."""
    message, code = None, 0
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # PyTorch warns of its own use
    try:
        work()
    except SystemExit as end:
        code = end.code or 0
    except BrokenPipeError:  # the reader of standard output has ended, as `head` does
        sys.stdout = open(os.devnull, "w")
        code = 128 + 13
    except KeyboardInterrupt:
        message, code = "interrupted", 128 + 2
    except Exception as error:
        message = user_message(error) or explain(error)
        code = 2 if message else 1
        if not message:  # a bug
            traceback.print_exc()
    if message:
        rank = os.environ.get("RANK")
        print(f"error{f' on rank {rank}' if rank else ''}: {message}", file=sys.stderr)
    before_exit()
    sys.stdout.flush()
    # skip the interpreter's shutdown: the reader threads of datasets can block it, and gloo aborts
    # it when one of its threads still waits for the interpreter lock to release a tensor
    os._exit(code)


def user_message(error: Exception) -> str | None:
    """Return the sentence to print for a user error or a lack of memory, None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:  # a write that fails names no file
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if is_out_of_memory(error):
        return f"out of memory: lower --micro_batch_size or --num_samples ({error!s:.200})"
    return None
