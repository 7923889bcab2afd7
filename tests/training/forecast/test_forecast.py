import re
import sys
from dataclasses import replace

import pytest
import torch
from conftest import train_args, train_options, user_error, without

import train
from model.config import GPTConfig
from model.gpt import GPT
from recipes import parse_recipe
from training.forecast.advice import advise, choose_micro_batch
from training.forecast.dry_run import describe_hours
from training.forecast.memory import Hardware, forecast_memory
from training.forecast.step_time import forecast_step
from training.optimizers import make_optimizers
from utils.throughput import find_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
H100 = find_gpu("NVIDIA H100")
RECIPES = ("gpt2", "modern", "llama,n_kv_head=2,n_inner=100")


def plan(world_size, *, per_machine=8, gigabytes=80, **given):
    """Return what the forecasts take for a run on so many H100s."""
    options = train_options(**{"micro_batch_size": 1, "dtype": "bfloat16", **given})
    recipe = parse_recipe(options.recipe)
    shape = options.model_config(recipe, GPTConfig.vocab_size)
    free = gigabytes * 10**9
    hardware = Hardware(GPU, torch.bfloat16, free, world_size, per_machine, H100)
    return options, recipe, shape, hardware


def plan_small(accumulation=2, world_size=1, **given):
    """Return the plan of a small model."""
    sizes = {"n_layer": 4, "n_head": 4, "n_embd": 64, "block_size": 256, "micro_batch_size": 16}
    tokens = 16 * 256 * accumulation * world_size
    return plan(world_size, total_batch_size=tokens, **sizes, **given)


def need(**given):
    """Return the forecast of the memory of a small model."""
    return forecast_memory(*plan_small(**given))


@pytest.mark.parametrize("name", [*RECIPES, "gpt2,optimizer=muon", "modern,optimizer=adamw"])
def test_weights_gradients_and_optimizer_are_the_bytes_of_their_tensors(name):
    options, recipe, shape, hardware = plan_small(recipe=f"{name},normuon=0")
    forecast = forecast_memory(options, recipe, shape, hardware)
    model = GPT(shape)
    weights = list(model.parameters())
    for p in weights:
        p.grad = torch.ones_like(p)
    moments = []
    for optimizer in make_optimizers(model, options, recipe):
        optimizer.step()
        for state in optimizer.state.values():
            moments += [value for value in state.values() if value.dim()]  # not the step count
    assert forecast["weights"] == sum(p.nbytes for p in weights)
    assert forecast["gradients"] == sum(p.grad.nbytes for p in weights)
    assert forecast["optimizer"] == sum(value.nbytes for value in moments)


@pytest.mark.parametrize(
    "options, weights, gradients",  # by how much they are divided
    [
        ({"sharding": "zero1", "world_size": 8}, 8, 1),
        ({"sharding": "zero1", "world_size": 8, "accumulation": 1}, 8, 8),
        ({"sharding": "zero2", "world_size": 8}, 8, 8),
        ({"sharding": "zero3", "world_size": 8}, 8, 8),
        ({"sharding": "zero2", "world_size": 64}, 8, 8),  # machines are replicas
        ({"sharding": "zero2", "world_size": 64, "shard_across": 32}, 32, 32),
        ({"sharding": "zero3"}, 1, 1),  # one process
        ({"world_size": 8, "accumulation": 1}, 1, 1),
        # DDP's buckets, and the gradients of micro-steps without a reduction
        ({"world_size": 8}, 1, 0.5),
    ],
)
def test_each_sharding_divides_its_part_of_the_state(options, weights, gradients):
    whole, divided = need(), need(**options)
    assert divided["weights"] == whole["weights"] // weights
    assert divided["optimizer"] == whole["optimizer"] // weights
    assert divided["gradients"] == whole["gradients"] / gradients
    gathered = "weights cast or gathered for compute"
    if options.get("sharding") == "zero3" and "world_size" in options:  # a few blocks at a time
        assert divided[gathered] < need(sharding="zero2", world_size=8)[gathered]


