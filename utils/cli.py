"""Entry point of all scripts: the command line as a dataclass, errors as sentences, exit codes.

Options from a file or a checkpoint become flags, too. They stand in front of the flags that the
user typed, and one parser checks them all. If a flag occurs twice, the last one wins.
"""

import builtins
import contextlib
import difflib
import inspect
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from utils.errors import Disconnected, UserError, check_text, is_out_of_memory
from utils.files import describe_searched_place, remove_unused_folders
from utils.launch import is_main_process, read_launch
from utils.ranges import Dataclass, check_ranges

# This project's flags by nanoGPT's names, for error messages: difflib finds similar names only.
# docs/NANOGPT.md translates all of nanoGPT's options. Other trainers have "epochs" and "lr".
FLAGS_BY_NANOGPT_NAME = {
    "learning_rate": "max_lr",
    "lr": "max_lr",
    "epochs": "max_steps",
    "max_iters": "max_steps",
    "lr_decay_iters": "max_steps",
    "warmup_iters": "warmup_steps",
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "total_batch_size",
    "dataset": "data_dir",
    "out_dir": "run_dir",
    "eval_interval": "eval_every",
    "eval_iters": "val_tokens",
    "compile": "use_torch_compile",
    "wandb_log": "wandb",
    "start": "prompt",
}
# Flags to suggest for a path without a flag, as in `sample.py runs/own`, the likeliest first.
FLAGS_OF_PATHS = ("checkpoint", "log", "input", "config")

Options = TypeVar("Options", bound=Dataclass)


def parse(options_class: type[Options], args: list[str] | None = None) -> Options:
    """Parse flags into a dataclass; without `args`, parse the command line.

    Raises UserError for a value that is not the number or choice that its flag takes, or is out of
    its range, an unknown flag, a boolean flag with a value, a list that is empty or given twice, a
    first word without a flag, and a word that is not UTF-8 text. tyro exits with code 2 for
    whatever else is wrong.

    --help shows a group of flags for each dataclass that `options_class` inherits from, and names
    it after the dataclass, without "Options" or "Config". The last dataclass comes first.
    """
    # training/options.py gives `args`: the user's flags behind those of a file or a checkpoint,
    # which they replace. Only then may a flag of several values stand twice.
    may_repeat = args is not None
    if args is None:
        args = sys.argv[1:]
    # ~/text becomes /home/me/text, and "--separator", "---" becomes "--separator=---"
    args = join_dashes(expand_home(args))
    corrections = find_mistakes(options_class, args, may_repeat)  # ["there is no --lr, ..."]
    if corrections:
        raise UserError("; ".join(corrections) + "; --help says more")

    # --help shows `description` above the flags: the docstring of the options and, as examples, the
    # first two lines `python ...` of the script's docstring. Lines that a backslash continues do
    # not count.
    commands = re.findall(r"^ *(python .*[^\\])$", sys.modules["__main__"].__doc__ or "", re.M)
    description = "\n  ".join([inspect.cleandoc(options_class.__doc__ or "")] + commands[:2])
    # [RunOptions, DataOptions, ModelOptions, ...] of TrainOptions, in the order of --help; empty
    # for classes that declare their options themselves, such as EvalOptions
    groups = [base for base in reversed(options_class.__bases__) if is_dataclass(base)]
    if not groups:
        options = call_tyro(options_class, args, description)
    else:
        options = parse_groups(options_class, groups, args, description)
    check_ranges(options, "--")  # tyro knows "int", but not "at least 1"
    return options


def parse_groups(
    options_class: type[Options], groups: list[type], args: list[str], description: str
) -> Options:
    """Parse flags, which --help shows in groups. tyro makes a group of each field that is itself a
    dataclass. So parse into a class with one such field for each group, then collect the options of
    all groups again."""
    defaults = {option.name: option.default for option in fields(options_class)}
    group_fields = []  # for make_dataclass: [("machine", MachineOptions, field(...)), ...]
    for group in groups:
        # "machine" of MachineOptions: the heading of the group in --help
        heading = re.sub("Options$|Config$", "", group.__name__).lower()
        # `options_class` may override a default of a group, as FinetuneOptions does for eval_every
        default_group = group(**{option.name: defaults[option.name] for option in fields(group)})
        group_fields.append((heading, group, field(default=default_group)))
    grouped_class = make_dataclass(options_class.__name__, group_fields)
    grouped: object = call_tyro(grouped_class, args, description)  # .machine is a MachineOptions
    option_values: dict[str, object] = {}
    for parsed_group in vars(grouped).values():
        option_values |= vars(parsed_group)
    return options_class(**option_values)


