import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    environment,
    kill,
    losses,
    rows_written,
    run_until,
    script,
    start,
    torchrun,
    train_args,
    weights,
)

from data.loader import Sequences, TokenStream, step_sequences
from data.shards import header
from training.checkpoint import load_checkpoint
from training.state import seed_step

GOLDEN_LOSS = 3.102  # of step 50, on the fixed documents of conftest.py


def same_weights(a, b):
    a, b = weights(a), weights(b)
    return all(torch.equal(a[name], b[name]) for name in a)


def test_killed_and_resumed_equals_never_stopped_to_the_bit(shards, trained, tmp_path):
    process = start(*train_args(shards, tmp_path, 20, "--save_every", 10), fork=False)
    run_until(process, lambda: rows_written(tmp_path) >= 13)
    kill(process)
    assert load_checkpoint(tmp_path / "checkpoints" / "model_last.pt")["step"] == 10
    script(*train_args(shards, tmp_path, 20, "--save_every", 10, "--resume", "auto"))
    assert losses(tmp_path) == losses(trained) and len(losses(trained)) == 20
    assert losses(tmp_path, "val") == losses(trained, "val")
    assert same_weights(tmp_path, trained)


@pytest.fixture(scope="module")
def halfway(shards, tmp_path_factory):
    """The same run as `trained`, stopped by SIGTERM somewhere before its end."""
    run = tmp_path_factory.mktemp("halfway")
    process = start(*train_args(shards, run, 20, "--save_every", 10), fork=False)
    run_until(process, lambda: rows_written(run) >= 7)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    return run


def copy(run, to):
    for path in run.rglob("*.*"):
        target = to / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())


def test_sigterm_finishes_the_step_saves_and_exits(shards, trained, halfway, tmp_path):
    step = load_checkpoint(halfway / "checkpoints" / "model_last.pt")["step"]
    assert step == max(losses(halfway)) and 7 <= step < 20
    copy(halfway, tmp_path)
    done = script(*train_args(shards, tmp_path, 20, "--save_every", 10, "--resume", "auto"))
    assert "--micro_batch_size was" not in done.stdout
    assert losses(tmp_path) == losses(trained) and same_weights(tmp_path, trained)


@pytest.mark.parametrize(("processes", "micro"), [(1, 16), (2, 2)])
def test_resumed_with_other_slicing_goes_on_alike(
    shards, trained, halfway, tmp_path, processes, micro
):
    copy(halfway, tmp_path)
    args = train_args(shards, tmp_path, 20, "--micro_batch_size", micro, "--resume", "auto")
    done = script(*args) if processes == 1 else torchrun(processes, *args)
    assert f"note: --micro_batch_size was 4 and is {micro}: sums" in done.stdout
    a, b = losses(tmp_path), losses(trained)
    assert max(abs(a[s] - b[s]) for s in b) < 1e-4 and len(a) == 20


def test_two_processes_with_accumulation_equal_one(shards, trained, tmp_path):
    args = train_args(shards, tmp_path, 20, "--micro_batch_size", 2)
    done = torchrun(2, *args, fork=False)
    if os.path.exists("/proc/self/stat"):
        seconds = re.search(r"the first step was done ([0-9.]+) s after the start", done.stdout)
        assert float(seconds[1]) > 0.1
    a, b = losses(tmp_path), losses(trained)
    assert max(abs(a[s] - b[s]) for s in range(1, 11)) < 1e-5
    val_a, val_b = losses(tmp_path, "val"), losses(trained, "val")
    assert max(abs(val_a[s] - val_b[s]) for s in val_b) < 1e-4


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_nothing(shards, tmp_path, kills):
    whole, run, rng = tmp_path / "whole", tmp_path / "run", random.Random(5)
    script(*train_args(shards, whole, 200, "--save_every", 0))
    args = train_args(shards, run, 200, "--save_every", 1, "--keep_last", 3, "--resume", "auto")
    for _ in range(kills):
        before = rows_written(run)
        process = start(*args)
        run_until(process, lambda n=before: rows_written(run) > n)
        time.sleep(rng.uniform(0, 0.15))
        kill(process)
        assert len(losses(run)) < 200  # the kill came before the end
        for path in (run / "checkpoints").glob("*.pt"):
            load_checkpoint(path)
    script(*args)
    assert losses(run) == losses(whole) and same_weights(run, whole)
    assert len(list((run / "checkpoints").glob("model_step_*.pt"))) == 3