@pytest.fixture
def dry_run(monkeypatch, capsys):
    """A function that returns the output of a dry run in this process."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["train.py", "--dry_run", *map(str, args)])
        train.main()
        return capsys.readouterr().out

    return run


def test_a_dry_run_says_what_would_be_and_needs_no_data(dry_run, tmp_path):
    # bfloat16: it fits the memory of a small machine
    out = dry_run("--device", "cpu", "--dtype", "bfloat16", "--data_dir", tmp_path)
    assert "124,439,808 parameters; 19,073 steps" in out
    assert " = 1024 x micro-batch 16 x micro-steps 32 on cpu" in out
    assert "note: GPT-2's vocabulary assumed; a smaller one makes a smaller model" in out
    assert "$" not in out
    assert f"\ndata_dir: {tmp_path}\n" in out  # train.sh reads this line
    last = "This was a dry run: nothing was trained or written.\nnext: python data/fineweb-edu.py "
    assert f"\n{last}--local_dir {tmp_path} [--input YOUR_TEXT], then the same command" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_a_resumed_run_counts_the_rest(dry_run, shards, trained):
    args = [*train_args(shards, trained, 30)[1:], "--resume", "auto"]
    out = dry_run(*args)
    step, batch = re.search(r"after step (\d+): ", out)[1], re.search(r"steps of (\d+)", out)[1]
    assert 0 < int(step) < 30
    finished = dry_run(*args, "--max_steps", step)
    assert f"the run is at its last step, {step}: it would not go on" in finished
    assert f" FLOPs for the {(30 - int(step)) * int(batch):,} tokens after" in out
    assert re.search(r"^[\d,]+ train tokens: [\d.]+ epochs$", out, re.M)
    assert out.endswith("\nnext: the same command of train.py without --dry_run\n")


@pytest.mark.parametrize(
    "hours, text",
    [
        (1e-9, "0.1 minutes"),
        (0.5, "30.0 minutes"),
        (1, "1.0 hours"),
        (1234, "1,200 hours (50 days)"),
    ],
)
def test_times_have_a_unit_in_which_they_are_no_zero(hours, text):
    assert describe_hours(hours) == text


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            (),
            "about 3.04, .*; for the same compute it is lowest, 3.00, with 252M parameters",
        ),
        (("--model_type", "gpt2-xl"), "about 2.51, .*, with AdamW$"),
        (
            ("--config", "configs/five_minutes.toml"),
            "the fit of .* has no runs of under 100M tokens$",
        ),
        (("--data_dir", "BYTES"), None),
    ],
)
def test_a_dry_run_says_which_loss_a_published_fit_expects_of_gpt2s_tokens(
    dry_run, shards, flags, expected
):
    flags = [shards if flag == "BYTES" else flag for flag in flags]
    said = re.search("^loss to expect: (.*)$", dry_run("--device", "h100", *flags), re.M)
    assert said is None if expected is None else re.search(expected, said[1])


@pytest.mark.parametrize(
    "device, dtype, memory, peak_flops, fits",
    [
        ("h100", "bfloat16", 80, 989, "fits"),
        ("t4", "float16", 16, 65, "does not fit"),
    ],
)
def test_a_dry_run_forecasts_for_a_gpu_that_is_not_here(
    dry_run, tmp_path, device, dtype, memory, peak_flops, fits
):
    args = ("--device", device, "--data_dir", tmp_path, "--model_type", "gpt2-large")
    out = dry_run(*args, "--micro_batch_size", 16)
    assert f", torch.{dtype}\n" in out and "data_dir:" not in out
    total, *forecast = re.findall(r"^ +([\d.]+)  ", out, re.M)[::-1]
    assert float(total) == pytest.approx(sum(map(float, forecast)), abs=0.1)
    assert f"in all: {fits} {0.9 * memory:.2f} GB, 90% of {memory:.2f} GB free\n" in out
    flops, hours = re.search(r"(\S+) FLOPs .* ([\d.,]+) hours .*on 1 GPU and ", out).groups()
    hours = float(hours.replace(",", ""))
    assert hours == pytest.approx(float(flops) / (0.4 * peak_flops * 1e12) / 3600, rel=0.01)
    assert f"40% MFU of {peak_flops:,.0f} TFLOP/s" in out


def test_a_dry_run_for_a_gpu_counts_what_is_computed_again_and_chooses_a_micro_batch(
    dry_run, tmp_path
):
    args = ("--device", "h100", "--data_dir", tmp_path, "--model_type", "gpt2-large")
    out = dry_run(*args, "--micro_batch_size", "auto", "--activation_checkpointing", "block")
    assert "at 33% MFU" in out  # which leaves out what is computed again
    size = re.search(r"micro-batch (\d+), by forecast", out)[1]
    assert f" x micro-batch {size} x " in out and "in all: fits" in out
    assert out.endswith(" without --dry_run and --device, on such a machine\n")
    assert "hours" not in dry_run(*args, "--dtype", "float32")  # of which no peak is known


@pytest.mark.parametrize(
    "device, launch",
    [
        ("16xh100", "--nproc_per_node=8 --nnodes=2"),
        (
            "12xh100",
            "--nproc_per_node=8 --nnodes=2, on the last machine torchrun --nproc_per_node=4",
        ),
        ("2x6xh100", "--nproc_per_node=6 --nnodes=2"),
    ],
)
def test_a_dry_run_says_how_its_gpus_start(dry_run, tmp_path, device, launch):
    out = dry_run("--device", device, "--data_dir", tmp_path, "--total_batch_size", 786_432)
    assert out.endswith(f", on such a machine, by torchrun {launch}\n")


def test_the_largest_micro_batch_is_the_last_within_the_forecast():
    def choose(gigabytes, processes=1, **given):
        given |= {"total_batch_size": 48 * 1024, "micro_batch_size": "auto"}
        return choose_micro_batch(*plan(processes, gigabytes=gigabytes, **given))[0]

    sizes = [choose(gigabytes) for gigabytes in (4, 8, 16, 80)]
    assert sizes == sorted(set(sizes)) and sizes[-1] == 48  # all divide the 48 sequences
    assert all(48 % size == 0 for size in sizes)
    assert choose(8, activation_checkpointing="block") > sizes[1]
    assert choose(80, processes=4) == 12
    with user_error("one sequence needs .* GB, but a process has 1.00 GB"):
        choose(1)


def step_of(*args, **given):
    options, _, shape, hardware = plan(*args, **given)
    return forecast_step(options, shape, hardware)


GPT3 = {"model_type": "gpt3-175b", "sharding": "zero3", "activation_checkpointing": "block"}


def test_a_gpu_sends_what_the_formulas_of_docs_scaling_say():
    """By hand, for 1,024 H100s; N parameters"""
    N = 174.6e9
    one_each = {**GPT3, "shard_across": 1024, "total_batch_size": 1024 * 2048}
    # 2 bytes for each of two all-gathers, 4 for the reduce-scatter
    step = step_of(1024, per_machine=1, **one_each)
    assert step.network_bytes == pytest.approx(8 * N, rel=0.01) and step.machine_bytes == 0
    assert step.sending_seconds == pytest.approx(27.9, rel=0.01)
    assert step.compute_seconds == pytest.approx(6.83, rel=0.01)
    assert step.seconds == step.sending_seconds
    # eight cards for eight GPUs that all need the same
    step = step_of(1024, **one_each)
    assert step.network_bytes == pytest.approx(8 * N / 8, rel=0.02)
    assert step.machine_bytes == pytest.approx(8 * N * 7 / 8, rel=0.01)
    assert step.seconds == step.compute_seconds

    # eight share a block: each has N / 8, its 128 shards are on 128 machines
    batch = {"total_batch_size": 1536 * 2048, "micro_batch_size": 4}  # 3 micro-steps
    step = step_of(1024, **{**GPT3, "shard_across": 1024, "tensor_parallel": 8, **batch})
    assert step.network_bytes == pytest.approx(3 * 8 * N / 8, rel=0.02)
    assert step.machine_bytes == 0
    assert step.sending_seconds == pytest.approx(1.01 * step.compute_seconds, abs=0.05)
    # for each token of 12 sequences two all-reduces forward, one again, two in float32 backward
    activations = 96 * 12 * 2048 * 12288 * (2 * 2 + 2 + 2 * 4)
    assert step.activation_bytes == pytest.approx(2 * 7 / 8 * activations)
    assert step.seconds == step.sending_seconds + step.activation_bytes / 450e9
    # the whole head in each of the eight, and the blocks again but for their last matmul
    model_flops = 6 * N + 12 * 96 * 12288 * 2048
    again = 96 * (2 * 8 * 12288**2 + 4 * 12288 * 2048)
    flops = 1536 * 2048 * (model_flops + again + 7 * 6 * 50304 * 12288)
    assert step.compute_seconds == pytest.approx(flops / (1024 * 989e12 * 0.4), rel=0.005)


def test_replicas_add_an_all_reduce_between_machines():
    xl = {"model_type": "gpt2-xl", "total_batch_size": 64 * 1024 * 16, "micro_batch_size": 8}
    N = 1.558e9
    for sharding, sent in (
        ("none", 8 * N),
        ("zero1", 6 * N),
        ("zero2", 10 * N),  # 4 N a + 2 N with a = 2
        ("zero3", 16 * N),
    ):
        step = step_of(64, sharding=sharding, **xl)
        # the embedding is gathered in float32, and once
        assert step.machine_bytes == pytest.approx(sent * 7 / 8, rel=0.04)
        assert step.network_bytes == pytest.approx(8 * N / 8 * 7 / 8, rel=0.01)


@pytest.mark.slow
def test_the_advice_fits_is_faster_and_is_what_the_refusal_names():
    given = {"model_type": "gpt3-13b", "total_batch_size": 2**21}
    options, recipe, shape, hardware = plan(64, **given)
    text = advise(options, recipe, shape, hardware)
    flags = dict(re.findall(r"--(\w+) (\w+)", text))
    flags = {name: int(value) if value.isdigit() else value for name, value in flags.items()}
    advised = replace(options, **flags)
    assert sum(forecast_memory(advised, recipe, shape, hardware).values()) < 72e9
    seconds = forecast_step(advised, shape, hardware).seconds
    assert text.endswith(f", {seconds:.2f} s a step")
    with user_error(
        "one sequence needs .* 80.00 GB free, .* filled: the fastest that fits is --sharding zero"
    ):
        choose_micro_batch(options, recipe, shape, hardware)

    # as many processes as sequences, and more
    with user_error("does not divide by the micro-batch, .* the fastest that fits is .*--sharding"):
        choose_micro_batch(*plan(2048, **given))

    # one process has a micro-batch to change, and keeps the flags that change nothing
    for sharding in ("none", "zero2"):
        on_cpu = Hardware(CPU, torch.float32, 8 * 10**9)
        options, recipe, shape, _ = plan(1, micro_batch_size=64, sharding=sharding)
        text = advise(options, recipe, shape, on_cpu)
        assert re.fullmatch(r"what fits is --micro_batch_size \d+", text)

    # the state of 175B is that of several machines, and of none that are fewer
    given |= {"model_type": "gpt3-175b", "total_batch_size": 1536 * 2048}
    text = advise(*plan(1024, **given))
    assert re.search(r"--shard_across \d+ ", text)
    assert "no flags make it fit" in advise(*plan(8, **given))
    # no flags make 1,535 sequences those of 1,024 processes, nor does a smaller model
    given["total_batch_size"] -= 2048
    with user_error("does not divide by .*: give [\\d,]+$"):
        choose_micro_batch(*plan(1024, **given))


def test_a_dry_run_names_flags_where_a_run_does_not_fit_or_waits_for_the_network(dry_run, tmp_path):
    def on_gpus(gpus, *flags):
        return dry_run("--device", gpus, "--data_dir", tmp_path, *flags)

    out = on_gpus("8xh100")
    assert "advice" not in out and "a step takes 0.14" in out and "between machines" not in out
    assert "0.87 GB in   0.002 s within its machine, at 450 GB/s" in out
    assert "40% MFU" in out
    out = on_gpus("8xh100", "--model_type", "gpt2-xl", "--micro_batch_size", 64)
    assert "advice: the fastest that fits is --micro_batch_size" in out and "\nnext: other" in out
    # replicas of one sequence each, one GPU a machine
    out = on_gpus("512x1xh100", "--model_type", "gpt2-xl")
    mfu = int(re.search(r"at (\d+)% MFU", out)[1])
    assert "advice: the fastest that fits is" in out and mfu < 40


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--run_dir RUN", "holds the checkpoints of another run"),
        ("--data_dir SHARDS SHARDS", "name each folder once"),
        ("--init_from RUN --n_layer 3", "holds a model of another architecture"),
        ("--resume RUN --max_steps 30 --init_from RUN", "does not hold the weights"),
        ("--hellaswag_every 1 --hellaswag_data README.md", "cannot score hellaswag"),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(dry_run, shards, trained, tmp_path, flags, message):
    args = without(train_args(shards, tmp_path, 2)[1:], "--checkpoint_dir", "--log_dir")
    flags = flags.replace("RUN", str(trained)).replace("SHARDS", str(shards))
    with user_error(message):
        dry_run(*args, "--run_dir", tmp_path, *flags.split())


@pytest.mark.parametrize("sequences, expected", [(64, 16), (24, 12), (7, 7), (17, 1)])
def test_a_micro_batch_on_a_cpu_divides_the_step_and_has_up_to_16_sequences(sequences, expected):
    options = train_options(n_embd=64, n_head=1, n_layer=1, total_batch_size=1024 * sequences)
    config = options.model_config(parse_recipe("gpt2"), 256)
    hardware = Hardware.of(replace(options, device="cpu", dtype="float32"))
    chosen, sentence = choose_micro_batch(options, parse_recipe("gpt2"), config, hardware)
    assert (chosen, sentence) == (expected, "")
