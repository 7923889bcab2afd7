import re
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, environment, script
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.dry_run import Hardware, largest_micro_batch
from training.forecast import forecast_memory

from config import TrainConfig, parse_recipe
from model import cpu
from model.config import GPTConfig
from model.gpt import GPT
from tests.training import scaling
from training.optim import make_optimizers
from training.parallel import apply_activation_checkpointing
from utils.distributed import free_memory
from utils.errors import UserError

# prints the peak memory of a command, from a process too small to count
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
    "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)
RECIPES = ("gpt2", "modern", "speedrun,conv=3", "llama", "llama,n_kv_head=2,n_inner=100")
WINDOWS = ("modern,window_blocks=1", "modern,n_kv_head=2,qk_norm=False", "speedrun,conv=3")
SHAPE = {"block_size": 256, "vocab_size": 300, "n_layer": 4, "n_head": 4, "n_embd": 256}


def need(recipe="gpt2", accumulation=2, world_size=1, nodes=1, **changes):
    shape = GPTConfig(**SHAPE, **parse_recipe(recipe).shape(256, 300))
    tokens = 16 * 256 * accumulation * world_size
    run = {"micro_batch_size": 16, "block_size": 256, "total_batch_size": tokens, **changes}
    config = TrainConfig(recipe=recipe, **run)
    return forecast_memory(config, shape, "cuda", torch.bfloat16, world_size, nodes)


