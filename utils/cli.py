"""Entry point shared by all scripts: parse the command line, run, report errors, exit."""

import errno
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, make_dataclass
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeVar, get_origin, get_type_hints

import torch

from utils import distributed
from utils.errors import UserError

Config = TypeVar("Config")
NO_MEMORY = "can't allocate memory|CUDA (error: )?out of memory"
PATH_OPTIONS = ("checkpoint", "log", "input", "data_dir")  # of a script, the first takes its paths
OUT_OF_MEMORY = "lower --micro_batch_size or --num_samples"


def parse(
    config_class: type[Config],
    default: Config | None = None,
    *,
    positional: bool = False,
    hints: Mapping[str, str] = MappingProxyType({}),
    args: list[str] | None = None,
) -> Config:
    """Parse the command line, or `args`, into a dataclass; exit with code 2 if it is wrong.

    Raises UserError for a value given to a switch, and for the names in `hints`, which say what
    options of other projects are called here.

    Options that are not given come from `default`. A ~ that begins a path becomes the home folder.
    With `positional`, required options are positional arguments. Dataclasses named ...Options that
    `config_class` inherits from are the groups of --help, the last one first.
    """
    check_habits(config_class, hints, words := sys.argv[1:] if args is None else args)
    if not positional:
        check_first_word(config_class, words)
    import tyro  # here, so that importing this module does not require it

    options = {"use_underscores": True, "console_outputs": distributed.is_main(), "args": args}
    options["config"] = (tyro.conf.PositionalRequiredArgs,) if positional else ()
    groups = [base for base in reversed(config_class.__bases__) if is_dataclass(base)]
    if not groups:
        found = vars(tyro.cli(config_class, default=default, **options))
        return config_class(**{k: expand_home(v) for k, v in found.items()})
    parts = [
        (group.__name__.removesuffix("Options").lower(), tyro.conf.OmitArgPrefixes[group])
        for group in groups
    ]
    grouped = make_dataclass(config_class.__name__, parts)
    grouped.__doc__ = config_class.__doc__
    start = vars(config_class() if default is None else default)
    assert start.keys() == {f.name for group in groups for f in fields(group)}, "add it to a group"
    values = [group(**{f.name: start[f.name] for f in fields(group)}) for group in groups]
    filled = tyro.cli(grouped, default=grouped(*values), **options)
    found = {k: v for part in vars(filled).values() for k, v in vars(part).items()}
    return config_class(**{k: expand_home(v) for k, v in found.items()})


def expand_home(value: object) -> object:
    """Return the value of an option with the home folder for ~ in a path, or in each of several."""
    if isinstance(value, tuple):
        return tuple(map(expand_home, value))
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def given_options(args: list[str]) -> set[str]:
    """Return the names of the options on a command line, with no_ where one turns a switch off."""
    flags = (word.partition("=")[0] for word in args if word.startswith("--"))
    return {flag[2:].replace("-", "_") for flag in flags}


def check_first_word(config_class: type, args: list[str]) -> None:
    """Raise UserError for a path without the option that takes it."""
    first, names = args[0] if args else "", get_type_hints(config_class).keys()
    option = next((name for name in PATH_OPTIONS if name in names), None)
    if "resume" in names and first.endswith(".pt"):
        option = "resume"
    if option and first and not first.startswith("-") and os.path.exists(first):
        raise UserError(f"{first}: give it by --{option} {first}")


def check_habits(config_class: type, hints: Mapping[str, str], args: list[str]) -> None:
    """Raise UserError for --name=True where `name` is a switch, a name in `hints`, a file without
    --config, an option without a value, as an unset variable of a shell gives, and a list that is
    given in two parts, of which the first would be lost."""
    kinds = get_type_hints(config_class)
    first = args[0] if args and not args[0].startswith("--") else ""
    if "config" in kinds and first.endswith((".py", ".toml", ".json")):
        raise UserError(f"{first}: a file of options is given by --config FILE, a .toml or .json")
    lists = [name for name, kind in kinds.items() if get_origin(kind) is tuple]
    flags = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in args]
    if twice := [name for name in lists if flags.count(name) > 1]:
        raise UserError(f"--{twice[0]} is given twice; give all its values after one --{twice[0]}")
    may_be_empty = {f.name for f in fields(config_class) if f.default == ""}
    for word, following in zip_longest(args, args[1:], fillvalue="--"):
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and name not in kinds and name in hints:
            raise UserError(f"there is no {flag}: {hints[name]}")
        value = value if equals else following
        is_switch = flag.startswith("--") and kinds.get(name) is bool
        if is_switch and value.lower() in ("true", "false", "0", "1", "yes", "no"):
            raise UserError(f"{flag} takes no value: --{name} turns it on, --no_{name} off")
        none = not equals and following.startswith("--") and get_origin(kinds.get(name)) is tuple
        if flag.startswith("--") and name in kinds.keys() - may_be_empty and (none or not value):
            raise UserError(f"{flag} is given without a value; was a variable empty?")


def run(main: Callable[[Config], None], config_class: type[Config], **options) -> NoReturn:
    """Run a script: parse the command line with the options of `parse`, call `main`, exit."""
    run_and_exit(lambda: main(parse(config_class, **options)))


def run_and_exit(
    work: Callable[[], None], before_exit: Callable[[], None] | None = None
) -> NoReturn:
    """Call `work`, then `before_exit`, and exit: code 2 and one sentence for a UserError."""
    message, code = None, 0
    sys.stdout, sys.stderr = (x or open(os.devnull, "w") for x in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone
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
        message = user_message(error)
        code = 2 if message else 1
        if not message:  # a bug
            traceback.print_exc()
    if message:
        rank = os.environ.get("RANK")
        print(f"error{f' on rank {rank}' if rank else ''}: {message}", file=sys.stderr)
    if before_exit:
        before_exit()
    sys.stdout.flush()
    sys.stderr.flush()
    # skip the interpreter's shutdown: the reader threads of datasets can block it, and gloo aborts
    # it when one of its threads still waits for the interpreter lock to release a tensor
    os._exit(code)


def user_message(error: Exception) -> str | None:
    """Return the sentence to print for a user error or a lack of memory, None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    unwritable = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
    if isinstance(error, OSError) and error.errno in unwritable:
        path = error.filename or ""
        # what is there may lack either right, and a closed folder hides what is in it
        found = os.path.exists(path) or not os.access(os.path.dirname(path) or ".", os.X_OK)
        verb = "open" if error.errno == errno.EACCES and found else "write"
        return f"cannot {verb} {error.filename or 'the output'}: {error.strerror}"
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return f"{str(error).split('. ')[0]}; {OUT_OF_MEMORY}"
    # PyTorch has no error class for a CPU, nor for memory that a library or the compiler lacks
    if isinstance(error, RuntimeError) and re.search(NO_MEMORY, str(error)):
        return f"out of memory; {OUT_OF_MEMORY}"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        first_line = str(error).partition("\n")[0]
        return f"compiling failed: {first_line}; --no_use_torch_compile goes without"
    if isinstance(error, RuntimeError):
        return distributed.explain_failed_collective(error)
    return None
