import math
import random

import torch
from conftest import ROOT, environment, losses, script, torchrun, train_args, weights

from training.checkpoint import load_checkpoint
from training.guard import PATIENCE, WINDOW, Guard
from utils.metrics import read_metrics


def with_faults(faults):
    return {**environment(), "PYTHONPATH": str(ROOT), "FAULTS": faults}


def test_steps_that_are_not_finite_are_skipped_and_counted():
    guard = Guard(None, {})
    assert guard.check(1.0, 1.0) is None
    for loss, norm in ((math.nan, 1.0), (1.0, math.inf), (-math.inf, math.nan)):
        assert "loss" in guard.check(loss, norm)
    assert guard.in_a_row == guard.state["in_a_row"] == 3
    assert guard.check(1e30, 1e30) is None  # no --skip_spikes
    assert guard.in_a_row == 0


def test_spikes_are_skipped_once_the_window_is_full():
    rng = random.Random(0)
    guard = Guard(6.0, {})
    assert guard.check(50.0, 1.0) is None
    for _ in range(WINDOW):
        assert guard.check(rng.gauss(3, 0.1), rng.gauss(1, 0.1)) is None
    assert "loss 4 is" in guard.check(4.0, 1.0)
    assert "grad_norm 2 is" in guard.check(3.0, 2.0)
    assert guard.check(1.0, 0.1) is None  # far below the mean


def test_a_guard_resumes_from_its_state():
    rng = random.Random(0)
    steps = [(rng.gauss(3, 0.1), rng.gauss(1, 0.3)) for _ in range(3 * WINDOW)]
    whole, first = Guard(2.0, {}), Guard(2.0, {})
    expected = [whole.check(*step) for step in steps]
    found = [first.check(*step) for step in steps[:200]]
    second = Guard(2.0, first.state)
    found += [second.check(*step) for step in steps[200:]]
    assert found == expected and any(found) and second.state == whole.state


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


def test_bad_steps_in_a_row_end_the_run_with_a_checkpoint_before_them(shards, tmp_path):
    faults = " ".join(f"0:{call}" for call in range(4 * 6, 4 * 6 + 4 * PATIENCE))
    args = train_args(shards, tmp_path, 20, "--save_every", 7)[1:]
    done = script("tests/faulty_train.py", *args, code=2, env=with_faults(faults))
    assert "5 steps in a row had no finite loss" in done.stderr and "Traceback" not in done.stderr
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 6
    # the fault was not in the data: without it the run resumes as usual
    script(*train_args(shards, tmp_path, 20, "--save_every", 7, "--resume", "auto"))
    assert sorted(losses(tmp_path)) == list(range(1, 21))
