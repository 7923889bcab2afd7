"""A run from its first step to its last: exact, whatever interrupts or slices it."""

import json
import math
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    bad,
    environment,
    gap,
    kill_after,
    losses,
    rows_written,
    run_until,
    same_run,
    script,
    slow,
    start,
    torchrun,
    train_args,
    weights,
    without,
)

from config import TrainOptions
from data.loader import Mixture
from model.formats.checkpoint import load_checkpoint
from train import build_model
from training.options import read_options, resolve_options
from training.run import seed_step
from training.start import open_initial
from utils.distributed import ALONE
from utils.logger import read_metrics

GOLDEN_LOSS = 3.102  # of step 50, on the fixed documents of conftest.py


def test_killed_and_resumed_equals_never_stopped_to_the_bit(shards, trained, tmp_path):
    args = train_args(shards, tmp_path, 20, "--save_every", 10)
    kill_after(13, tmp_path, args)
    assert load_checkpoint(tmp_path / "checkpoints" / "model_last.pt")["step"] == 10
    script(*args, "--resume", "auto")
    assert same_run(tmp_path, trained) and len(losses(trained)) == 20
    assert losses(tmp_path, "val") == losses(trained, "val")


def test_two_processes_equal_one_also_after_a_signal_in_an_evaluation(shards, tmp_path):
    """An evaluation has 32 batches of validation and 40 of a benchmark: that of step 10 begins with
    forward 72. The signal reaches the second process; a resumed run does the evaluation again."""
    whole, run, lambada = tmp_path / "whole", tmp_path / "run", tmp_path / "l.jsonl"
    lambada.write_text('{"text": "the cat e"}\n' * 160)
    flags = ["--lambada_every", 10, "--lambada_data", lambada, "--sample_every", 10]
    script(*train_args(shards, whole, 12, *flags))
    args = train_args(shards, run, 12, *flags, "--micro_batch_size", 2, "--save_every", 0)
    env = environment() | {"STOP": "1:82", "PYTHONPATH": str(ROOT)}
    code = 128 + signal.SIGTERM
    first, _ = torchrun(2, "tests/stopping_script.py", *args, code=code, env=env)
    assert "saved at step 10" in first.stdout
    torchrun(2, *args, "--resume", "auto")
    found, expected = read_metrics(run), read_metrics(whole)
    for split, figure in (("train", "loss"), ("val", "loss"), ("lambada", "perplexity")):
        for ours, theirs in zip(found[split], expected[split], strict=True):
            assert ours["step"] == theirs["step"]
            assert ours[figure] == pytest.approx(theirs[figure], rel=1e-4)
    samples = [(folder / "logs/samples.txt").read_text() for folder in (run, whole)]
    assert samples[0] == samples[1]


def test_golden_run_reaches_the_recorded_loss_of_float32_in_float16(shards, tmp_path):
    """scripts/first_hour.py, whose test runs it, does so in float32."""
    script(*train_args(shards, tmp_path, 50, "--dtype", "float16", "--eval_every", 0))
    assert losses(tmp_path)[50] == pytest.approx(GOLDEN_LOSS, rel=0.01)


@pytest.mark.parametrize("compiled", [False, slow(True)], ids=["plain", "compiled"])
def test_evaluation_and_samples_in_the_loop_change_no_step(shards, trained, tmp_path, compiled):
    item = {"ctx": "A dog", "endings": ["a", "bb", "c c", "d"], "label": 0}
    (tmp_path / "h.jsonl").write_text(json.dumps(item) + "\n")
    flags = ["--hellaswag_every", 5, "--hellaswag_data", tmp_path / "h.jsonl"]
    flags += ["--sample_every", 10]
    if compiled:
        flags.append("--use_torch_compile")
    done = script(*train_args(shards, tmp_path, 20, *flags))
    assert ("the first step compiles" in done.stdout) == compiled
    assert gap(tmp_path, trained) <= (1e-3 if compiled else 0)
    assert (tmp_path / "logs" / "samples.txt").read_text().count("--- step") == 2
    rows = read_metrics(tmp_path / "logs")["hellaswag"]
    assert [row["step"] for row in rows] == [0, 5, 10, 15, 20] and "acc_norm" in rows[0]


