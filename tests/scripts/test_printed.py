"""What a script prints as a command or as advice is executed, as it stands there, with the launcher
that it names."""

import re
import shlex
from functools import partial

import pytest
import torch
from conftest import (
    ROOT,
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

from recipes import Recipe
from training.forecast.advice import advise
from training.forecast.memory import USABLE_SHARE, Hardware, forecast_memory
from utils.cli import to_flags
from utils.logger import read_metrics

TWO_PROCESSES = ("--standalone", "--nproc_per_node=2")


def execute(command, folder):
    """Run a command line in a folder, as some scripts write there; fail unless it succeeds."""
    command = re.sub(r"\S+\.py", rf"{ROOT}/\g<0>", command, count=1)
    program, *args = shlex.split(command)
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
    script(*launcher, *args, cwd=folder)


def next_commands(done):
    """Return the commands that a run prints at its end."""
    return re.findall(r"^  (python .*)$", done.stdout.partition("\nnext:\n")[2], re.MULTILINE)


def test_a_finished_run_says_how_it_ended_and_commands_that_work(shards, tmp_path):
    run = tmp_path / "a run"
    done = script(*train_args(shards, run, 2))
    loss = losses(run, "val")[2]
    assert f"step 2: validation loss {loss:.4f} of 4,096 tokens, " in done.stdout
    best = f"the best with a validation loss of {loss:.4f} at step 2"
    assert f"done; checkpoints: '{run}/checkpoints', {best}\n" in done.stdout
    # lines for a script that reads them
    figures = dict(re.findall(r"^(\w+): (\S+)$", done.stdout, re.MULTILINE))
    assert figures["val_loss"] == f"{loss:.6f}" and figures["step"] == "2"
    assert int(figures["tokens"]) == read_metrics(run / "logs")["train"][-1]["tokens"]
    seconds = int(figures["tokens"]) / int(figures["tokens_per_s"])
    assert float(figures["seconds"]) == pytest.approx(seconds, abs=0.00051)  # has three digits
    commands = next_commands(done)
    scripts = [command.split()[1] for command in commands]
    assert scripts == ["sample.py", "evaluate.py", "plot.py"]
    for command in commands:
        execute(command, tmp_path)


def test_what_a_finished_fine_tuning_prints_works(trained, tmp_path):
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 4)
    args = ["--init_from", trained, "--data", rows, "--run_dir", tmp_path, "--device", "cpu"]
    commands = next_commands(script("finetune.py", "--method", "sft", *args, "--max_steps", 2))
    assert len(commands) == 2
    for command in commands:
        execute(command, tmp_path)


@pytest.mark.parametrize("launcher", [[], slow(["-m", "torch.distributed.run", *TWO_PROCESSES])])
def test_what_a_stopped_run_prints_continues_it(shards, tmp_path, launcher):
    log = tmp_path / "out"
    flags = ("--eval_every", 0, "--sharding", "zero2")  # which one process ignores
    process = start(*launcher, *train_args(shards, tmp_path, 400, *flags), log=log)
    run_until(process, lambda: rows_written(tmp_path) >= 3)
    process.terminate()
    process.wait(60)
    command = re.search(r"continue with (.*)", log.read_text())[1]
    last = max(losses(tmp_path)) + 2
    execute(f"{command} --max_steps {last}", tmp_path)
    assert sorted(losses(tmp_path)) == list(range(1, last + 1))


def test_what_a_run_without_shards_prints_makes_them(tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 2000)
    said = script(*train_args(tmp_path / "none", tmp_path / "run", 2), code=2).stderr
    command = re.search(r"python data/fineweb-edu.py .*", said)[0]
    command = command.replace("YOUR_TEXT", str(text))
    execute(f"{command} --tokenizer bytes", tmp_path)
    script(*train_args(tmp_path / "none", tmp_path / "run", 2))


@pytest.mark.parametrize(
    "processes, given",
    [(1, {}), slow(2, {"recipe": "modern"}), slow(4, {"n_head": 4, "dropout": 0.1})],
)
def test_what_the_forecast_recommends_trains(shards, tmp_path, processes, given):
    """With the least memory for which there is advice, which then shares the most"""
    given = {"n_layer": 4, "n_head": 2, "n_embd": 64, "block_size": 64, "device": "cpu", **given}
    given["total_batch_size"] = 64 * 16
    options = train_options(micro_batch_size=1, **given)
    shape = options.model_config(Recipe(), 257)

    def hardware(free):
        return Hardware(torch.device("cpu"), torch.float32, int(free), processes, processes)

    needed = sum(forecast_memory(options, Recipe(), shape, hardware(0)).values()) / USABLE_SHARE
    texts = [advise(options, Recipe(), shape, hardware(needed * n / 20)) for n in range(1, 22)]
    assert "no flags make it fit" in texts[0]
    advice = next(text for text in texts if text.startswith("what fits is "))
    flags = to_flags({"data_dir": shards, "run_dir": tmp_path, "micro_batch_size": 1, **given})
    quiet = "--max_steps 1 --val_tokens 64 --eval_every 0 --sample_every 0 --dtype float32"
    words = [*flags, *quiet.split(), *advice.removeprefix("what fits is ").split()]
    run = partial(torchrun, processes) if processes > 1 else script
    run("train.py", *words)
