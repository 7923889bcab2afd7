"""Options are flags, wherever they come from; the last one wins."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    bad,
    folders,
    losses,
    script,
    train_args,
    user_error,
    without,
    write_commands,
)

from config import TrainOptions
from finetuning.options import FinetuneOptions
from model.execution import check_compiler
from model.formats.checkpoint import load_checkpoint
from recipes import RECIPES
from training import options as options_module
from training.options import check_inputs, find_recipe, read_options, resolve_options
from utils.distributed import Process
from utils.errors import UserError
from utils.logger import read_logged_config

SMALL_FILE = """# a comment
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
micro_batch_size = 4
total_batch_size = 512
max_lr = 3e-3
sample_every = 0
val_tokens = 4096
device = "cpu"
"""


def resolve(*flags):
    """Return the resolved options of train.py, and the checkpoint that it resumes."""
    options, derived, checkpoint = read_options(TrainOptions, "train.py", [str(x) for x in flags])
    return resolve_options(options, derived, checkpoint)[0], checkpoint


def logged(run):
    return read_logged_config(run / "logs")["config"]


def test_a_file_of_options_is_read_and_the_command_line_wins(shards, tmp_path):
    (tmp_path / "my.toml").write_text(SMALL_FILE)
    args = ["train.py", "--config", tmp_path / "my.toml", "--data_dir", shards, *folders(tmp_path)]
    script(*args, "--max_steps", 6, "--seed", 3)
    found = logged(tmp_path)
    assert (found["n_embd"], found["max_lr"], found["seed"]) == (32, 3e-3, 3)
    # the run's own config.json gives the same run again, in other folders
    again = folders(tmp_path / "again")
    script("train.py", "--config", tmp_path / "logs/config.json", *again)
    assert losses(tmp_path / "again") == losses(tmp_path)
    # resumed, the file stands between command line and checkpoint, which has the others
    (tmp_path / "my.toml").write_text("weight_decay = 0.3\n")
    script(*args[:3], "--resume", tmp_path, "--max_steps", 7)
    found = logged(tmp_path)
    assert (found["weight_decay"], found["seed"], max(losses(tmp_path))) == (0.3, 3, 7)
    recipe = read_logged_config(tmp_path / "logs")["recipe"]
    for name in ("max_lr", "weight_decay", "schedule"):  # numbers that agree
        assert recipe[name] == found[name], name
    assert recipe["to_zero"] == (found["min_lr"] == 0)
    saved = load_checkpoint(tmp_path / "checkpoints/model_last.pt")["config"]
    assert not {"resume", "overwrite", "config", "dry_run"} & set(saved)


def test_a_tilde_is_the_home_folder_in_a_file_and_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my.toml").write_text('data_dir = ["~/a"]')
    options, _ = resolve("--config", "~/my.toml", "--checkpoint-dir=~/b~")
    assert options.data_dir == (tmp_path / "a",)
    assert options.checkpoint_dir == tmp_path / "b~"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.toml", "n_lyaer = 2", "--n_layer"),
        ("a.toml", "n_layer = two", "a.toml is neither a .toml nor a run's config.json"),
        ("a.toml", "n_layer = 'two'", "two"),
        ("config.json", "{}", "config.json is neither a .toml nor a run's config.json"),
    ],
)
def test_a_file_with_a_wrong_option_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    bad(["train.py", "--dry_run", "--config", tmp_path / name], message)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_the_worked_files_are_valid(path):
    config, _ = resolve("--config", path, "--device", "cpu")
    world_size = {"gpt2-124M.toml": 8, "gpt2-1558M.toml": 32}.get(path.name, 1)
    config.micro_steps(world_size)  # raises where the batch does not divide


def test_a_resumed_run_keeps_the_recipe_that_it_began_with(monkeypatch):
    began = RECIPES["modern"]
    checkpoint = {"config": {"recipe": "modern"}, "recipe": asdict(began), "optimizer": {}}
    monkeypatch.setitem(RECIPES, "modern", replace(began, max_lr=1.0, momentum=0.5))
    assert find_recipe(TrainOptions(recipe="modern"), checkpoint) == began
    assert find_recipe(TrainOptions(recipe="modern,momentum=0.8"), checkpoint).momentum == 0.8
    checkpoint["recipe"]["cautious"] = True  # a field of an earlier version
    with user_error("begun by another version of this project"):
        find_recipe(TrainOptions(recipe="modern"), checkpoint)


@pytest.fixture
def cuda(monkeypatch):
    """A GPU, as far as options are concerned."""
    monkeypatch.setattr(options_module, "pick_device", torch.device)


@pytest.mark.parametrize(
    "flags, compiles",
    [
        ("--device cpu", False),
        ("--device cpu --use_torch_compile", True),
        ("--device cuda", True),
        ("--device 2x4xh100 --dry_run", True),
        ("--device cuda --config off.toml", False),
    ],
)
def test_training_compiles_on_cuda_unless_told_otherwise(
    tmp_path, monkeypatch, cuda, flags, compiles
):
    (tmp_path / "off.toml").write_text("use_torch_compile = false")
    monkeypatch.chdir(tmp_path)
    config, _ = resolve(*flags.split())
    assert config.use_torch_compile == compiles


def test_without_a_compiler_that_works_a_run_goes_on_uncompiled(shards, tmp_path):
    env = write_commands(tmp_path, broken="echo 'a.hpp:1: fatal error: Python.h: none' >&2; exit 1")
    env |= {"CXX": str(tmp_path / "broken"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    args = train_args(shards, tmp_path, 2, "--use_torch_compile", "--eval_every", 0)
    finished = script(*args, env=env, fork=False)  # a fork has read CXX already
    assert finished.stdout.count("warning: training is not compiled: ") == 1
    assert "install a C++ compiler and Python's headers" in finished.stdout
    assert "Traceback" not in finished.stderr
    assert not logged(tmp_path)["use_torch_compile"]


def test_all_processes_train_uncompiled_if_one_has_no_compiler(monkeypatch):
    process = Process(0, 2, torch.device("cpu"))  # rank 1 fails
    other = {1: "no compiler"}
    monkeypatch.setattr(Process, "merge", lambda self, outputs: outputs | other)
    monkeypatch.setattr(options_module, "check_compiler", lambda device: None)
    options = TrainOptions(use_torch_compile=True)
    assert not options_module.compile_if_all_can(options, process).use_torch_compile
    other.clear()
    assert options_module.compile_if_all_can(options, process).use_torch_compile


@pytest.mark.parametrize("line", ["x.hpp:1:10: fatal error: Python.h: none", "Failed to find gcc"])
def test_the_reason_is_the_line_of_the_compiler(monkeypatch, line):
    def fail(x):
        raise RuntimeError(f"{line}" if "gcc" in line else f"Command:\ngcc -c\n{line}\nend")

    monkeypatch.setattr("model.execution.compile_static", lambda function: fail)
    with user_error(f"^{line}; install a C"):
        check_compiler(torch.device("cpu"))


@pytest.mark.parametrize(
    "flags, expected",
    [
        ([], {"max_lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 5, "weight_decay": 0.1}),
        (["--max_lr", "1e-5"], {"max_lr": 1e-5, "min_lr": 1e-6}),
        (["--recipe", "gpt2,weight_decay=0.2,schedule=wsd"], {"weight_decay": 0.2}),
        (["--recipe", "gpt2,to_zero=True,schedule=wsd"], {"min_lr": 0.0, "schedule": "wsd"}),
        (["--checkpoint_dir", "other"], {"log_dir": Path("other/logs")}),  # it was given
        (["--device", "cuda"], {"micro_batch_size": 4, "use_torch_compile": True}),
    ],
)
def test_a_resumed_run_derives_again_what_nobody_gave(trained, cuda, flags, expected):
    """The flags of a run were --max_lr 3e-3, --warmup_steps 5 and --micro_batch_size 4."""
    config, saved = resolve("--resume", trained, *flags)
    for name, value in expected.items():
        assert getattr(config, name) == (pytest.approx(value) if type(value) is float else value)
    assert saved["config"]["min_lr"] == pytest.approx(3e-4)  # resolved in the file


def test_what_was_given_as_auto_is_derived_again_and_warmup_is_kept(shards, tmp_path):
    args = without(train_args(shards, tmp_path, 20), "--warmup_steps")
    args += ["--micro_batch_size", "auto", "--total_batch_size", 96]
    script(*args, "--eval_every", 0)
    options, saved = resolve("--resume", tmp_path, "--max_steps", 200)
    # 16, the default, would not divide the three sequences of a step
    assert saved["config"]["micro_batch_size"] == 3 and options.micro_batch_size == "auto"
    assert options.warmup_steps == 2  # a tenth of the first 20 steps
    # a new run by the same options has a warmup of its own
    again, _ = resolve("--config", tmp_path / "logs/config.json", "--max_steps", 200)
    assert (again.warmup_steps, again.micro_batch_size) == (20, "auto")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--device", "cuda:7"], "device cuda:7 is not available; this machine"),
        (["--device", "a10"], "; train.py --dry_run --device also takes b200, h200, h100"),
        (["--min_lr", 1], "--min_lr 1.0 is above --max_lr"),
        (["--max_lr", "nan"], "--max_lr nan must be at least 0"),
        (["--beta2", 2], "--beta2 2.0 must be at least 0 and below 1"),
        (["--resume", ROOT / "tests"], "the folder holds no checkpoint"),
        (["--resume", ROOT / "README.md"], "damaged or not a checkpoint"),
    ],
)
def test_a_wrong_option_is_a_sentence(flags, message):
    with pytest.raises(UserError) as raised:
        resolve(*flags)
    assert message in str(raised.value)


def test_the_checkpoint_of_another_script_is_not_resumed(trained, tmp_path):
    state = load_checkpoint(trained / "checkpoints/model_last.pt")
    torch.save({**state, "script": "finetune.py"}, tmp_path / "a.pt")
    with user_error("is of finetune.py: begin from it with --init"):
        resolve("--resume", tmp_path / "a.pt")
    longer = ["train.py", "--resume", trained, "--max_steps", 9]
    bad(longer, "is at step 20, after --max_steps 9", trained)


@pytest.mark.parametrize(
    "name, value, path",
    [
        ("data", Path("texts/pairs.jsonl"), "texts/pairs.jsonl"),
        ("reward", "a:b/judge.py:share", "a:b/judge.py"),
        ("reward", "judge/model_best.pt", "judge/model_best.pt"),
    ],
)
def test_what_moved_is_named_by_where_a_resumed_run_read_it(name, value, path):
    given = {"method": "grpo", "init_from": "gpt2", "data": Path(), "reward": "exact"}
    check_inputs(FinetuneOptions(**given), [], {})
    options = FinetuneOptions(**given | {name: value})
    with user_error(f"{path} is not here: .* read it at /before/{path}; .* by --{name}"):
        check_inputs(options, [], {"working_dir": "/before"})
    check_inputs(options, [f"--{name}", "there"], {})


@pytest.mark.parametrize("flags", [["--resume"], ["--resume", "--seed", "3"]])
def test_a_resume_without_a_value_means_auto(tmp_path, flags):
    run = ["--run_dir", str(tmp_path)]
    for words in ([*run, *flags], [*flags, *run]):
        options, _, _ = read_options(TrainOptions, "train.py", words)
        assert (options.resume, options.checkpoint_dir) == ("auto", tmp_path / "checkpoints")
