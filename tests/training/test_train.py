"""A run from its first step to its last: exact, whatever interrupts or slices it."""

import json
import math
import os
import re
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
    kill,
    losses,
    rows_written,
    run_until,
    same_run,
    script,
    start,
    torchrun,
    train_args,
)

from training.checkpoint import load_checkpoint
from training.run import seed_step
from utils.logger import read_metrics

GOLDEN_LOSS = 3.102  # of step 50, on the fixed documents of conftest.py


def test_killed_and_resumed_equals_never_stopped_to_the_bit(shards, trained, tmp_path):
    process = start(*train_args(shards, tmp_path, 20, "--save_every", 10))
    run_until(process, lambda: rows_written(tmp_path) >= 13)
    kill(process)
    assert load_checkpoint(tmp_path / "checkpoints" / "model_last.pt")["step"] == 10
    script(*train_args(shards, tmp_path, 20, "--save_every", 10, "--resume", "auto"))
    assert same_run(tmp_path, trained) and len(losses(trained)) == 20
    assert losses(tmp_path, "val") == losses(trained, "val")


@pytest.fixture(scope="module")
def halfway(shards, tmp_path_factory):
    """The same run as `trained`, stopped by SIGTERM somewhere before its end."""
    run = tmp_path_factory.mktemp("halfway")
    process = start(*train_args(shards, run, 20), log=run / "log")
    run_until(process, lambda: rows_written(run) >= 7)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    return run


def test_sigterm_finishes_the_step_saves_and_exits(shards, trained, halfway, tmp_path):
    step = load_checkpoint(halfway / "checkpoints" / "model_last.pt")["step"]
    assert step == max(losses(halfway)) and 7 <= step < 20
    said = (halfway / "log").read_text()
    assert "stopping soon, then saving" in said and f"saved at step {step}" in said
    shutil.copytree(halfway, tmp_path / "run")
    script(*train_args(shards, tmp_path / "run", 20, "--resume", "auto"))
    assert same_run(tmp_path / "run", trained)


@pytest.fixture(scope="module")
def evaluated(shards, tmp_path_factory):
    """The flags of a run that scores and samples, and its folder."""
    run = tmp_path_factory.mktemp("evaluated")
    (run / "l.jsonl").write_text('{"text": "the cat e"}\n' * 160)
    flags = ["--lambada_every", 10, "--lambada_data", run / "l.jsonl", "--sample_every", 10]
    script(*train_args(shards, run, 12, *flags))
    return flags, run


