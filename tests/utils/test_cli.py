import builtins
import errno
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from conftest import ROOT, user_error

from config import TrainOptions
from data.shards import open_folders
from finetuning.options import FinetuneOptions
from model.formats.checkpoint import find_checkpoint
from model.formats.huggingface_weights import find_or_download
from recipes import RECIPES
from sample import SampleOptions
from utils.cli import (
    FLAGS_BY_NANOGPT_NAME,
    call_and_exit,
    flag_value,
    parse,
    to_flags,
    user_message,
)
from utils.errors import UserError
from utils.logger import find_metrics


@pytest.mark.parametrize(
    "error, message",
    [
        (UserError("--seed is too large"), "--seed is too large"),
        (OSError(errno.ENOSPC, "No space left on device", "model.pt"), "model.pt: No space left"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),  # of a write
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), "out of memory:"),
        (RuntimeError("[enforce fail] can't allocate memory: you tried"), "out of memory:"),
        (MemoryError(), "out of memory:"),
        (RuntimeError("shapes do not match"), "None"),  # a bug
        (AssertionError(), "None"),
    ],
)
def test_what_a_user_or_a_machine_causes_is_a_sentence_and_a_bug_is_none(error, message):
    assert message in str(user_message(error))


@dataclass
class Options:
    """Options of every type."""

    folders: tuple[Path, ...] = (Path("a"), Path("b"))
    """Several paths."""
    text: str | None = "x"
    """Text or none."""
    number: float = 1.0
    """A number."""
    size: int | Literal["auto"] = 3
    """A number or a word."""
    on: bool = True
    """A switch."""


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(folders=(Path("c d"),), text="-", number=3e-4, size="auto", on=False),
        TrainOptions(recipe="modern", data_dir=(Path("x"), Path("y")), use_torch_compile=True),
        *(TrainOptions(recipe=recipe, micro_batch_size="auto") for recipe in RECIPES),
    ],
)
def test_options_survive_as_flags(options):
    values = vars(options)
    if isinstance(options, TrainOptions):  # to be found from any working directory
        options = replace(options, checkpoint_dir=options.checkpoint_dir.absolute())
        values = options.to_dict()
    assert parse(type(options), to_flags(values)) == options


@pytest.mark.parametrize("text", ["--", "-----", "--- end", "-- 8< --", "-"])
def test_a_value_may_consist_of_dashes(text):
    assert parse(Options, ["--text", text, "--number", "-1"]) == Options(text=text, number=-1)


def test_later_flags_win_and_are_found_by_name():
    flags = ["--number", "1", "--text=a", "--number=2", "--folders", "x", "y", "--no_on"]
    assert parse(Options, flags) == Options((Path("x"), Path("y")), "a", 2.0, on=False)
    assert flag_value(flags, "number") == "2" and flag_value(flags, "text") == "a"
    assert flag_value(flags, "size") is None and flag_value(["--max-lr", "1"], "max_lr") == "1"


def test_a_list_is_given_once_with_its_values(monkeypatch):
    with user_error("give --folders once"):
        parse(Options, ["--folders", "--size", "3"])
    monkeypatch.setattr("sys.argv", ["script.py", "--folders", "x", "--folders=y"])
    with user_error("give --folders once"):
        parse(Options)


def test_an_argument_is_text_unless_it_is_a_file(tmp_path):
    name = os.fsdecode(bytes(tmp_path) + b"/caf\xe9")
    for flags in (["--text", name], [f"--text={name}"], ["--folders", "x", name]):
        with user_error("an argument is not UTF-8 text"):
            parse(Options, flags)
    Path(name).touch()
    assert parse(Options, ["--text", name]).text == name


def test_a_flag_of_nanogpt_is_answered_by_its_name_here():
    table = (ROOT / "docs/NANOGPT.md").read_text()
    for name, flag in FLAGS_BY_NANOGPT_NAME.items():
        assert name in table and f"--{flag}" in table
        with user_error(f"there is no --{name}, but --{flag};"):
            parse(SampleOptions if flag == "prompt" else TrainOptions, [f"--{name}=1"])
    with user_error("but --max_lr; .*--no_use_torch_compile; --help"):
        parse(TrainOptions, ["--learning_rate=1", "--compile=False"])
    with user_error("config/x.py stands without a flag; --help says"):
        parse(TrainOptions, ["config/x.py"])
    with user_error("without a flag; perhaps --checkpoint .*conftest.py; --help"):
        parse(SampleOptions, [str(ROOT / "tests/conftest.py")])


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--max_stesp=3", "there is no --max_stesp, but --max_steps; --help says more"),
        ("--no-use-torch-compil", "no --no_use_torch_compil, but --use_torch_compile"),
        ("--tokenizer", "there is no --tokenizer; --help"),  # an option of another script
    ],
)
def test_a_misspelt_flag_is_answered_by_the_most_similar_one(flag, message):
    with user_error(message):
        parse(TrainOptions, [flag])