def test_golden_run_reaches_the_recorded_loss(shards, tmp_path):
    script(*train_args(shards, tmp_path, 50))
    found = losses(tmp_path)
    assert abs(found[1] - math.log(257)) < 0.1
    assert found[50] == pytest.approx(GOLDEN_LOSS, rel=0.01)


def benchmark_args(folder):
    """Options for HellaSwag at every fifth step and LAMBADA at every tenth."""
    item = {"ctx": "A dog", "endings": ["a", "bb", "c c", "d"], "label": 0}
    (folder / "h.jsonl").write_text(json.dumps(item) + "\n")
    (folder / "l.jsonl").write_text('{"text": "the cat e"}\n' * 600)
    hellaswag = ["--hellaswag_every", 5, "--hellaswag_data", folder / "h.jsonl"]
    return [*hellaswag, "--lambada_every", 10, "--lambada_data", folder / "l.jsonl"]


def test_compiled_training_with_evaluation_and_samples_in_the_loop(shards, trained, tmp_path):
    tasks = benchmark_args(tmp_path)
    args = train_args(shards, tmp_path, 20, "--use_torch_compile", "--sample_every", 10, *tasks)
    assert "the first step compiles: a minute or so" in script(*args, timeout=400).stdout
    a, b = losses(tmp_path), losses(trained)
    assert max(abs(a[s] - b[s]) for s in b) < 1e-3
    assert (tmp_path / "logs" / "samples.txt").read_text().count("--- step") == 2
    again = script(*args, "--resume", "auto", "--max_steps", 21, timeout=400).stdout
    assert re.search(r"the first step compiles: \d+ s last time", again)


def test_dropout_resumes_to_the_bit(shards, tmp_path):
    extra = ["--dropout", 0.2, "--save_every", 5, "--keep_last", 2]
    script(*train_args(shards, tmp_path, 10, *extra))
    whole = losses(tmp_path)
    middle = tmp_path / "checkpoints" / "model_step_000005.pt"
    script(*train_args(shards, tmp_path, 10, *extra, "--resume", middle))
    assert losses(tmp_path) == whole and len(whole) == 10


def test_seeds_have_other_dropout():
    """PyTorch's generator for CPUs keeps 32 bits of a seed."""
    masks = []
    for seed, step, rank in ((1, 0, 0), (2, 0, 0), (1, 65_536, 0), (1, 0, 1), (1, 0, 0)):
        seed_step(seed, step, rank)
        masks.append(torch.rand(8).tolist())
    assert masks[0] == masks[4] and len({str(mask) for mask in masks}) == 4


def test_a_run_killed_before_its_first_checkpoint_begins_again_with_its_options(shards, tmp_path):
    run = tmp_path / "run"
    process = start(*train_args(shards, run, 60, "--eval_every", 0))
    run_until(process, lambda: rows_written(run) >= 3)
    kill(process)
    assert not list((run / "checkpoints").glob("*.pt"))
    folders = ("--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs")
    found = script("train.py", "--data_dir", shards, *folders, "--resume", "auto")
    assert f"beginning again with the options of {run}/logs/config.json" in found.stdout
    script(*train_args(shards, tmp_path / "whole", 60, "--eval_every", 0))
    assert losses(run) == losses(tmp_path / "whole")


def test_settings_not_given_come_from_the_checkpoint(shards, tmp_path):
    script(*train_args(shards, tmp_path, 4))
    last = tmp_path / "checkpoints" / "model_last.pt"
    script("train.py", "--resume", last, "--max_steps", 6)
    assert sorted(losses(tmp_path)) == list(range(1, 7))
    assert json.loads((tmp_path / "logs" / "config.json").read_text())["resumed_at_step"] == 4


