"""What a script prints as a command or as advice is executed, as it stands there, with the launcher
that it names."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    environment,
    losses,
    rows_written,
    run_until,
    script,
    slow,
    start,
    torchrun,
    train_args,
    train_options,
    write_rows,
)

from model.recipes import Recipe
from training.advice import advise
from training.plan import Hardware, forecast_memory


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the scripts, to run commands in: some write into the working directory."""
    folder = tmp_path_factory.mktemp("project")
    for path in [*ROOT.glob("*.py"), ROOT / "scripts"]:
        (folder / path.name).symlink_to(path)
    (folder / "data").mkdir()
    for path in ROOT.glob("data/*.py"):
        (folder / "data" / path.name).symlink_to(path)
    return folder


def execute(command, project):
    """Run a command line in a shell; fail unless it succeeds."""
    env = environment()
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, shell=True, cwd=project, env=env, **streams)
    assert done.returncode == 0, command + "\n" + done.stdout + done.stderr


def next_commands(text):
    """Return the commands that a run prints at its end."""
    return re.findall(r"^  (python .*)$", text.partition("\nnext:\n")[2], re.MULTILINE)


def test_what_a_finished_run_prints_works(shards, tmp_path, project):
    text = script(*train_args(shards, tmp_path / "run", 2)).stdout
    commands = next_commands(text)
    assert [re.search(r"\w+\.py", command)[0] for command in commands] == [
        "sample.py",
        "evaluate.py",
        "plot.py",
    ]
    for command in commands:
        execute(command, project)


@pytest.mark.parametrize("flags", [slow(["--plain"]), []])
def test_what_a_finished_fine_tuning_prints_works(trained, tmp_path, project, flags):
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    args = ["--init_from", trained, "--data", rows, "--run_dir", tmp_path, "--device", "cpu"]
    args = ["finetune.py", "--method", "sft", *args, "--max_steps", 2, *flags]
    commands = next_commands(script(*args).stdout)
    assert len(commands) == 2
    for command in commands:
        execute(command, project)


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (1, ()),
        slow(2, ("--sharding", "zero2")),
        slow(2, ("--sharding", "zero2", "--tensor_parallel", 2)),
    ],
)
def test_what_a_stopped_run_prints_continues_it(shards, tmp_path, project, processes, flags):
    steps = 400
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    args = train_args(shards, tmp_path / "run", steps, "--eval_every", 0, *flags)
    log = tmp_path / "out"
    process = start(*launcher, *args, log=log)
    run_until(process, lambda: rows_written(tmp_path / "run") >= 3)
    process.terminate()
    process.wait(60)
    command = re.search(r"continue with (.*)", log.read_text())[1]
    execute(f"{command} --max_steps {max(losses(tmp_path / 'run')) + 2}", project)
    assert len(losses(tmp_path / "run")) == max(losses(tmp_path / "run")) < steps


def test_what_a_run_without_shards_prints_makes_them(tmp_path, project):
    text = tmp_path / "book.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 2000)
    said = script(*train_args(tmp_path / "none", tmp_path / "run", 2), code=2).stderr
    command = re.search(r"python data/fineweb-edu.py .*", said)[0]
    command = command.replace("YOUR_TEXT", str(text)).replace("FOLDER", str(tmp_path / "shards"))
    execute(f"{command} --tokenizer bytes", project)
    script(*train_args(tmp_path / "shards", tmp_path / "run", 2))


@pytest.mark.parametrize(
    ("processes", "given"),
    [
        (1, {}),
        slow(2, {}),
        slow(2, {"recipe": "modern"}),
        slow(4, {"n_head": 4}),
        slow(4, {"n_head": 4, "dropout": 0.1}),
    ],
)
def test_what_the_forecast_recommends_trains(shards, tmp_path, processes, given):
    """With less and less memory: the last two of what is recommended, which share the most"""
    sizes = {"n_layer": 4, "n_head": 2, "n_embd": 64, "block_size": 64, "device": "cpu", **given}
    options = train_options(total_batch_size=64 * 16, micro_batch_size=1, **sizes)
    recipe = Recipe()
    shape = options.model_config(recipe, 257)

    def hardware(free):
        return Hardware(torch.device("cpu"), torch.float32, free, processes, processes)

    needed = sum(forecast_memory(options, recipe, shape, hardware(0)).values()) / 0.9
    recommended = {}  # a dict, as it keeps the order
    for share in (1.1, 0.99, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        text = advise(options, recipe, shape, hardware(int(share * needed)))
        if text.startswith("what fits is "):
            recommended[text.removeprefix("what fits is ")] = True
    assert len(recommended) > 1
    for index, flags in enumerate(list(recommended)[-2:]):
        args = ["train.py", "--data_dir", shards, "--run_dir", tmp_path / f"{index}"]
        for name, value in {**sizes, "total_batch_size": 64 * 16}.items():
            args += [f"--{name}", value]
        quiet = "--max_steps 1 --val_tokens 64 --eval_every 0 --sample_every 0 --dtype float32"
        args += [*quiet.split(), *flags.split()]
        if processes == 1:
            script(*args)
        else:
            torchrun(processes, *args)