@pytest.mark.parametrize(
    ("processes", "call"),
    [(2, 82), (1, 112), pytest.param(1, 152, marks=pytest.mark.slow)],
    ids=["validation", "benchmark", "sample"],
)
def test_sigterm_ends_an_evaluation_which_a_resumed_run_does_again(
    shards, evaluated, tmp_path, processes, call
):
    """An evaluation has 32 batches of validation and 40 of a benchmark, after step 0 the 32 tokens
    of a sample; that of step 10 begins with forward 72."""
    flags, whole = evaluated
    args = train_args(shards, tmp_path, 12, *flags, "--save_every", 0)
    args += ["--micro_batch_size", 4 // processes]
    env = environment() | {"STOP": f"{processes - 1}:{call}", "PYTHONPATH": str(ROOT)}
    stopped = torchrun(processes, "tests/stopping_script.py", *args, code=1, env=env)
    assert "saved at step 10" in stopped.stdout, stopped.stderr
    torchrun(processes, *args, "--resume", "auto")
    found, expected = read_metrics(tmp_path), read_metrics(whole)
    for split in ("train", "val", "lambada"):
        assert [row["step"] for row in found[split]] == [row["step"] for row in expected[split]]
    assert gap(tmp_path, whole) < 1e-4
    if processes == 1:
        assert same_run(tmp_path, whole)
        assert found["lambada"] == expected["lambada"]
    samples = [(run / "logs/samples.txt").read_text() for run in (tmp_path, whole)]
    assert samples[0] == samples[1]


def test_resumed_with_other_slicing_goes_on_alike(shards, trained, halfway, tmp_path):
    shutil.copytree(halfway, tmp_path / "run")
    args = train_args(shards, tmp_path / "run", 20, "--micro_batch_size", 16)
    script(*args, "--resume", "auto")
    assert gap(tmp_path / "run", trained) < 1e-4 and len(losses(tmp_path / "run")) == 20


def test_two_processes_under_torchrun_equal_one(shards, trained, tmp_path):
    torchrun(2, *train_args(shards, tmp_path, 20, "--micro_batch_size", 2))
    assert gap(tmp_path, trained) < 1e-4
    val, expected = losses(tmp_path, "val"), losses(trained, "val")
    assert max(abs(val[s] - expected[s]) for s in expected) < 1e-4


def test_golden_run_reaches_the_recorded_loss(shards, tmp_path):
    script(*train_args(shards, tmp_path, 50))
    found = losses(tmp_path)
    assert abs(found[1] - math.log(257)) < 0.1
    assert found[50] == pytest.approx(GOLDEN_LOSS, rel=0.01)


def test_compiled_training_with_evaluation_and_samples_in_the_loop(shards, trained, tmp_path):
    item = {"ctx": "A dog", "endings": ["a", "bb", "c c", "d"], "label": 0}
    (tmp_path / "h.jsonl").write_text(json.dumps(item) + "\n")
    (tmp_path / "l.jsonl").write_text('{"text": "the cat e"}\n' * 600)
    hellaswag = ["--hellaswag_every", 5, "--hellaswag_data", tmp_path / "h.jsonl"]
    lambada = ["--lambada_every", 10, "--lambada_data", tmp_path / "l.jsonl"]
    args = train_args(shards, tmp_path, 20, "--use_torch_compile", "--sample_every", 10)
    assert "the first step compiles" in script(*args, *hellaswag, *lambada).stdout
    assert gap(tmp_path, trained) < 1e-3
    assert (tmp_path / "logs" / "samples.txt").read_text().count("--- step") == 2
    rows = read_metrics(tmp_path / "logs")
    assert [r["step"] for r in rows["hellaswag"]] == [0, 5, 10, 15, 20]
    assert {"acc", "acc_norm"} <= set(rows["hellaswag"][0])
    assert [r["n"] for r in rows["lambada"]] == [500] * 3 and rows["lambada"][0]["perplexity"] > 1


def test_dropout_resumes_to_the_bit(shards, tmp_path):
    extra = ["--dropout", 0.2, "--save_every", 5, "--keep_last", 2]
    script(*train_args(shards, tmp_path / "a", 10, *extra))
    middle = tmp_path / "a/checkpoints/model_step_000005.pt"
    script(*train_args(shards, tmp_path / "b", 10, *extra, "--resume", middle))
    found, expected = losses(tmp_path / "b"), losses(tmp_path / "a")
    assert found == expected


def test_seeds_have_other_dropout():
    """PyTorch's generator for CPUs keeps 32 bits of a seed."""
    masks = []
    for seed, step, rank in ((1, 0, 0), (2, 0, 0), (1, 65_536, 0), (1, 0, 1), (1, 0, 0)):
        seed_step(seed, step, rank)
        masks.append(torch.rand(8).tolist())
    assert masks[0] == masks[4] and len({str(mask) for mask in masks}) == 4


@pytest.mark.slow
def test_a_run_ends_with_a_picture(shards, tmp_path):
    script(*train_args(shards, tmp_path, 2), fork=False)  # forks have no matplotlib
    assert (tmp_path / "logs" / "log_plot.png").stat().st_size > 10_000


def test_rows_tell_what_happened(trained):
    rows = [json.loads(line) for line in (trained / "logs" / "metrics.jsonl").open()]
    train = [row for row in rows if row["split"] == "train"]
    keys = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "ms"}
    assert keys <= set(train[0])
    assert train[-1]["tokens"] == 20 * 512 and train[-1]["mfu"] is None  # no peak known for a CPU
    val = [row for row in rows if row["split"] == "val"]
    assert [row["step"] for row in val] == [0, 10, 20]
    assert val[-1]["bits_per_byte"] == pytest.approx(val[-1]["loss"] / math.log(2), rel=0.02)