def test_rows_tell_what_happened(trained):
    rows = [json.loads(line) for line in (trained / "logs" / "metrics.jsonl").open()]
    train = [row for row in rows if row["split"] == "train"]
    assert {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", "ms"} <= set(
        train[0]
    )
    assert train[-1]["tokens"] == 20 * 512 and train[-1]["mfu"] is None  # no peak known for a CPU
    val = [row for row in rows if row["split"] == "val"]
    assert [row["step"] for row in val] == [0, 10, 20]
    assert val[-1]["bits_per_byte"] == pytest.approx(val[-1]["loss"] / math.log(2), rel=0.02)


def test_a_best_checkpoint_alone_is_another_run_s_and_overwriting_removes_all(shards, tmp_path):
    script(*train_args(shards, tmp_path, 10, "--keep_last", 2, "--save_every", 4))
    folder = tmp_path / "checkpoints"
    (folder / "model_last.pt").unlink()
    for path in folder.glob("model_step_*.pt"):
        path.unlink()
    bad(train_args(shards, tmp_path, 4), "checkpoints of another run", tmp_path)
    old = load_checkpoint(folder / "model_best.pt")["run_id"]
    script(*train_args(shards, tmp_path, 4, "--overwrite", "--eval_every", 0))
    assert all(load_checkpoint(path)["run_id"] != old for path in folder.glob("*.pt"))


@pytest.mark.parametrize("dies_in", ["Logger", "write_run_config"])
def test_a_killed_run_that_overwrites_leaves_no_checkpoint_to_resume(shards, tmp_path, dies_in):
    run, killed = tmp_path / "run", tmp_path / "killed.py"
    args = train_args(shards, run, 4)
    script(*args)
    killed.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train\n"
        f"train.{dies_in} = lambda *args, **kwargs: os._exit(9)\ntrain.main()\n"
    )
    script(killed, *args[1:], "--overwrite", code=9)
    assert not list((run / "checkpoints").glob("*.pt"))
    assert "resumed at step" not in script(*args, "--resume", "auto", "--seed", 8).stdout
    rows = [json.loads(line) for line in (run / "logs" / "metrics.jsonl").open()]
    assert rows[-1]["step"] == max(losses(run)) == 4


def files(run):
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}


def bad(args, message, run=None):
    """One sentence, exit code 2, nothing written and nothing lost."""
    before = files(run) if run else None
    done = script(*args, code=2)
    assert message in done.stderr + done.stdout, done.stderr + done.stdout
    assert "Traceback" not in done.stderr + done.stdout
    if run:
        assert files(run) == before


def test_bad_settings_are_sentences(shards, trained, tmp_path):
    def args(*extra, data=shards):
        return train_args(data, tmp_path / "new", 4, *extra)

    bad(args(data=tmp_path / "nothing"), "there is no folder")
    bad(args(data=shards / "manifest.json"), "is a file; if it is text, make shards of it")
    bad(args("--total_batch_size", 500), "does not divide by")
    bad(args("--max_step", 5), "--max_steps")
    bad(args("--n_head", 5), "does not divide by n_head")
    bad(args("--device", "cuda:7"), "is not available")
    bad(args("--min_lr", 1), "--min_lr")
    bad(args("--resume", "auto", "--overwrite"), "give one of the two")
    bad(args("--resume", tmp_path / "no.pt"), "there is no checkpoint")
    bad(args("--resume", shards / "manifest.json"), "damaged or not a checkpoint")
    last = trained / "checkpoints" / "model_last.pt"
    bad(args("--resume", last, "--n_layer", 3), "another shape: n_layer was 2 and is 3; leave out")
    assert not (tmp_path / "new").exists()
    bad(train_args(shards, trained, 4), "checkpoints of another run", trained)
    bad(args("--log_dir", shards / "manifest.json" / "logs"), "the log in")
    assert not (tmp_path / "new").exists()
    over = train_args(shards, trained, 4, "--overwrite")
    bad([*over, "--log_dir", shards / "manifest.json" / "logs"], "the log in", trained)
    elsewhere = ["--checkpoint_dir", tmp_path / "new", "--resume", "auto"]
    bad([*train_args(shards, trained, 4), *elsewhere], "the log of another run", trained)


