"""Each process draws, reads and writes its own rows alone, and the numbers are those of one."""

import pytest
import torch
from conftest import run_ranks, script, slow, torchrun, train_args

from model.config import GPTConfig
from model.formats.checkpoint import Float32Rows, load_checkpoint, rows_checksum, split_float32
from model.gpt import GPT
from model.initial_weights import build_without_weights, new_model
from utils.distributed import Process

PEAK = """
import os, sys
sys.path.insert(0, os.getcwd())
import train
from training.run import Run

def peak_bytes():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])

def build_model(*arguments):
    global before
    before = peak_bytes()
    return build(*arguments)

def open_log(run, shape):  # the model has its weights, and no step is taken
    print("grown by", peak_bytes() - before, flush=True)
    os._exit(0)

build = train.build_model
train.build_model = build_model
Run.open_log = open_log
train.main()
"""


def test_a_start_takes_the_memory_of_a_share_and_not_of_the_model(shards, tmp_path):
    program = tmp_path / "peak.py"
    program.write_text(PEAK)
    shape = ("--n_layer", 24, "--n_embd", 512, "--sharding", "zero3")
    args = train_args(shards, tmp_path, 2, *shape)
    config = GPTConfig(n_layer=24, n_embd=512, n_head=2, vocab_size=257, block_size=32)
    model_bytes = 4 * build_without_weights(GPT, config).num_parameters()  # 300 MB
    for rank in run_ranks([[program, *args[1:]]] * 2):
        (line,) = [line for line in rank.stdout.splitlines() if line.startswith("grown by")]
        assert 0.3 * model_bytes < int(line.split()[-1]) < 0.7 * model_bytes


@pytest.mark.parametrize(
    "flags", ["--sharding zero3", slow("--tensor_parallel 2 --sharding zero2")]
)
@pytest.mark.parametrize("recipe", ["gpt2", slow("modern")])
def test_processes_begin_with_the_weights_of_one_and_write_its_file(
    shards, tmp_path, flags, recipe
):
    one, four = tmp_path / "one", tmp_path / "four"
    # the step changes no weight
    same = ("--recipe", recipe, "--max_lr", "1e-60", "--eval_every", 0)
    script(*train_args(shards, one, 1, *same))
    torchrun(4, *train_args(shards, four, 1, *same, "--micro_batch_size", 2, *flags.split()))
    ours, theirs = (load_checkpoint(run / "checkpoints/model_last.pt") for run in (four, one))
    for part in ("model", "model_low"):
        assert ours[part].keys() == theirs[part].keys()
        for name, x in ours[part].items():
            assert torch.equal(x, theirs[part][name])
        assert ours["checksums"][part] == theirs["checksums"][part]


def test_any_rows_of_a_new_weight_can_be_drawn_alone():
    config = GPTConfig(n_layer=2, n_embd=16, n_head=2, vocab_size=300, block_size=32)
    _, weights = new_model(GPT, config, seed=3)
    name = "transformer.wte.weight"
    whole = weights[name][torch.arange(320)]
    rows = torch.tensor([319, 0, 100, 101, 63, 64])
    assert torch.equal(weights[name][rows], whole[rows])
    assert not torch.equal(whole, new_model(GPT, config, seed=4)[1][name][torch.arange(320)])
    first, second = (f"transformer.h.{layer}.mlp.c_proj.weight" for layer in range(2))
    assert not torch.equal(weights[first][rows[1:2]], weights[second][rows[1:2]])


def test_processes_compute_parts_of_one_checksum_that_notices_rows_that_change_places(monkeypatch):
    weight = torch.randn(10, 4)
    tensors = {"weight": weight, "gain": torch.randn(4), "step": torch.tensor(3.0)}
    whole = rows_checksum(tensors)
    monkeypatch.setattr(Process, "merge", lambda process, sums: sums)
    thirds = [Process(rank, 3, torch.device("cpu")) for rank in range(3)]
    assert whole == sum(rows_checksum(tensors, process) for process in thirds)
    assert whole != rows_checksum(tensors | {"weight": weight.flip(0)})
    halves = {name: Float32Rows(*split_float32(x)) for name, x in tensors.items() if x.dim()}
    assert rows_checksum(halves) == rows_checksum({name: tensors[name] for name in halves})