def find_mistakes(options_class: type[Options], args: list[str], may_repeat: bool) -> list[str]:
    """Return what is wrong with a command line, and what is right, for each mistake that tyro does
    not notice, or would not explain: ["there is no --lr, but --max_lr"]. With `may_repeat` a flag
    of several values may stand twice. Raises UserError for a word that is not UTF-8 text."""
    # {"resume": "str | None", "data_dir": "tuple[pathlib.Path, ...]", ...}
    type_texts = {option.name: str(option.type) for option in fields(options_class)}
    option_names = list(type_texts)
    for word in args:
        if not os.path.exists(word):  # the name of a file may hold any bytes
            check_text(word, "an argument")
    corrections: list[str] = []
    if args and not args[0].startswith("-"):  # such as nanoGPT's `train.py config/FILE.py`
        correction = f"{args[0]} stands without a flag"
        # ["checkpoint"] for sample.py, ["config"] for train.py
        path_flags = [name for name in FLAGS_OF_PATHS if name in option_names]
        if path_flags and os.path.exists(args[0]):
            correction += f"; perhaps --{path_flags[0]} {args[0]}"
        corrections.append(correction)
    given_names: set[str] = set()  # of the flags before the present one
    for name, value in named_flags(args):  # ("max_lr", "1e-3"), or ("wandb", None)
        if name != "help" and name.removeprefix("no_") not in option_names:
            corrections.append(describe_unknown_flag(name, option_names))
        # such as nanoGPT's --compile=False; the type of --use_torch_compile is "<class 'bool'>"
        option_name = FLAGS_BY_NANOGPT_NAME.get(name, name)
        if value in ("True", "False") and "bool" in type_texts.get(option_name, ""):
            corrections.append(f"--{option_name} takes no value: it is off by --no_{option_name}")
        type_text = type_texts.get(name, "")  # "" for an unknown flag
        # tyro would take only b of `--input a --input b`, and the default for a bare `--input`.
        is_repeated = name in given_names and not may_repeat
        if type_text.startswith("tuple") and (value is None or is_repeated):
            corrections.append(f"give --{name} once, with all of its values behind it")
        expected = expected_instead(type_text, value)  # such as "INT", or None
        if expected is not None:
            corrections.append(f"--{name} takes {expected}, not {value}")
        given_names.add(name)
    return corrections


def describe_unknown_flag(name: str, option_names: list[str]) -> str:
    """Return "there is no --learning_rate, but --max_lr". The suggestion is this project's name for
    a flag of nanoGPT, or else the most similar name, if there is one."""
    translated = FLAGS_BY_NANOGPT_NAME.get(name, "")
    if translated in option_names:
        suggestions = [translated]
    else:
        suggestions = difflib.get_close_matches(name, option_names)  # the most similar first
    correction = f"there is no --{name}"
    if suggestions:  # empty for another script's --tokenizer
        correction += f", but --{suggestions[0]}"
    return correction


def expected_instead(option_type: str, value: str | None) -> str | None:
    """Return what an option takes, "INT", "FLOAT" or "npy or bin", if the value is nothing of that;
    else None. tyro's own message would quote typing.Annotated[int, ...], or offer 'None', too."""
    # Skip a flag without a value, which tyro names, and types of several numbers or also "auto".
    if value is None:
        return None
    # "typing.Literal['npy', 'bin']", or with Optional or None
    if re.fullmatch(r"(typing\.Optional\[)?typing\.Literal\[[^]]*\]+( \| None)?", option_type):
        choices = re.findall("'(.*?)'", option_type)  # ["npy", "bin"]
        return None if value in choices else " or ".join(choices)
    # "typing.Annotated[int, 'at least 1']" of a Count; check_ranges checks the range later
    annotated = re.search(r"Annotated\[(int|float),", option_type)
    if annotated is None or re.search("tuple|Literal", option_type):
        return None
    convert = int if annotated[1] == "int" else float
    try:
        convert(value)
    except ValueError:
        return annotated[1].upper()
    return None