def test_a_dry_run_says_what_would_be_and_needs_no_data(tmp_path):
    done = script("train.py", "--dry_run", "--device", "cpu", "--data_dir", tmp_path / "none")
    assert "124,439,808 parameters; 19,073 steps" in done.stdout
    assert "= 32 x 16 x 1024 x 1 on cpu" in done.stdout
    assert f"\ndata_dir: {tmp_path / 'none'}\n" in done.stdout
    assert "there is no folder" in done.stdout
    second = {**environment(), "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    assert script("train.py", "--dry_run", "--device", "cpu", env=second).stdout == ""


def test_going_back_keeps_what_it_goes_back_to_and_what_comes_of_it(shards, tmp_path):
    args = [shards, tmp_path, 12]
    script(*train_args(*args, "--save_every", 4, "--keep_last", 3))
    numbered = tmp_path / "checkpoints" / "model_step_{:06d}.pt"
    back = ["--resume", str(numbered).format(4), "--max_lr", 1e-3, "--save_every", 2]
    script(*train_args(shards, tmp_path, 7, *back, "--keep_last", 2))
    kept = {p.name: load_checkpoint(p) for p in (tmp_path / "checkpoints").glob("model_step_*")}
    rates = {s["step"]: s["train_config"]["max_lr"] for s in kept.values()}
    assert rates == {6: 1e-3, 7: 1e-3}
    later = {p.name: load_checkpoint(p) for p in (tmp_path / "checkpoints").glob("model_kept_*")}
    assert {s["step"]: s["train_config"]["max_lr"] for s in later.values()} == {8: 3e-3, 12: 3e-3}


def test_what_a_run_is_begun_from_is_not_ignored(shards, trained, tmp_path):
    first = trained / "checkpoints/model_best.pt"
    named = tmp_path / "weights"  # a checkpoint under any name
    shutil.copy(first, named)
    begin = train_args(shards, tmp_path / "run", 3, "--init_from", named)
    assert f"weights of {named}" in script(*begin).stdout
    script(*begin, "--resume", "auto", "--max_steps", 4)  # the same command, to continue
    other = [*begin[:-1], first, "--resume", "auto", "--max_steps", 5]
    assert f"begun from {named}, not from {first}" in script(*other, code=2).stderr
    same = [*begin[:-1], f"{tmp_path}/run/../weights", "--resume", "auto", "--max_steps", 5]
    script(*same)
    modern = train_args(shards, tmp_path / "modern", 2, "--recipe", "modern")
    script(*modern)
    start = train_args(shards, tmp_path / "b", 2, "--init_from", tmp_path / "modern/checkpoints")
    assert "--recipe gpt2" in script(*start, "--recipe", "gpt2", code=2).stderr


def test_the_weights_to_begin_from_are_not_overwritten(shards, trained, tmp_path):
    run, link = tmp_path / "run", tmp_path / "link"
    shutil.copytree(trained, run)
    link.symlink_to(run / "checkpoints")
    for source in (run, link, link / "model_best.pt"):
        args = train_args(shards, run, 3, "--init_from", source, "--overwrite")
        bad(args, "the weights of --init_from; give another --checkpoint_dir", run)


def test_another_batch_from_a_checkpoint_is_warned_of_and_counted_right(shards, tmp_path):
    script(*train_args(shards, tmp_path, 4))
    done = script(*train_args(shards, tmp_path, 6, "--resume", "auto", "--total_batch_size", 1024))
    assert "--total_batch_size was 512" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").open()]
    tokens = {row["step"]: row["tokens"] for row in rows if row["split"] == "train"}
    assert [tokens[s] for s in (4, 5, 6)] == [2048, 3072, 4096]


def test_a_console_that_is_gone_does_not_end_the_run(shards, tmp_path):
    args = [sys.executable, *map(str, train_args(shards, tmp_path, 20))]
    pipe = subprocess.PIPE
    process = subprocess.Popen(args, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(120) == 0 and len(losses(tmp_path)) == 20


def test_benchmarks_during_training_are_logged_and_drawn(shards, tmp_path):
    tasks = benchmark_args(tmp_path)
    torchrun(2, *train_args(shards, tmp_path, 10, *tasks, "--micro_batch_size", 2))
    rows = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").open()]
    h, a = ([r for r in rows if r["split"] == task] for task in ("hellaswag", "lambada"))
    assert [r["step"] for r in h] == [0, 5, 10] and {"acc", "acc_norm"} <= set(h[0])
    assert [r["n"] for r in a] == [500, 500] and a[0]["perplexity"] > 1
    assert (tmp_path / "logs" / "log_plot.png").stat().st_size > 10_000


def test_bad_data_is_a_sentence_and_writes_nothing(shards, trained, tmp_path):
    def folder(name, train_bytes, manifest=None):
        path = tmp_path / name
        path.mkdir()
        (path / "train_000000.npy").write_bytes(train_bytes)
        (path / "val_000000.npy").write_bytes(tokens(np.zeros(100)))
        if manifest:
            entry = {"file": "train_000000.npy", "split": "train", "tokens": 5000, "sha256": ""}
            val = {"file": "val_000000.npy", "split": "val", "tokens": 100, "sha256": ""}
            (path / "manifest.json").write_text(json.dumps({"shards": [entry, val], **manifest}))
        return path

    def tokens(array):
        return header(".npy", len(array)) + array.astype("<u2").tobytes()

    def args(data, *extra):
        return train_args(data, tmp_path / "new", 4, *extra)

    as_bytes = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256}
    bad(args(folder("cut", tokens(np.zeros(5000))[:-1001])), "promises 5,000 tokens")
    bad(args(folder("ids", tokens(np.full(5000, 300)), as_bytes)), "token id 300")
    bad(args(folder("short", tokens(np.zeros(9)))), "too few for one sequence")
    foreign = folder("gpt2", tokens(np.zeros(5000)))
    last = trained / "checkpoints" / "model_last.pt"
    bad(args(foreign, "--resume", last), "tokens")
    assert not (tmp_path / "new").exists()


def test_the_micro_batch_can_choose_itself_and_a_trace_be_written(shards, trained, tmp_path):
    extra = ["--save_every", 10, "--micro_batch_size", "auto", "--profile"]
    done = script(*train_args(shards, tmp_path, 20, *extra))
    assert list(losses(tmp_path).values()) == pytest.approx(
        list(losses(trained).values()), abs=1e-5
    )
    config = json.loads((tmp_path / "logs" / "config.json").read_text())["train_config"]
    assert config["micro_batch_size"] == 16  # the whole step fits
    assert re.search(r"auto: 16 sequences .* GB of [0-9.]+ GB free\n", done.stdout)
    trace = json.loads((tmp_path / "logs" / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"ProfilerStep#3", "ProfilerStep#5", "aten::addmm"} <= names
    assert "ProfilerStep#6" not in names and "trace.json: open it" in done.stdout


def test_a_trace_of_a_run_that_is_too_short_is_no_error(shards, tmp_path):
    script(*train_args(shards, tmp_path, 2, "--profile"))


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_the_plain_modules_train_as_those_for_cpus(shards, tmp_path, recipe):
    args = ("--recipe", recipe, "--eval_every", 5, "--activation_checkpointing", "cheap")
    script(*train_args(shards, tmp_path / "cpu", 10, *args))
    plain = train_args(shards, tmp_path / "plain", 10, *args)
    script("tests/plain_train.py", *plain[1:])
    for split in ("train", "val"):
        fast, plain = losses(tmp_path / "cpu", split), losses(tmp_path / "plain", split)
        assert fast.keys() == plain.keys()
        assert all(abs(fast[step] - plain[step]) < 1e-5 for step in fast)


def test_a_token_outside_the_vocabulary_costs_no_step(shards, tmp_path):
    shutil.copytree(shards, tmp_path / "data")
    n = len(Sequences(TokenStream(shards, "train"), 32))
    at = 32 * int(step_sequences(3, 16, n, 7).min()) + 9  # of the fourth step
    tokens = np.load(shard := tmp_path / "data/train_000000.npy")
    tokens[at] = 300
    np.save(shard, tokens)
    done = script(*train_args(tmp_path / "data", tmp_path, 9), code=2)
    assert f"holds token id 300 at position {at:,}, outside" in done.stderr
    assert "data checks them all; saved at step 3, from where --resume auto" in done.stderr
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 3