class Allocations(TorchDispatchMode):
    """Weak references to the storages of all tensors computed inside, with their bytes."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(out)):
            storage = StorageWeakRef(x.untyped_storage())
            self.made[storage.cdata] = storage, x.untyped_storage().nbytes()
        return out


def live_bytes(model, idx, dtype):
    """Return the bytes alive after a forward pass, without the parameters."""
    own = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
    with Allocations() as allocations:
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32, cache_enabled=False):
            loss = model(idx, idx)
    assert loss.requires_grad  # what autograd saves lives as long as the loss
    made = allocations.made.items()
    return sum(n for key, (storage, n) in made if key not in own and not storage.expired())


@pytest.mark.parametrize("checkpointing", ["none", "cheap", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 64, 4, 128), (3, 4, 96, 2, 64), (1, 8, 128, 2, 512)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_activations_are_what_autograd_keeps(recipe, shape, dtype, checkpointing):
    n_layer, n_head, n_embd, batch, time = shape
    shape = GPTConfig(time, 256, n_layer, n_head, n_embd, **parse_recipe(recipe).shape(time, 256))
    check_activations(shape, batch, dtype, checkpointing)


@pytest.mark.parametrize("checkpointing", ["none", "cheap", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("time", [128, 512])  # a CPU attends in float32 up to 256
@pytest.mark.parametrize("recipe", WINDOWS)
def test_activations_of_blocks_with_a_window(recipe, time, dtype, checkpointing):
    shape = GPTConfig(time, 256, 4, 4, 64, **parse_recipe(recipe).shape(time, 256))
    check_activations(shape, 2, dtype, checkpointing)


def check_activations(shape, batch, dtype, checkpointing):
    model = cpu.for_training(GPT(shape))
    apply_activation_checkpointing(model, checkpointing)
    idx = torch.randint(0, 256, (batch, shape.block_size))
    config = TrainConfig(
        micro_batch_size=batch, block_size=shape.block_size, total_batch_size=idx.numel(),
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    # gradients of the head, which the forecast counts as work
    head = 4 * (256 + idx.numel()) * shape.n_embd
    forecast = forecast_memory(config, shape, "cpu", dtype, 1)
    found = live_bytes(model, idx, dtype) - head - forecast.compute_weights
    assert found == pytest.approx(forecast.activations, rel=0.03)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_gradients_and_optimizer_are_the_bytes_of_their_tensors(recipe, optimizer):
    model = GPT(GPTConfig(**SHAPE, **parse_recipe(recipe).shape(256, 300)))
    optimizers = make_optimizers(model, TrainConfig(recipe=f"{recipe},optimizer={optimizer}"))
    model(torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.long)).backward()
    for made in optimizers:
        made.step()
    forecast = need(f"{recipe},optimizer={optimizer}")
    weights = list(model.parameters())
    states = [s for made in optimizers for s in made.state.values()]
    moments = [v for s in states for v in s.values() if v.dim()]
    assert forecast.weights == sum(p.nbytes for p in weights)
    assert forecast.gradients == sum(p.grad.nbytes for p in weights)
    assert forecast.optimizer == sum(v.nbytes for v in moments)
    assert forecast.snapshot == forecast.weights + forecast.optimizer


def test_each_sharding_divides_its_part_of_the_state():
    whole = need()
    zero1, zero2, zero3 = (
        need(sharding=name, world_size=8) for name in ("zero1", "zero2", "zero3")
    )
    for divided in (zero1, zero2, zero3):
        assert divided.weights == whole.weights // 8
        assert divided.optimizer == whole.optimizer // 8
    assert zero1.gradients == whole.gradients == 8 * zero2.gradients == 8 * zero3.gradients
    assert zero3.compute_weights < zero2.compute_weights == zero1.compute_weights
    assert need(sharding="zero1", world_size=8, accumulation=1).gradients < zero1.gradients
    replicated = need(sharding="zero2", world_size=64, nodes=8)
    assert replicated.weights == zero2.weights  # machines are replicas
    assert need(sharding="zero2", world_size=16).weights == whole.weights // 16
    assert need(sharding="zero3") == whole  # one process


def test_with_one_micro_step_gradients_replace_activations():
    assert need(accumulation=1).peak == need().peak - need().gradients


def test_the_traffic_of_a_step():
    blocks, rest, run = 1_000_000, 0, {"shards": 8, "machines": 1, "accumulation": 4}
    within = {
        name: scaling.traffic(blocks, rest, sharding=name, **run)[0]
        for name in ("none", "zero1", "zero2", "zero3")
    }
    part = 7 / 8 * blocks
    assert within == {
        "none": 8 * part, "zero1": 6 * part, "zero2": 18 * part, "zero3": 32 * part,
    }  # fmt: skip


def test_docs_scaling_holds_the_computed_table():
    document = (ROOT / "docs" / "SCALING.md").read_text()
    for name, gpus in (("124M", 8), ("1558M", 64), ("7B", 1), ("13B", 1024)):
        assert scaling.row(name, gpus) in document


def dry_run(*args, device="cpu", **launcher):
    """Return the output of a dry run, its figures in GB by name, and their total."""
    env = {k: v for k, v in environment().items() if k != "LOCAL_WORLD_SIZE"}
    env |= {name: str(value) for name, value in launcher.items()}
    out = script("train.py", "--dry_run", "--device", device, *args, env=env).stdout
    rows = re.findall(r"^ +([\d.]+)  (.+)$", out, re.M)
    total = float(re.search(r"^  total ([\d.]+)", out, re.M)[1])
    return out, {name: float(value) for value, name in rows}, total


def test_a_dry_run_forecasts_memory_time_and_cost(tmp_path):
    out, parts, total = dry_run("--data_dir", tmp_path, "--activation_checkpointing", "block")
    for word in ("weights", "gradients", "optimizer", "activations", "logits", "saving", "Python"):
        assert any(word in name for name in parts), word
    assert total == pytest.approx(sum(parts.values()), abs=0.1)
    assert "40 % MFU of 989 TFLOP/s (H100, assumed" in out and "2.50 $ per GPU hour" in out
    assert f"\ndata_dir: {tmp_path}\n" in out  # train.sh reads this line
    assert out.endswith("\nThis was a dry run: nothing was trained or written.\n")


@pytest.mark.parametrize(
    ("device", "name", "memory", "peak"),
    [
        ("a100", "A100", 80, 312),
        ("h100", "H100", 80, 989),
        ("h200", "H200", 141, 989),
        ("b200", "B200", 180, 2250),
        ("rtx4090", "RTX 4090", 24, 165.2),
    ],
)
def test_a_dry_run_forecasts_for_a_gpu_that_is_not_here(tmp_path, device, name, memory, peak):
    out, parts, total = dry_run("--data_dir", tmp_path, "--max_steps", 1000, device=device)
    assert f" on {name}, torch.bfloat16\n" in out
    assert f"\nfits: {total:.2f} of the {memory:.2f} GB of one {name}\n" in out
    assert not any("Python" in part for part in parts)
    flops, hours = (float(re.search(text, out)[1]) for text in (r"(\S+) FLOPs", r"(\S+) hours"))
    assert hours == pytest.approx(flops / (0.4 * peak * 1e12) / 3600, abs=0.01)
    assert f"40 % MFU of {peak:,.0f} TFLOP/s ({name} in bfloat16)" in out
    assert "data_dir:" not in out and out.endswith(
        "This was a dry run: nothing was trained or written.\n"
    )


def test_a_dry_run_says_that_a_model_does_not_fit_and_which_micro_batch_would(tmp_path):
    args = ("--data_dir", tmp_path, "--model_type", "gpt2-large", "--micro_batch_size")
    out, _, total = dry_run(*args, 16, device="rtx4090")
    assert f"\ndoes not fit: {total:.2f} of the 24.00 GB of one RTX 4090" in out and total > 24
    out, _, total = dry_run(*args, "auto", device="rtx4090")
    chosen = int(re.search(r" = \d+ x (\d+) x 1024 x 1 on RTX 4090", out)[1])
    assert "\nfits: " in out and 1 <= chosen < 16
    (line,) = (line for line in out.splitlines() if "--micro_batch_size auto" in line)
    assert f"auto: {chosen} sequences a process (the most that" in line
    assert f"forecast {total:.2f} GB of 24.00 GB free" in line


def test_a_gpu_by_name_is_for_dry_runs_alone():
    done = script("train.py", "--device", "h100", code=2)
    assert "--device h100 is for --dry_run" in done.stderr and done.stderr.count("\n") == 1
    done = script("train.py", "--device", "h1000", "--dry_run", code=2)
    assert "--device h1000 is not available; this" in done.stderr and "knows b200" in done.stderr


@pytest.mark.parametrize(
    ("launcher", "shards"),
    [
        ({"WORLD_SIZE": 16}, 8),  # a machine is taken to have eight GPUs
        ({"WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 4}, 4),
        ({"WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 16}, 16),
        ({"WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 1}, 16),  # one process a machine: all shard
        ({"WORLD_SIZE": 4}, 4),
    ],
)
def test_a_dry_run_shards_within_machines_as_the_run_would(tmp_path, launcher, shards):
    args = ("--data_dir", tmp_path, "--sharding", "zero2", "--model_type", "gpt2-xl")
    args = (*args, "--micro_batch_size", 2)
    out, parts, _ = dry_run(*args, device="h100", **launcher)
    assert parts["weights"] == pytest.approx(4 * 1.5576 / shards, abs=0.01)
    assert parts["optimizer"] == pytest.approx(8 * 1.5576 / shards, abs=0.01)
    nodes = launcher["WORLD_SIZE"] // shards
    assert (f"divided among the {shards} processes of a machine" in out) == (nodes > 1)


@pytest.mark.slow
def test_the_forecast_is_within_15_percent_of_the_measured_peak(shards, tmp_path):
    args = (
        "--data_dir", shards, "--n_layer", 4, "--n_head", 4, "--n_embd", 320, "--block_size", 256,
        "--micro_batch_size", 16, "--total_batch_size", 4096, "--max_steps", 2,
        "--val_tokens", 4096, "--eval_every", 0, "--save_every", 0, "--sample_every", 0,
        "--checkpoint_dir", tmp_path / "checkpoints", "--log_dir", tmp_path / "logs",
    )  # fmt: skip
    _, parts, total = dry_run(*args)
    python = next(value for name, value in parts.items() if name.startswith("Python"))
    holes = next(value for name, value in parts.items() if name.startswith("fragmentation"))
    exact = {**environment(), "MALLOC_MMAP_THRESHOLD_": str(2**18)}  # no fragmentation
    done = script("-c", PEAK, sys.executable, "train.py", "--device", "cpu", *args, env=exact)
    measured = int(done.stdout) * 1024 / 1e9 - python
    assert total - python - holes == pytest.approx(measured, rel=0.15)


def test_the_largest_micro_batch_is_the_last_within_the_forecast():
    config = TrainConfig(total_batch_size=48 * 1024, micro_batch_size="auto", save_every=0)
    shape, cuda = config.model_config(50257), torch.device("cuda")

    def chosen(free, processes=1, before=None, **changes):
        run, saved = replace(config, **changes), None
        if before:
            saved = {"train_config": {"micro_batch_size": before}}
        return largest_micro_batch(
            run, saved, shape, Hardware(cuda, torch.bfloat16, free, processes)
        )

    found = {size: chosen(size * 10**9) for size in (4, 8, 16, 80)}
    assert found[80] == 48 and 1 <= found[4] < found[8] < found[16] < 48
    assert all(48 % size == 0 for size in found.values())

    def taken(size):
        run = replace(config, micro_batch_size=size)
        return forecast_memory(run, shape, "cuda", torch.bfloat16, 1).peak

    assert all(taken(size) < 0.9e9 * free for free, size in found.items())
    assert taken(2 * found[8]) > 0.9 * 8e9
    assert chosen(8 * 10**9, activation_checkpointing="block") > found[8]
    assert chosen(80 * 10**9, processes=4) == 12
    assert chosen(80 * 10**9, before=16) == 16  # a resumed run keeps its own
    assert chosen(4 * 10**9, before=48) == found[4]
    with pytest.raises(UserError, match="one sequence needs 3.* GB, but a process has 1.00"):
        chosen(10**9)


def test_a_dry_run_says_which_micro_batch_auto_takes(tmp_path):
    folders = ["--data_dir", tmp_path, "--checkpoint_dir", tmp_path, "--log_dir", tmp_path]
    flags = ["--micro_batch_size", "auto", "--device", "cpu", "--dry_run", "--save_every", 0]
    shape = ["--n_layer", 1, "--n_head", 1, "--n_embd", 8, "--total_batch_size", 48 * 1024]
    said = script("train.py", *folders, *flags, *shape).stdout
    assert re.search(r"= 1 x 48 x 1024 x 1 on cpu", said)
    assert re.search(r"auto: 48 sequences .* forecast 0\.\d+ GB of [\d.]+ GB free\n", said)
    free = free_memory(torch.device("cpu"))
    assert (
        10**8 < free < 1024 * int(re.search(r"MemTotal:\s*(\d+)", open("/proc/meminfo").read())[1])
    )
