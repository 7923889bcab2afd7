import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, script

import bench
from bench import BenchConfig
from scripts.bench import gpu
from scripts.bench.report import format_row, measure_row
from scripts.bench_gpu import CALLS
from utils.errors import UserError

PEER = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print("a peer that speaks")
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)

    def forward(self, idx, targets):
        logits = self.wte(idx) @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_training_is_measured_in_turn_with_a_peer_and_its_limits(tmp_path):
    (tmp_path / "model.py").write_text(PEER)
    config = BenchConfig("train", peer=tmp_path, device="cpu")
    _, small, _ = bench.compare_training(config, tmp_path)
    row = measure_row(*small, 1)
    ours, theirs, matrix, copy = row["measured"].values()
    assert list(row["measured"]) == ["train", "train_nanogpt", "matrix", "copy"]
    assert ours["lowest"] <= ours["rate"] <= ours["highest"]
    assert row["ratio"] == pytest.approx(ours["rate"] / theirs["rate"])
    assert 0 < row["ratio"] < 1  # an embedding alone is faster than four layers
    assert 0 < row["share_of_matrix"] < 2  # 1, but for what else the machine does meanwhile
    assert all(10**8 < found["peak_bytes"] < 10**10 for found in (ours, theirs))
    assert matrix["rate"] > 10**9 and copy["rate"] > 10**8
    assert row["mfu"] is None and "x the speed" in format_row(row)


def test_a_peer_that_is_none_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="no model.py"):
        bench.main(BenchConfig("train", peer=tmp_path))
    done = script("bench.py", "train", "--repeats", 0, code=2)
    assert "--repeats 0 must be at least 1" in done.stderr


# lets the modules of requirements.txt that the GPU script does without be missing
WITHOUT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *args):
        here = name.partition(".")[0] not in ("tyro", "datasets", "safetensors", "matplotlib")
        return self.finder.find_spec(name, *args) if here else None

sys.meta_path = [Without(finder) for finder in sys.meta_path]
"""


# compiling takes half a minute
UNCOMPILED = "\nimport torch\ntorch.compile = lambda function, **options: function\n"


@pytest.fixture
def bench_gpu(tmp_path):
    """Start scripts/bench_gpu.sh without what GPU machines lack; the rows are in the file `out`."""
    out = tmp_path / "bench_gpu.jsonl"
    here = {"PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    here["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")

    def start(*args, before=UNCOMPILED):
        (tmp_path / "sitecustomize.py").write_text(WITHOUT + before)
        command = ["bash", "scripts/bench_gpu.sh", *map(str, args), "--tiny", "--out", out]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=environment() | here, **pipes)

    return start, out


def rows_of(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_for_gpus_that_is_cut_keeps_what_it_measured(bench_gpu, call):
    start, out = bench_gpu
    process = start(call)
    first = json.loads(process.stdout.readline())
    process.kill()
    process.communicate()
    assert rows_of(out) == [first]
    assert first["call"] == call and first["item"] == next(iter(CALLS[call]))
    assert first["seconds"] > 0 and "error" not in first


def test_rows_for_gpus_say_why_there_is_no_figure(bench_gpu, tmp_path):
    start, out = bench_gpu
    (tmp_path / "model.py").write_text("raise ImportError('of another project')")
    items = ("nanogpt", "learn_gpt2", "optimizers")
    process = start("small", "--peer", tmp_path, "--items", *items)
    assert process.communicate()[0].splitlines() and process.returncode == 1
    failed, skipped, measured = rows_of(out)
    assert failed["error"] == "ImportError: of another project"
    assert skipped["skipped"] == "no --data"
    assert measured["modern_Muon"]["ms"] > 0 and measured["gpt2_AdamW"]["ms"] > 0
    process = start("small", "--seconds", -1, "--items", "step")
    process.communicate()
    assert process.returncode == 0 and rows_of(out)[-1]["skipped"] == "--seconds -1 are over"
    process = start("small", "--items", "stepp")
    assert "--items stepp: small has step nanogpt" in process.communicate()[1]


def test_a_result_that_is_wrong_is_not_ok(bench_gpu):
    start, out = bench_gpu
    fault = f"""
sys.path.insert(0, {str(ROOT)!r})
from model import loss

def wrong(logits, *rest):
    logits[0, 0] += 0.1
    return right(logits, *rest)

right = loss.cross_entropy_
loss.HeadCrossEntropy.cross_entropy_ = staticmethod(wrong)
"""
    process = start("correctness", "--items", "head", before=UNCOMPILED + fault)
    process.communicate()
    assert process.returncode == 1 and rows_of(out)[0]["ok"] is False


@pytest.mark.slow
@pytest.mark.parametrize("call", list(CALLS))
def test_every_item_for_gpus_runs_on_a_cpu(bench_gpu, shards, tmp_path, call):
    start, out = bench_gpu
    (tmp_path / "model.py").write_text(PEER)
    options = ["--peer", tmp_path, "--data", shards] if call == "small" else []
    process = start(call, *options, before="")
    _, errors = process.communicate()
    rows = {row["item"]: row for row in rows_of(out)}
    assert process.returncode == 0, errors
    assert list(rows) == list(CALLS[call])
    skipped = {name for name, row in rows.items() if "skipped" in row}
    assert skipped == ({"host_syncs"} if call == "correctness" else set())
    assert all(row.get("ok", True) for row in rows.values())


def test_the_micro_batch_is_halved_until_it_fits(monkeypatch, tmp_path):
    sizes = []

    def measured(bench, job):
        sizes.append(job.batch)
        if job.batch > 16:
            raise torch.OutOfMemoryError
        return {"batch": job.batch}

    monkeypatch.setattr(gpu, "measure_job", measured)
    bench = gpu.Bench(torch.device("cpu"), tmp_path, tmp_path, True, None, None)
    found = gpu.measure_training(bench, bench.job("train"))
    assert sizes == [64, 32, 16] and found["batch"] == 16 and found["forecast_bytes"] > 0


@pytest.mark.slow
def test_eight_readers_are_faster_than_eight_gpus_learn(tmp_path):
    found = measure_row(*bench.compare_reading(tmp_path), 2)["measured"]["read"]
    assert found["rate"] > 8 * 700_000  # 124M at 60 % of an H100's peak


def test_the_report_is_a_file_and_the_last_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.report, "measure_row", lambda title, *_: {"what": title})
    monkeypatch.setattr(bench.report, "format_row", lambda row: row["what"])
    out = tmp_path / "logs" / "bench.json"
    bench.main(BenchConfig("sample", device="cpu", out=out))
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == json.loads(out.read_text())
    assert len(json.loads(last)["hardware"]["device"]) > len("cpu ")
    assert [row["what"] for row in json.loads(last)["rows"]] == [
        "sampling gpt2, batch 1, bfloat16",
        "sampling gpt2, batch 8, bfloat16",
    ]
