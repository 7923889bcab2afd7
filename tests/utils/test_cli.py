import errno
import os
from pathlib import Path

import pytest
import torch
import torch._dynamo.exc
import torch._inductor.exc
from bench import BenchConfig
from training.options import parse_options

from config import DataConfig, SamplingConfig, TrainConfig
from data.verify import VerifyConfig
from plot import PlotConfig
from utils.cli import check_habits, parse, user_message
from utils.errors import UserError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("--seed is too large"), "--seed is too large"),
        (OSError(errno.ENOSPC, "No space left on device", "model.pt"), "cannot write model.pt: No"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "CUDA out of memory;"),
        (torch._dynamo.exc.TorchRuntimeError("CUDA out of memory. Tried to\n"), "out of memory;"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might"), "out of memory;"),
        (RuntimeError("[enforce fail] can't allocate memory: you tried"), "out of memory;"),
        (torch._dynamo.exc.TorchRuntimeError("bad shape\n\nat x"), "compiling failed: bad"),
        (torch._inductor.exc.InvalidCxxCompiler(), "--no_use_torch_compile goes without"),
    ],
)  # fmt: skip
def test_what_a_user_or_a_machine_causes_is_a_sentence(error, message):
    text = user_message(error)
    assert message in text and "\n" not in text
    assert "of memory" not in text or "--micro_batch_size" in text


def test_what_may_not_be_read_is_not_said_to_be_written(tmp_path, monkeypatch):
    (tmp_path / "a.txt").touch()
    (tmp_path / "folder").mkdir()
    access = os.access  # which allows root everything
    monkeypatch.setattr(os, "access", lambda p, mode: "closed" not in p and access(p, mode))
    verbs = {"a.txt": "open", "folder": "open", "closed/a.txt": "open", "b.txt": "write"}
    for name, verb in verbs.items():
        error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / name))
        assert f"cannot {verb} {tmp_path / name}" in user_message(error)


def test_a_tilde_is_the_home_folder_in_every_path(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.toml").write_text('data_dir = "~/data"')
    config, _ = parse_options(["--config=~/a.toml", "--checkpoint_dir=~/x", "--log_dir", "a~"])
    found = (config.data_dir, config.checkpoint_dir, config.log_dir)
    assert found == (tmp_path / "data", tmp_path / "x", Path("a~"))
    assert parse(DataConfig, args=["--merge", "~/b", "c"]).merge == (tmp_path / "b", Path("c"))


@pytest.mark.parametrize(
    ("options", "args"),
    [
        (DataConfig, ["--input", "--local_dir", "x"]),
        (DataConfig, ["--local_dir", "x", "--merge"]),
        (DataConfig, ["--input", ""]),
        (TrainConfig, ["--init_from", ""]),
        (TrainConfig, ["--resume="]),
        (SamplingConfig, ["--checkpoint", ""]),
    ],
)
def test_an_option_without_a_value_is_not_taken_for_its_default(options, args):
    with pytest.raises(UserError, match="is given without a value"):
        check_habits(options, {}, args)


def test_a_list_in_two_parts_and_a_file_without_config_are_named():
    with pytest.raises(UserError, match="--input is given twice; give all its values after one"):
        check_habits(DataConfig, {}, ["--input", "a", "--local_dir", "x", "--input=b"])
    with pytest.raises(UserError, match="config/x.py: a file of options is given by --config"):
        check_habits(TrainConfig, {}, ["config/x.py", "--max_steps", "3"])


def test_a_prompt_may_be_empty_and_a_number_negative():
    check_habits(SamplingConfig, {}, ["--prompt", "", "--temperature", "-1", "--json"])


def test_a_bug_is_no_sentence():
    for error in (RuntimeError("shapes do not match"), AssertionError(), ZeroDivisionError()):
        assert user_message(error) is None


@pytest.mark.parametrize(
    ("options", "name", "option"),
    [
        (SamplingConfig, "runs", "--checkpoint"),
        (DataConfig, "book.txt", "--input"),
        (TrainConfig, "model_last.pt", "--resume"),
        (VerifyConfig, "runs", "--data_dir"),
        (PlotConfig, "runs", "--log"),
    ],
)
def test_a_path_alone_is_told_its_option(options, name, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{name}: give it by {option} {name}$"):
        parse(options, args=[name])


def test_a_word_that_a_script_expects_is_not_taken_for_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert parse(BenchConfig, args=["data"], positional=True).what == "data"
