import json

import pytest
from conftest import ROOT, environment, gap, losses, script, torchrun, train_args

from training.checkpoint import load_checkpoint
from utils.logger import read_metrics

FLOAT16 = ("--dtype", "float16", "--save_every", 6, "--keep_last", 2)
# the third of 4 micro-steps of step 3: a loss that is finite, its scaled gradients are not
OVERFLOW = {**environment(), "PYTHONPATH": str(ROOT), "FAULTS": "0:10", "FACTOR": "1e30"}


@pytest.fixture(scope="module")
def overflowed(shards, tmp_path_factory):
    run = tmp_path_factory.mktemp("float16")
    script("tests/faulty_train.py", *train_args(shards, run, 12, *FLOAT16)[1:], env=OVERFLOW)
    return run


def test_float16_trains_as_float32_does(shards, tmp_path):
    for dtype in ("float32", "float16"):
        script(*train_args(shards, tmp_path / dtype, 60, "--dtype", dtype))
    ours, exact = (losses(tmp_path / dtype) for dtype in ("float16", "float32"))
    assert exact[60] < exact[1] - 1
    assert abs(sum(ours[n] - exact[n] for n in range(41, 61)) / 20) < 0.02


def test_an_overflow_is_skipped_counted_and_survived(overflowed):
    rows = read_metrics(overflowed / "logs")
    assert [row["step"] for row in rows["skipped"]] == [3]
    scales = {row["step"]: row["scale"] for row in rows["train"]}
    assert scales == {n: 2.0**10 if n < 3 else 2.0**9 for n in range(1, 13) if n != 3}
    saved = load_checkpoint(overflowed / "checkpoints/model_last.pt")
    assert saved["step"] == 12 and saved["scaler"]["scale"] == 2.0**9
    assert all(s["step"] == 11 for s in saved["optimizer"].values())


def test_a_resumed_run_keeps_the_scale_and_equals_the_whole_one(overflowed, shards, tmp_path):
    sixth = overflowed / "checkpoints/model_step_000006.pt"
    script(*train_args(shards, tmp_path, 12, *FLOAT16, "--resume", sixth))
    assert losses(tmp_path) == losses(overflowed)
    states = [load_checkpoint(run / "checkpoints/model_last.pt") for run in (tmp_path, overflowed)]
    assert states[0]["scaler"] == states[1]["scaler"]
    for name, weight in states[0]["model"].items():
        assert weight.equal(states[1]["model"][name])


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("none", "zero1", "zero3")]


@pytest.mark.parametrize("sharding", ["zero2", *SLOW])
def test_an_overflow_on_one_process_is_skipped_on_all(overflowed, shards, sharding, tmp_path):
    # two micro-steps a step: call 5 is the second of step 3
    args = train_args(shards, tmp_path, 12, *FLOAT16, "--sharding", sharding)[1:]
    torchrun(2, "tests/faulty_train.py", *args, env={**OVERFLOW, "FAULTS": "1:5"})
    assert [row["step"] for row in read_metrics(tmp_path / "logs")["skipped"]] == [3]
    assert gap(tmp_path, overflowed) < 2e-3
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["scaler"]["scale"] == 2.0**9


def test_a_model_is_sampled_and_scored_in_float16(trained, shards, tmp_path):
    said, losses = [], []
    for dtype in ("float32", "float16"):
        options = ("--checkpoint", trained, "--dtype", dtype, "--device", "cpu")
        limits = ("--temperature", 0, "--max_new_tokens", 20)
        said.append(script("sample.py", *options, "--prompt", "The ", *limits).stdout)
        out = tmp_path / dtype
        script("evaluate.py", *options, "--tasks", "val", "--data_dir", shards, "--out", out)
        losses.append(json.loads(out.read_text())["results"][0]["value"])
    assert said[0] == said[1] and 0 < abs(losses[1] - losses[0]) < 1e-3