def test_mistakes_are_one_sentence_and_write_nothing(shards, trained, tmp_path):
    new = tmp_path / "new"

    def args(*extra, data=shards):
        return train_args(data, new, 4, *extra)

    bad(args(data=tmp_path / "nothing"), "holds no train shards")
    bad(args("--total_batch_size", 500), "does not divide by")
    bad(args("--max_step", 5), "--max_steps")
    bad(args("--n_head", 5), "does not divide by")
    last = trained / "checkpoints" / "model_last.pt"
    bad(
        args("--max_steps", 30, "--resume", last, "--n_layer", 3),
        "another shape: n_layer 2 (here 3); leave",
    )
    bad(args("--checkpoint_dir", shards / "manifest.json" / "x"), "x: Not a directory")
    assert not list(new.rglob("m*"))


def test_bad_data_is_a_sentence_and_writes_nothing(shards, trained, tmp_path):
    def args(name, tokens=None, cut=None):
        """Return a run on a copy of the shards with other tokens, or without its last bytes."""
        shutil.copytree(shards, tmp_path / name)
        for path in (tmp_path / name).glob("train_*.npy"):
            if tokens is not None:
                np.save(path, np.full(len(np.load(path)), tokens, np.uint16))
            path.write_bytes(path.read_bytes()[:cut])
        return train_args(tmp_path / name, tmp_path / "new", 4)

    bad(args("cut", cut=-1001), "damaged or not a shard")
    bad(args("ids", tokens=300), "token id 300")
    bad([*args("short"), "--block_size", 10_000, "--total_batch_size", 40_000], "too few for")
    args("interrupted")
    manifest = json.loads((tmp_path / "interrupted/manifest.json").read_text())
    manifest |= {"complete": False, "stopped": False}
    (tmp_path / "interrupted/manifest.json").write_text(json.dumps(manifest))
    done = script(*train_args(tmp_path / "interrupted", tmp_path / "part", 1))
    assert "interrupted holds a part of its text: run the sharding to its end" in done.stdout
    foreign = args("gpt2")
    (tmp_path / "gpt2" / "manifest.json").unlink()
    for path in (tmp_path / "gpt2").glob("*.npy"):
        np.save(path, np.load(path) + np.uint16(40_000))
    last = trained / "checkpoints" / "model_last.pt"
    bad(
        [*foreign, "--max_steps", 30, "--resume", last],
        "takes tokens of bytes, the shards hold those of gpt2",
    )
    assert not list((tmp_path / "new").rglob("m*"))


def test_a_signal_ends_a_long_step_which_is_then_not_taken(shards, tmp_path):
    long = ["--total_batch_size", 32 * 100_000, "--micro_batch_size", 1, "--eval_every", 0]
    process = start(*train_args(shards, tmp_path, 30, *long), log=tmp_path / "log")
    said = lambda: (tmp_path / "log").read_text()  # noqa: E731
    run_until(process, lambda: "micro-steps 100000" in said())
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM and "stopped at step 0" in said()
    assert "epochs are many: see --max_steps" in said() and rows_written(tmp_path) == 0


def test_the_micro_batch_can_choose_itself(shards, trained, tmp_path):
    done = script(*train_args(shards, tmp_path, 20, "--micro_batch_size", "auto"))
    assert gap(tmp_path, trained) < 1e-5
    config = json.loads((tmp_path / "logs" / "config.json").read_text())["config"]
    assert config["micro_batch_size"] == 16  # the whole step fits
    assert re.search(r"auto: 16, by forecast .* GB of [0-9.]+ GB free\n", done.stdout)
