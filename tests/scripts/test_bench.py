import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, script

import bench
from config import BenchConfig, ConfigError
from scripts.bench.measure import MeasurementError
from scripts.bench.report import figures, line

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
    config = BenchConfig("train", peer=tmp_path, repeats=3, device="cpu")
    row = figures(bench.small_training(config, fast=False), 3)
    ours, theirs, matrix, copy = row["measured"].values()
    assert list(row["measured"]) == ["train", "train_nanogpt", "matrix", "copy"]
    assert ours["lowest"] <= ours["rate"] <= ours["highest"]
    assert row["ratio"] == pytest.approx(ours["rate"] / theirs["rate"])
    assert 0 < row["ratio"] < 1  # an embedding alone is faster than four layers
    assert 0 < row["share_of_matrix"] < 2  # 1, but for what else the machine does meanwhile
    assert all(10**8 < found["peak_bytes"] < 10**10 for found in (ours, theirs))
    assert matrix["rate"] > 10**9 and copy["rate"] > 10**8
    assert row["mfu"] is None and "x the speed" in line(row)


def test_a_peer_that_is_none_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no model.py"):
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


def test_the_script_for_gpus_runs_here_without_most_requirements(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "model.py").write_text(PEER)
    command = ["bash", "scripts/bench_gpu.sh", "--tiny", "--repeats", "1", "--peer", tmp_path]
    here = {"PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | here, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "train.py itself: not measured, it needs tyro" in done.stdout
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert 0 < row["share_of_matrix"] < 2
    assert row["ratio"] == row["measured"]["train"]["rate"] / row["nanogpt"]["rate"]
    assert row["what"] == "training tiny, 64 x 64, auto"


def test_the_script_for_gpus_tries_what_the_compiler_does_only_if_asked(monkeypatch):
    bench_gpu = importlib.import_module("scripts.bench_gpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked = argparse.Namespace(model_types=["gpt2", "gpt2-xl"], peer=Path("peer"), tiny=False)
    runs = list(bench_gpu.runs(asked))
    assert [(name, job.sharding, job.processes, peer) for name, job, _, peer in runs] == [
        ("gpt2", "none", 1, asked.peer),
        ("gpt2, max-autotune", "none", 1, None),
        ("gpt2, CUDA graphs", "none", 1, None),
        ("gpt2", "none", 2, None),
        ("gpt2", "zero2", 2, None),
        ("gpt2-xl", "none", 1, asked.peer),
        ("gpt2-xl", "none", 2, None),
        ("gpt2-xl", "zero2", 2, None),
    ]
    assert [bool(variables) for _, _, variables, _ in runs] == [False, True, True] + 5 * [False]
    heeded = "from torch._inductor import config as c; print(c.max_autotune, c.triton.cudagraphs)"
    done = subprocess.run(
        [sys.executable, "-c", heeded],
        env=environment() | runs[1][2] | runs[2][2],
        text=True,
        capture_output=True,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_what_fails_at_a_quarter_of_the_micro_batch_is_not_for_want_of_memory():
    bench_gpu = importlib.import_module("scripts.bench_gpu")
    tried = []

    def measured(batch):
        tried.append(batch)
        if batch > 16:
            raise MeasurementError
        return "measured"

    assert bench_gpu.first_that_fits(64, measured) == ("measured", 16)
    with pytest.raises(MeasurementError):
        bench_gpu.first_that_fits(256, measured)
    assert tried == [64, 32, 16, 256, 128, 64]


@pytest.mark.slow
def test_the_script_for_gpus_times_train_itself():
    done = subprocess.run(
        ["bash", "scripts/bench_gpu.sh", "--tiny", "--repeats", "1"],
        cwd=ROOT,
        env=environment() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        text=True,
        capture_output=True,
        timeout=400,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["train.py"]["rate"] > 0 and 0 <= report["train.py"]["data_share"] < 0.01


def test_eight_readers_are_faster_than_eight_gpus_learn(tmp_path):
    found = figures(bench.reading(tmp_path), 2)["measured"]["read"]
    assert found["rate"] > 8 * 700_000  # 124M at 60 % of an H100's peak


def test_the_report_is_a_file_and_the_last_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "figures", lambda comparison, repeats: {"what": comparison.what})
    monkeypatch.setattr(bench, "line", lambda row: row["what"])
    out = tmp_path / "logs" / "bench.json"
    bench.main(BenchConfig("sample", device="cpu", out=out))
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == json.loads(out.read_text())
    assert len(json.loads(last)["hardware"]["device"]) > len("cpu ")
    assert [row["what"] for row in json.loads(last)["rows"]] == [
        "sampling gpt2, batch 1, bfloat16",
        "sampling gpt2, batch 8, bfloat16",
    ]