def test_seeds_have_other_dropout():
    """PyTorch's generator for CPUs keeps 32 bits of a seed."""
    masks = set()
    for seed, step, rank in ((1, 0, 0), (2, 0, 0), (1, 65_536, 0), (1, 0, 1), (1, 0, 0)):
        seed_step(seed, step, rank)
        masks.add(torch.rand(1).item())
    assert len(masks) == 4


def test_a_run_that_diverged_has_no_best_model_to_name(shards, tmp_path):
    done = script(*train_args(shards, tmp_path, 4, "--max_lr", 10, "--warmup_steps", 0))
    assert losses(tmp_path, "val")[4] > losses(tmp_path)[1] + 1
    assert "done; checkpoints" in done.stdout and "the best with" not in done.stdout


def test_rows_tell_what_happened(trained):
    train, val = (read_metrics(trained)[split] for split in ("train", "val"))
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "ms"}
    assert keys <= set(train[0])
    assert train[-1]["tokens"] == 20 * 512 and train[-1]["mfu"] is None  # no peak known for a CPU
    assert [row["step"] for row in val] == [0, 10, 20]
    assert val[-1]["bits_per_byte"] == pytest.approx(val[-1]["loss"] / math.log(2), rel=0.02)


def test_mistakes_are_one_sentence_and_write_nothing(shards, trained, tmp_path):
    foreign = tmp_path / "train_0.npy"
    np.save(foreign, np.full(50_000, 40_000, np.uint16))
    np.save(tmp_path / "val_0.npy", np.load(foreign))
    of_bytes = ["--resume", trained / "checkpoints/model_last.pt"]
    for flags, message in (
        (["--data_dir", tmp_path / "none"], "none is no folder; to make it"),
        (["--n_head", 5], "is no multiple of"),
        (["--checkpoint_dir", shards / "manifest.json" / "x"], "x: Not a directory"),
        (["--block_size", 10_000, "--total_batch_size", 40_000], "too few for"),
        (
            [*of_bytes, "--data_dir", tmp_path],
            "takes tokens of bytes, the shards hold tokens of gpt",
        ),
        ([*of_bytes, "--data_dir", tmp_path, "--dry_run"], "takes tokens of bytes, the shards"),
    ):
        bad(train_args(shards, tmp_path / "new", 30, *flags), message)
    assert not list((tmp_path / "new").rglob("m*"))


def test_a_run_that_began_from_weights_is_resumed_only_by_their_content(shards, trained, tmp_path):
    modern, run = tmp_path / "modern", tmp_path / "run"
    script(*train_args(shards, modern, 1, "--recipe", "modern,position=learned"))
    # of which the run takes the first 16 positions
    args = train_args(shards, run, 2, "--block_size", 16, "--init_from", modern)
    args = without(args, "--n_layer", "--n_head", "--n_embd")  # those of the weights
    assert "was trained by the recipe modern,position=learned" in script(*args).stdout
    script(*args[:-2], "--max_steps", 3, "--resume", "auto")
    again = [*args, "--max_steps", 4, "--resume", "auto", "--init_from"]
    script(*again, shutil.copytree(modern, tmp_path / "moved"))
    bad([*again, trained], "does not hold the weights that the run of", run)


def test_a_checkpoint_that_is_resumed_is_opened_once(shards, trained, tmp_path):
    """Its run may go on, and save, between two looks at the path."""
    path = tmp_path / "model_last.pt"
    shutil.copy(trained / "checkpoints/model_last.pt", path)
    flags = ["--resume", path, "--checkpoint_dir", tmp_path / "branch", "--data_dir", shards]
    options, derived, checkpoint = read_options(TrainOptions, "train.py", list(map(str, flags)))
    options, recipe = resolve_options(options, derived, checkpoint)
    path.unlink()
    stream = Mixture([shards], "train", 32).stream
    _, begun = build_model(options, recipe, stream, open_initial(options, checkpoint, ALONE))
    for name, weight in weights(trained).items():
        assert begun[name][:].equal(weight)


def test_a_signal_ends_a_long_step_which_is_then_not_taken(shards, tmp_path):
    long = ["--total_batch_size", 32 * 100_000, "--micro_batch_size", 1, "--eval_every", 0]
    log = tmp_path / "log"
    process = start(*train_args(shards, tmp_path, 30, *long), log=log)
    run_until(process, lambda: "micro-steps 100000" in log.read_text())
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM and "saved at step 0" in log.read_text()
    assert rows_written(tmp_path) == 0
