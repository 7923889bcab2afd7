"""--minutes chooses a run for a machine, a text and a time; learning rate and batch follow size."""

import functools
import re
import sys
from dataclasses import replace

import pytest
from conftest import bad, script, train_options

from config import TrainOptions
from model.formats.checkpoint import load_checkpoint
from model.initial_weights import build_without_weights
from recipes import RECIPES, rate_and_batch
from training import minutes as minutes_module
from training.forecast.loss import MOST_EPOCHS, compared_loss, token_worth
from training.minutes import OTHER_SHARE, DataSize, Dial, StepCost
from training.options import read_options, resolve_options


@pytest.mark.parametrize(
    "model_type, max_lr, total_batch_size",
    [
        ("gpt2", 6e-4, 524_288),
        ("gpt2-xl", 2e-4, 1_048_576),
        ("gpt3-6.7b", 1.2e-4, 2_097_152),
        ("gpt3-175b", 6e-5, 3_145_728),
    ],
)
def test_named_sizes_have_gpt3s_rate_and_batch(model_type, max_lr, total_batch_size):
    options = train_options(model_type=model_type)
    assert (options.max_lr, options.total_batch_size) == (max_lr, total_batch_size)
    assert train_options(model_type=model_type, recipe="modern").max_lr == 0.012


def test_rate_falls_and_batch_grows_with_the_width_and_flags_win():
    pairs = [rate_and_batch(width) for width in range(32, 2048, 32)]
    assert sorted(pairs, key=lambda pair: -pair[0]) == pairs
    assert sorted(pairs, key=lambda pair: pair[1]) == pairs
    assert rate_and_batch(128) == (4e-3, 2048)
    assert all(batch & (batch - 1) == 0 for _, batch in pairs)  # powers of two
    given = train_options(n_embd=128, n_head=2, max_lr=1e-5, total_batch_size=4096)
    assert (given.max_lr, given.total_batch_size) == (1e-5, 4096)
    assert train_options(recipe="gpt2,max_lr=0.002").max_lr == 0.002


