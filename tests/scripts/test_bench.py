import json
import subprocess
import sys

import pytest
from conftest import ROOT, bad, environment, write_commands

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
TINY = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 256 --micro_batch_size 1 --device cpu"
SHORT = "--repeats 1 --seconds 0"


@pytest.mark.slow
def test_training_is_measured_beside_a_peer(tmp_path):
    (tmp_path / "model.py").write_text(PEER)
    args = f"scripts/bench.py {TINY} {SHORT} --peer".split()
    # a Python of its own: it starts processes, which a fork of the tests' server may not
    command = [sys.executable, *args, tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
    row = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = row["measured"]["ours"], row["measured"]["nanogpt"]
    assert row["ratio"] == pytest.approx(ours["rate"] / theirs["rate"])
    assert row["memory_ratio"] == pytest.approx(ours["peak_bytes"] / theirs["peak_bytes"])
    assert all(10**8 < figures["peak_bytes"] < 10**10 for figures in (ours, theirs))
    assert row["options"]["n_layer"] == 2 and row["device"] == "cpu"


def test_a_peer_that_is_not_there_is_named_before_the_first_measurement(tmp_path):
    bad(["scripts/bench.py", "--peer", tmp_path], f"--peer {tmp_path} holds no model.py")


# bench.py prints its row last, train.py writes its log, pytest prints its summary
PYTHON = """echo "$*" >>"$LOG"
case "$1 $*" in
  *--log_dir*) mkdir -p runs/bench_gpu/logs
    echo '{"split": "val", "loss": 3.5}' >runs/bench_gpu/logs/metrics.jsonl ;;
  scripts/bench.py*) echo "number of parameters"; echo '{"unit": "tokens/s"}' ;;
  *pytest*) echo "1 failed, 2 passed"; exit 1 ;;
esac"""
ROW = {"unit": "tokens/s"}


@pytest.mark.parametrize(
    "args, last, code",
    [
        (["correctness"], [{"ok": False, "summary": "1 failed, 2 passed"}], 1),
        (["small", "--peer", "x", "--data", "y"], [*3 * [ROW], {"split": "val", "loss": 3.5}], 0),
        (["xl", "--micro_batch_size", "2"], 4 * [ROW], 0),
    ],
)
def test_a_call_for_gpus_ends_in_one_line_of_json(tmp_path, args, last, code):
    (tmp_path / "scripts").mkdir()
    script_ = tmp_path / "scripts" / "bench_gpu.sh"
    script_.write_text((ROOT / "scripts" / "bench_gpu.sh").read_text())
    env = write_commands(tmp_path, python=PYTHON) | {"LOG": str(tmp_path / "log")}
    done = subprocess.run(["bash", script_, *args], capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == last
    started = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    tests = [word for words in started for word in words if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in tests)
    for value in args[2::2]:  # of a flag
        assert any(value in words for words in started)


def test_without_a_gpu_a_call_for_gpus_starts_nothing(tmp_path):
    log = tmp_path / "log"
    env = write_commands(tmp_path, python='echo "$*" >>"$LOG"; exit 1') | {"LOG": str(log)}
    done = subprocess.run(["bash", ROOT / "scripts/bench_gpu.sh", "small"], env=env)
    assert done.returncode == 2 and "cuda.is_available" in log.read_text()
    assert "bench.py" not in log.read_text()
