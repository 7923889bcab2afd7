import math

import torch
from conftest import ROOT, environment, losses, script, torchrun, train_args, weights

from training.checkpoint import load_checkpoint
from training.run import PATIENCE, TrainState, reason_to_skip
from utils.logger import read_metrics


def with_faults(faults):
    return {**environment(), "PYTHONPATH": str(ROOT), "FAULTS": faults}


def test_steps_that_are_not_finite_are_skipped_and_counted():
    state = TrainState.start(None)
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)):
        state.advance(8, reason_to_skip(loss, norm))
    assert state.bad_steps == TrainState.start(state.to_checkpoint()).bad_steps == 3
    state.advance(8, reason_to_skip(1e30, 1e30))
    assert (state.bad_steps, state.step, state.tokens) == (0, 4, 32)


def test_a_bad_loss_on_one_process_skips_the_step_on_all(shards, tmp_path):
    # two micro-steps per step: call 5 on rank 1 is the second of step 3
    args = train_args(shards, tmp_path, 8)[1:]
    torchrun(2, "tests/faulty_train.py", *args, env=with_faults("1:5"))
    rows = read_metrics(tmp_path / "logs")
    assert [row["step"] for row in rows["train"]] == [1, 2, 4, 5, 6, 7, 8]
    (skipped,) = rows["skipped"]
    assert skipped["step"] == 3 and len(skipped["sequences"]) == 16
    state = load_checkpoint(tmp_path / "checkpoints" / "model_last.pt")
    assert all(s["step"] == 7 for s in state["optimizer"].values()) and state["step"] == 8
    assert all(torch.isfinite(w).all() for w in weights(tmp_path).values())


def test_bad_steps_in_a_row_end_the_run_with_a_checkpoint(shards, tmp_path):
    faults = " ".join(f"0:{call}" for call in range(4 * 6, 4 * 6 + 4 * PATIENCE))
    args = train_args(shards, tmp_path, 20, "--save_every", 7)[1:]
    done = script("tests/faulty_train.py", *args, code=2, env=with_faults(faults))
    assert "5 steps in a row had no finite loss" in done.stderr and "Traceback" not in done.stderr
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 11
    # the fault was not in the data: without it the run resumes as usual
    script(*train_args(shards, tmp_path, 20, "--save_every", 7, "--resume", "auto"))
    assert sorted(losses(tmp_path)) == [*range(1, 7), *range(12, 21)]