@pytest.fixture(scope="module", autouse=True)
def built_once():
    """Build the model of each size once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        build = functools.cache(build_without_weights)
        patch.setattr(minutes_module, "build_without_weights", build)
        yield


@pytest.fixture
def dial(shards, monkeypatch):
    """A function that returns the dial of a command line with --minutes."""

    def make(minutes: float, *flags: object) -> Dial:
        words = ["--data_dir", str(shards), "--device", "cpu", "--minutes", str(minutes)]
        words += [str(flag) for flag in flags]
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        given, derived, _ = read_options(TrainOptions, "train.py", words)
        options, recipe = resolve_options(given, derived, None)
        return Dial(options, recipe, process=None)

    return make


def choose(dial: Dial, flops_per_second: float):
    """Return the plan of a dial for devices of this speed, whose measuring takes no time."""
    dial.step_cost = lambda size, batch_tokens: StepCost(
        size.meta_model.flops_per_token() / flops_per_second, 0.01, 0.0
    )
    return dial.choose()


def test_more_time_or_a_faster_device_gives_a_larger_model(dial):
    parameters = []
    for minutes, speed in [(2, 1e11), (60, 1e11), (20, 1e13), (200, 1e14)]:
        planned = dial(minutes)
        planned.data_size = replace(planned.data_size, train_tokens=10**10)
        plan = choose(planned, speed)
        parameters.append(plan.size.meta_model.num_parameters())
        # steps and updates take nearly all of the time that is theirs, validations the rest
        pass_seconds = plan.num_tokens * plan.size.meta_model.flops_per_token() / speed
        seconds = pass_seconds + 0.01 * plan.flags["max_steps"]
        assert 0.9 < seconds / (60 * minutes * (1 - OTHER_SHARE)) < 1
    assert sorted(set(parameters)) == parameters


def test_tokens_with_less_text_get_a_smaller_model(dial):
    planned = dial(15)  # of bytes
    planned.data_size = replace(planned.data_size, train_tokens=10**10)
    assert token_worth(planned.data_size.vocab_size) == pytest.approx(1 / 4.5, rel=0.01)
    speed = 1e11  # FLOP/s, about that of a core
    of_bytes = choose(planned, speed).size.meta_model.num_parameters()
    planned.data_size = replace(planned.data_size, vocab_size=50257)  # but models of bytes
    assert token_worth(256) < token_worth(4096) < token_worth(50257) == 1.0
    assert of_bytes < choose(planned, speed).size.meta_model.num_parameters()


@pytest.mark.parametrize("minutes, n_layer", [(2, 1), (15, 2)])
def test_rows_of_rare_tokens_do_not_decide(dial, minutes, n_layer):
    """Code in GPT-2's tokens, at the speeds of machine A. In 15 minutes 1 layer of 64 channels ends
    at 2.345, 2 of 128 end at 2.243 (docs/BENCHMARKS.md). By all of their parameters the first would
    be chosen, and also by the bytes per token of code, 2.06 of 4.5."""
    planned = dial(minutes)
    planned.data_size = DataSize(train_tokens=15_393_051, val_tokens=planned.data_size.val_tokens)
    planned.sizes = planned.make_sizes()  # with GPT-2's vocabulary
    tokens_per_s = {1: 8130, 2: 5500, 3: 3700, 4: 2500}  # by layers

    def measure(size, batch_tokens):
        return StepCost(1 / tokens_per_s[size.meta_model.config.n_layer], 0.0, 0.0)

    planned.step_cost = measure
    assert planned.choose().size.meta_model.config.n_layer == n_layer


@pytest.mark.parametrize(
    "small_tokens, large_tokens, measured",
    [
        (2.20e6, 1.49e6, -0.33),
        (2.21e6, 1.47e6, -0.33),
        (2.21e6, 1.71e6, 0.03),
        (6.6e6, 4.46e6, 0.06),
    ],
)
def test_two_sizes_compare_as_measured(dial, small_tokens, large_tokens, measured):
    """The novels in GPT-2's tokens, 1 layer of 64 channels and 2 of 128 in the same time on two
    machines (docs/BENCHMARKS.md): the tokens that each read, and the difference of the losses."""
    planned = dial(15)
    planned.data_size = DataSize(train_tokens=11_510_951)
    small, large, *_ = planned.make_sizes()
    predicted = compared_loss(
        small.counted_parameters, small_tokens, planned.data_size.train_tokens
    ) - compared_loss(large.counted_parameters, large_tokens, planned.data_size.train_tokens)
    assert predicted == pytest.approx(measured, abs=0.2)
    assert (predicted > 0) == (measured > 0)


@pytest.mark.parametrize(
    "flags",
    [("--tensor_parallel", 2, "--sharding", "zero2"), ("--recipe", "modern,n_kv_head=2")],
)
def test_sizes_have_heads_that_can_be_shared(dial, flags):
    sizes = dial(15, *flags).sizes
    assert len(sizes) > 6 and all(size.flags["n_head"] % 2 == 0 for size in sizes)


def test_a_model_type_is_the_only_size(dial):
    flags = ("--model_type", "gpt2", "--recipe", "modern,n_kv_head=4")
    [size] = dial(15, *flags).sizes
    assert size.flags == {} and size.meta_model.config.n_layer == 12


@pytest.mark.parametrize("micro_batch_size", [2, 24])
def test_the_batch_divides_into_a_given_micro_batch(dial, micro_batch_size):
    planned = dial(2, "--micro_batch_size", micro_batch_size)
    batches = []

    def measure(size, batch_tokens):
        options = replace(planned.options, **size.flags, total_batch_size=batch_tokens)
        batches.append(batch_tokens // options.block_size)
        options.micro_steps(data_parallel=1)  # UserError unless the batch divides
        return StepCost(size.meta_model.flops_per_token() / 1e11, 0.01, 0.0)

    planned.step_cost = measure
    replace(planned.options, **planned.choose().flags).micro_steps(data_parallel=1)
    assert batches[0] == max(8, micro_batch_size)


def test_large_micro_batches_do_not_make_a_size_look_fast(dial):
    planned = dial(2, "--micro_batch_size", 512)
    planned.data_size = replace(planned.data_size, train_tokens=10**8)
    # at this speed ten such batches do not fit into the time for any size
    assert choose(planned, 1e9).size == planned.sizes[0]


def test_the_printed_run_is_compiled_if_the_chosen_one_is(dial):
    for minutes, compiled in ((5, False), (20, True)):
        planned = dial(minutes)
        # as on CUDA, where it is the default
        on_cuda = replace(planned.options, use_torch_compile=True)
        plan = choose(Dial(on_cuda, RECIPES["gpt2"], process=None), 1e11)
        assert plan.flags.get("use_torch_compile", True) is compiled


def test_a_small_text_stops_where_repeats_do_not_help(dial):
    planned = dial(60)
    plan = choose(planned, 1e14)
    assert plan.num_tokens <= MOST_EPOCHS * planned.data_size.train_tokens
    text = 10**6
    gains = [
        compared_loss(1e6, n * text, text) - compared_loss(1e6, 2 * n * text, text)
        for n in (1, 8, 48)
    ]
    assert gains[0] > gains[1] > 10 * gains[2]


def test_the_run_has_the_printed_flags_and_keeps_them(shards, tmp_path):
    """A flag of the user wins; the printed command trains the same run; a resumed run keeps it."""
    common = ["--data_dir", shards, "--device", "cpu", "--dtype", "float32", "--n_embd", 32]
    common += ["--n_layer", 1, "--n_head", 1, "--block_size", 32, "--max_steps", 20]
    run = ["--run_dir", tmp_path / "a"]
    done = script("train.py", *common, *run, "--minutes", 0.2)
    command = re.search("the same run: python (.*)", done.stdout)[1]
    assert "--max_steps 20 " in command and "--minutes" not in command
    assert "--n_embd 32" in command and command.count("--n_embd") == 1
    other = command.replace(str(tmp_path / "a"), str(tmp_path / "b"))
    script(*other.split())
    first, second = (
        load_checkpoint(tmp_path / name / "checkpoints/model_last.pt") for name in "ab"
    )
    folders = {"checkpoint_dir": None, "log_dir": None}
    assert first["config"] | folders == second["config"] | folders
    assert "minutes" not in first["config"]
    script("train.py", "--resume", tmp_path / "a", "--max_steps", 25, "--minutes", 5)
    resumed = load_checkpoint(tmp_path / "a/checkpoints/model_last.pt")
    assert resumed["config"]["total_batch_size"] == first["config"]["total_batch_size"]


def test_a_batch_that_divides_into_no_sequences_is_refused_before_a_choice(shards, tmp_path):
    run = ["--run_dir", tmp_path / "run", "--device", "cpu", "--minutes", 1]
    given = ["--total_batch_size", 1000]
    bad(["train.py", "--data_dir", shards, *run, *given], "does not divide by the micro-batch")