@pytest.mark.parametrize(
    "name, allowed, wrong",
    [("top_k", 1, 0), ("temperature", 1e9, "inf"), ("top_p", 1, "nan"), ("seed", 0, -1)],
)
def test_a_number_out_of_the_range_in_the_type_of_its_field_is_refused(name, allowed, wrong):
    assert getattr(parse(SampleOptions, [f"--{name}={allowed:.0f}"]), name) == allowed
    with user_error(f"--{name} {wrong}.* must be "):
        parse(SampleOptions, [f"--{name}={wrong}"])


@pytest.mark.parametrize("value", ["abc", "1e3", "1.5"])
def test_a_word_in_the_place_of_a_number_is_a_sentence_without_types_of_python(value):
    for name in ("max_steps", "n_layer", "seed"):
        with user_error(f"--{name} takes INT, not {value};"):
            parse(TrainOptions, [f"--{name}", value])
    for name in ("max_lr", "beta2"):
        with user_error(f"--{name} takes FLOAT, not x{value};"):
            parse(TrainOptions, [f"--{name}", f"x{value}"])


@pytest.mark.parametrize(
    "options_class, flag, value, choices",
    [
        (FinetuneOptions, "method", "stf", "sft or dpo or reward or grpo"),
        (TrainOptions, "sharding", "None", "none or zero1 or zero2 or zero3"),
        (TrainOptions, "schedule", "cos", "cosine or linear or wsd"),
    ],
)
def test_a_word_in_the_place_of_a_choice_is_answered_by_the_choices(
    options_class, flag, value, choices
):
    with user_error(f"--{flag} takes {choices}, not {value}; --help"):
        parse(options_class, [f"--{flag}", value])


def test_a_notebook_or_another_encoding_ends_no_script():
    """Jupyter names a backend of Matplotlib, which this environment lacks."""
    program = (
        "import utils.environment, matplotlib; from utils.cli import call_and_exit as call;"
        r"call(lambda: print('\xe9 \u201c \udc80'))"
    )
    env = os.environ | {"PYTHONIOENCODING": "cp1252", "MPLBACKEND": "module://none.backend"}
    command = [sys.executable, "-c", program]
    finished = subprocess.run(command, env=env, cwd=ROOT, capture_output=True)
    assert (finished.stdout, finished.returncode) == (b"\xe9 \x93 \\udc80\n", 0), finished.stderr


@pytest.mark.parametrize("program", ["print('x')", "print('x'); raise UserError('wrong')"])
def test_a_reader_that_has_ended_causes_no_traceback(program):
    """As in `train.py --help | head`: the buffer is written when nobody reads the pipe any more."""
    imports = "from utils.cli import call_and_exit; from utils.errors import UserError;"
    source = f"{imports} call_and_exit(lambda: exec({program!r}))"
    read_end, write_end = os.pipe()
    os.close(read_end)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    finished = subprocess.run(
        [sys.executable, "-c", source], env=env, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE
    )
    os.close(write_end)
    assert (finished.stderr, finished.returncode) in ((b"", 0), (b"error: wrong\n", 2))


@pytest.mark.parametrize("message, code", [(None, 0), ("wrong", 2)])
def test_a_script_that_a_notebook_runs_leaves_the_kernel_alive(message, code, monkeypatch):
    def main():
        if message is not None:
            raise UserError(message)

    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with pytest.raises(SystemExit) as end:
        call_and_exit(main)
    assert end.value.code == code


def test_a_missing_path_is_said_to_be_in_the_project_if_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def message(function, *args):
        with pytest.raises((UserError, OSError)) as caught:
            function(*args)
        return user_message(caught.value)

    for path, found in (("docs/TOUR.md", True), ("configs", True), ("docs/none.pt", False)):
        place = f" in {tmp_path}" + f", but there is {ROOT / path}" * found
        error = FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        assert user_message(error) == f"{path}: No such file or directory{place}"
        assert message(find_checkpoint, Path(path)) == f"there is no {path}{place}"
        assert f"is no folder{place}; to make" in message(open_folders, [Path(path)], "train")
        assert f"of a run{place}; give" in message(find_metrics, path)
        if "/" in path:
            assert message(find_or_download, path) == f"there is no {path}{place}"
