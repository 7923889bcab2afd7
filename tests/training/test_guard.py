"""Steps whose loss or gradient is not finite: skipped on all processes, counted, survived."""

import json
import shutil

import pytest
import torch
from conftest import (
    ROOT,
    environment,
    gap,
    losses,
    same_run,
    script,
    slow,
    torchrun,
    train_args,
    wandb_variables,
    weights,
)

from model.formats.checkpoint import load_checkpoint
from training.run import PATIENCE
from utils.logger import read_logged_config, read_metrics

FLOAT16 = ("--dtype", "float16")
NUMBERED = (*FLOAT16, "--save_every", 4, "--keep_last", 2, "--eval_every", 0)
# a loss that is finite in float16, while its scaled gradients are not
OVERFLOW = "1e30"


def faulty(processes, args, faults, factor="nan", code=0, **variables):
    """Run train.py where the loss of some forwards is multiplied by a factor."""
    variables = {"PYTHONPATH": str(ROOT), "FAULTS": faults, "FACTOR": factor} | variables
    env = environment() | variables
    return torchrun(processes, "tests/faulty_train.py", *args[1:], env=env, code=code)


@pytest.fixture(scope="module")
def overflowed(shards, tmp_path_factory):
    """8 steps in float16, of which the third of 4 micro-steps of step 3 overflows."""
    run = tmp_path_factory.mktemp("float16")
    faulty(1, train_args(shards, run, 8, *NUMBERED), "0:10", OVERFLOW)
    return run


def test_an_overflow_in_float16_lowers_the_scale_which_a_resumed_run_keeps(
    overflowed, shards, tmp_path
):
    scales = {row["step"]: row["scale"] for row in read_metrics(overflowed)["train"]}
    assert scales == {n: 2.0**10 if n < 3 else 2.0**9 for n in range(1, 9) if n != 3}
    fourth = overflowed / "checkpoints/model_step_000004.pt"
    script(*train_args(shards, tmp_path, 8, *NUMBERED, "--resume", fourth))
    assert same_run(tmp_path, overflowed)
    for run in (tmp_path, overflowed):
        saved = load_checkpoint(run / "checkpoints/model_last.pt")
        assert saved["step"] == 8 and saved["scaler"]["scale"] == 2.0**9


@pytest.mark.parametrize(
    "sharding, flags, fault, factor",
    [
        # two micro-steps per step: call 5 is the second of step 3
        ("none", (), "1:5", "nan"),
        ("zero2", FLOAT16, "1:5", OVERFLOW),
        slow("zero3", FLOAT16, "1:5", OVERFLOW),
        # both have the same data, four micro-steps per step
        ("zero2", (*FLOAT16, "--tensor_parallel", 2), "1:10", OVERFLOW),
    ],
)
def test_a_bad_loss_on_one_process_skips_the_step_on_all(
    overflowed, shards, tmp_path, sharding, flags, fault, factor
):
    args = train_args(shards, tmp_path, 8, *flags, "--sharding", sharding, "--eval_every", 0)
    faulty(2, args, fault, factor)
    (skipped,) = read_metrics(tmp_path)["skipped"]
    assert skipped["step"] == 3 and len(skipped["sequences"]) == 16
    state = load_checkpoint(tmp_path / "checkpoints" / "model_last.pt")
    assert all(s["step"] == 7 for s in state["optimizer"].values()) and state["step"] == 8
    assert all(torch.isfinite(w).all() for w in weights(tmp_path).values())
    assert gap(tmp_path, overflowed) < 5e-3


def test_bad_steps_in_a_row_end_the_run_with_a_checkpoint_and_every_row_sent(shards, tmp_path):
    variables = wandb_variables(tmp_path)
    faults = " ".join(f"0:{call}" for call in range(4 * 6, 4 * 6 + 4 * PATIENCE))
    args = train_args(shards, tmp_path, 13, "--save_every", 7, "--eval_every", 0)
    (done,) = faulty(1, [*args, "--wandb"], faults, code=2, **variables)
    assert "5 steps in a row had no finite loss" in done.stderr and "Traceback" not in done.stderr
    assert "continue from step 11 with " in done.stderr  # its file was written first
    last = load_checkpoint(tmp_path / "checkpoints/model_last.pt")
    assert (last["step"], last["bad_steps"]) == (11, 0)
    arrived = json.loads((tmp_path / "arrived").read_text())
    assert arrived == [1, *range(1, 7 + PATIENCE)]
    # the fault was not in the data: without it the run resumes as usual
    script(*args, "--resume", "auto", "--no_wandb")
    assert sorted(losses(tmp_path)) == [*range(1, 7), 12, 13]


def test_an_automatic_micro_batch_is_halved_until_it_fits_on_all(shards, tmp_path):
    """Each of two processes takes 12 sequences in a step, which 6 and 3 divide; one fails at 4."""
    batch = ("--total_batch_size", 24 * 32, "--micro_batch_size", "auto", "--eval_every", 0)
    args = train_args(shards, tmp_path, 3, *batch)
    said = faulty(2, args, "", MEMORY="1:3")[0].stdout
    assert "micro-batch of 12: 6 from" in said and "micro-batch of 6: 3 from here on" in said
    assert "micro_batch_size" in read_logged_config(tmp_path / "logs")["derived"]
    # the run is that of this micro-batch, to the bit
    given = train_args(shards, tmp_path / "given", 3, *batch, "--micro_batch_size", 3)
    faulty(2, given, "")
    assert same_run(tmp_path, tmp_path / "given")
    saved = load_checkpoint(tmp_path / "checkpoints/model_last.pt")
    assert saved["config"]["micro_batch_size"] == 3
    (done,) = faulty(1, train_args(shards, tmp_path / "no", 3, *batch), "", code=2, MEMORY="0:0")
    assert "out of memory with a micro-batch of one sequence" in done.stderr


def test_a_model_is_sampled_and_scored_in_float16(trained, shards, tmp_path):
    model = ("--checkpoint", trained, "--device", "cpu", "--dtype")
    prompt = ("--temperature", 0, "--prompt", "The ")
    texts = {script("sample.py", *model, x, *prompt).stdout for x in ("float32", "float16")}
    assert len(texts) == 1
    val = ("--tasks", "val", "--data_dir", shards, "--val_tokens", 4096)
    script("evaluate.py", *model, "float16", *val, "--out", tmp_path / "out.json")
    nats = json.loads((tmp_path / "out.json").read_text())["results"][0]["value"]
    assert 0 < abs(nats - losses(trained, "val")[20]) < 1e-3


def test_weights_without_a_finite_loss_do_not_replace_a_good_checkpoint(shards, trained, tmp_path):
    """At a rate that ruins them; the error names the command that continues."""
    run = shutil.copytree(trained, tmp_path / "run")
    path = run / "checkpoints/model_last.pt"
    good = weights(trained)
    continued = f"continue from step 20 with python train.py --resume {path} --max_lr"
    for last, save_every in ((40, 0), (23, 1)):
        flags = ("--resume", "auto", "--max_lr", 1e20, "--save_every", save_every)
        args = train_args(shards, run, last, *flags, "--eval_every", 0)
        (done,) = torchrun(1, *args, code=2)
        assert continued in done.stderr
        assert load_checkpoint(path)["step"] == 20
        assert all(torch.equal(w, good[name]) for name, w in weights(run).items())
    command = continued.split("python ")[1].split()
    script(*command, 3e-3, "--max_steps", 22)  # as advised, at a rate that suits the model