def call_tyro(options_class: type[Options], args: list[str], description: str) -> Options:
    """Parse the flags with tyro and return the options. tyro raises SystemExit after --help or an
    error."""
    import tyro  # imported here, because other users of this module do not need it

    if {"-h", "--help"} & set(args):
        # From 130 columns on tyro prints groups side by side, so a line would mix several flags. It
        # reads the width from COLUMNS, as fill_lines does.
        os.environ["COLUMNS"] = str(min(129, shutil.get_terminal_size().columns))
    printed = io.StringIO()  # tyro's help; its errors go to standard error
    try:
        with contextlib.redirect_stdout(printed):
            return tyro.cli(
                options_class,
                args=args,
                description=description,
                use_underscores=True,
                # show INT instead of {None}|INT, and --lr instead of --optimizer.lr
                config=(tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes),
                console_outputs=is_main_process(),
            )
    finally:
        print_help(printed.getvalue())


def print_help(help_text: str) -> None:
    """Print tyro's help, with its lines filled anew and without "(default: X)" where that says
    nothing new."""
    for text in re.split(r"(?=\n  -)", help_text):  # split before each flag
        # drop "(default: X)" if X is empty or None, or if the text itself says "default: ..."
        if re.search(r"[^(]default:|\(default:\s+(None)?\)", text):
            text = re.sub(r"\s*\(default:[^)]*\) *", "", text)
        # tyro indents the docstrings and keeps their line breaks: fill the lines anew
        print(re.sub(r"(?m)^ {12,}\S.*(\n {12,}\S.*)*", fill_lines, text), end="")


def fill_lines(match: re.Match[str]) -> str:
    """Return indented lines of help, filled to the width that call_tyro gives, for `re.sub`."""
    paragraph = match[0]
    indent = paragraph.removesuffix(paragraph.lstrip())  # the white space before the first line
    width = int(os.environ["COLUMNS"]) - len(indent)
    text = " ".join(paragraph.split())
    # keeps --flag-names and long paths whole
    filled_lines = textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent("\n".join(filled_lines), indent)


def expand_home(words: list[str]) -> list[str]:
    """Return the words with the home folder in place of ~, in --name=~/folder, too. A shell does
    not expand that one, nor words that come from a file."""
    home = str(Path.home())
    return [re.sub(r"^(--[\w-]+=)?~(?=/|$)", rf"\1{home}", word) for word in words]


