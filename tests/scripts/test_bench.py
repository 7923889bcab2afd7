import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, script

import bench
from bench import BenchConfig
from config import ConfigError
from scripts import bench_gpu
from scripts.bench.measure import MeasurementError
from scripts.bench.report import format_row, measure_row

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
    command = ["bash", "scripts/bench_gpu.sh", "--tiny", "--repeats", "1"]
    here = {"PYTHONPATH": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment() | here, text=True, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert 0 < row["share_of_matrix"] < 2
    assert row["what"] == "training tiny, 64 x 64, auto"


def test_the_script_for_gpus_trains_on_one_and_on_all_gpus(monkeypatch, tmp_path):
    (tmp_path / "model.py").touch()
    command = ["bench_gpu.py", "--model_types", "gpt2", "gpt2-xl", "--peer", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    jobs = list(bench_gpu.list_jobs(bench_gpu.parse_args()))
    assert [(name, job.kind, job.sharding, job.processes) for name, job in jobs] == [
        (prefix + suffix, kind, sharding, processes)
        for prefix in ("gpt2", "gpt2-xl")
        for suffix, kind, sharding, processes in (
            ("", "train", "none", 1),
            (" by nanoGPT", "train_nanogpt", "none", 1),
            ("", "train", "none", 2),
            ("", "train", "zero2", 2),
        )
    ]


def test_a_failure_at_a_quarter_of_the_micro_batch_is_an_error(monkeypatch):
    sizes = []

    def measured(title, job, peer, repeats):
        sizes.append(job.batch)
        if job.batch > 16:
            raise MeasurementError
        return title

    monkeypatch.setattr(bench_gpu.report, "measure_row", measured)
    job = bench_gpu.Job("train", bench_gpu.TINY)
    assert bench_gpu.measure_at(64, "tiny", job, 1) == "training tiny, 16 x 64, float32"
    with pytest.raises(MeasurementError):
        bench_gpu.measure_at(256, "tiny", job, 1)
    assert sizes == [64, 32, 16, 256, 128, 64]


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