def join_dashes(words: list[str]) -> list[str]:
    """Return the words with a value like "---" as a part of its flag, --separator=---. As a word of
    its own it would be taken for a flag."""
    joined: list[str] = []
    for word in words:
        follows_flag = joined and re.fullmatch(r"--[\w-]+", joined[-1])  # a flag without =VALUE
        if follows_flag and re.match(r"--([^a-zA-Z]|$)", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def to_flags(options: dict[str, object]) -> list[str]:
    """Return the flags that `parse` turns into these options: ["--max_lr", "0.001", "--no_wandb"]
    for {"max_lr": 1e-3, "wandb": False}. Options that are None or an empty list are left out."""
    flags: list[str] = []
    for name, value in options.items():
        if value in (None, [], ()):
            continue
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")  # tyro's two flags of a bool
            continue
        items = value if isinstance(value, list | tuple) else [value]
        flags.append(f"--{name}")
        flags.extend(str(item) for item in items)
    return flags


def named_flags(flags: list[str]) -> list[tuple[str, str | None]]:
    """Return a pair for each flag: its name with underscores, and its first value or None. For
    ["--max_lr", "1e-3", "--wandb"] they are ("max_lr", "1e-3") and ("wandb", None)."""
    pairs: list[tuple[str, str | None]] = []
    for word in flags:
        if word.startswith("--"):  # --name or --name=value
            name, equals, value = word[2:].partition("=")
            pairs.append((name.replace("-", "_"), value if equals else None))
        elif pairs and pairs[-1][1] is None:
            # the first word after --name is its value, even "-1"
            pairs[-1] = (pairs[-1][0], word)
    return pairs


def flag_value(flags: list[str], name: str) -> str | None:
    """Return the value of the last flag of this name; None if the flag or its value is missing."""
    return dict(named_flags(flags)).get(name)  # dict keeps the last value of equal keys


def start_script(main: Callable[[Options], None], options_class: type[Options]) -> NoReturn:
    """Run a script: parse the command line, call `main` with the options, and exit."""
    call_and_exit(lambda: main(parse(options_class)))  # prints the UserErrors of parse, too


def call_and_exit(
    main: Callable[[], None],
    before_exit: Callable[[], None] = lambda: None,
    explain: Callable[[Exception], str | None] = lambda error: None,
) -> NoReturn:
    """Call `main`, then `before_exit`, and exit the process; in a notebook's kernel, which a script
    shares after `%run`, raise SystemExit.

    The exit code is 0 after success, or the code of a SystemExit. It is 2 after a mistake of the
    user or a fault of the machine, for which one sentence is printed; 1 after a bug, with its
    traceback; 128 + the number of a signal. For an error without a `user_message`, `explain` (such
    as explain_lost_process of utils/distributed.py) returns a sentence, or None for a bug.
    """
    set_up_output()
    label = "error"
    message = None  # the sentence to print after an error
    exit_code = 0
    try:
        launch = read_launch()
        if launch.world_size > 1:
            label = f"error on rank {launch.rank}"
        main()
    except SystemExit as end:  # from tyro (--help, a wrong flag), or a run after a signal
        exit_code = int(end.code or 0)  # the code of sys.exit() is None
    except BrokenPipeError:  # the program that read standard output, such as `head`, has ended
        exit_code = 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        message = "interrupted"
        exit_code = 128 + signal.SIGINT
    except Disconnected as error:
        message = str(error)
        exit_code = 2
    except Exception as error:
        message = user_message(error) or explain(error)  # explain: such as explain_lost_process
        exit_code = 2
        if message is None:  # neither has a sentence: a bug
            traceback.print_exc()
            exit_code = 1
    failure = flush_output()  # earlier output comes first, also in a file or a pipe
    if failure is not None and exit_code == 0:
        message = failure
        exit_code = 2
    if message:
        print(f"{label}: {message}", file=sys.stderr)  # label: "error", or "error on rank 3"
    before_exit()  # a training run waits here until its checkpoints are written
    remove_unused_folders()  # of a run that was refused
    flush_output()  # os._exit does not flush buffers
    # After `%run` in a notebook os._exit would end the kernel. A training run is better started by
    # `!python`: what its process holds, such as the locks of its folders, stays with the kernel.
    if hasattr(builtins, "__IPYTHON__"):
        sys.exit(exit_code)
    # Skip the interpreter's shutdown: reader threads of `datasets` can block the shutdown forever,
    # and gloo aborts in it if a gloo thread waits for the interpreter lock to release a tensor.
    os._exit(exit_code)


def set_up_output() -> None:
    """Silence two warnings of PyTorch, and let standard output take every character."""
    # They are about PyTorch's own use of TypedStorage, and about a choice of its compiler.
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    warnings.filterwarnings("ignore", "\nOnline softmax is disabled")
    # A notebook or a terminal of Windows may write another encoding than UTF-8, which lacks most
    # characters: write their escapes, as Python does on standard error.
    if isinstance(sys.stdout, io.TextIOWrapper):  # `%run` of a notebook has another object there
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> str | None:
    """Write what is printed so far. If that fails, drop it, and whatever is printed later. Return
    why, such as a full disk; None after success, or if the program that reads it has ended."""
    try:
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")
        if not isinstance(error, BrokenPipeError):
            return f"standard output: {error.strerror}"
    return None


def user_message(error: Exception) -> str | None:
    """Return the sentence to print for a mistake of the user, a fault of a file or of the machine;
    return None for any other error."""
    if isinstance(error, UserError):
        return str(error)
    # strerror is for example "No space left on device"; it is None for a library's own OSError
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:  # writing to an open file failed, for example on a full disk
            return error.strerror
        message = f"{error.filename}: {error.strerror}"
        if isinstance(error, FileNotFoundError):
            # for a relative path " in /tmp", the folder that the script was started in
            message += describe_searched_place(os.fsdecode(error.filename))
        return message
    if is_out_of_memory(error):  # .200, because PyTorch's text may have many lines
        return f"out of memory: take smaller batches, or fewer samples at a time ({error!s:.200})"
    return None
