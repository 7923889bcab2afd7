from dataclasses import replace

import pytest
import torch
from conftest import ROOT, script, train_options, user_error

from config import TrainOptions
from model.config import GPTConfig
from model.gpt import GPT
from model.initial_weights import build_without_weights
from recipes import parse_recipe
from training.options import continued_model_config
from utils.throughput import find_gpu, gpu_of


@pytest.mark.parametrize("name", ["train", "finetune", "sample", "evaluate", "plot", "convert"])
def test_a_script_without_any_flag_ends_in_a_sentence(name, tmp_path):
    done = script(ROOT / f"{name}.py", code=2, cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stdout + done.stderr


def test_help_begins_with_commands_and_has_the_flags():
    text = script("train.py", "--help").stdout
    assert "\n  python train.py" in text.partition("--help")[0] and "--total_batch_size" in text


def test_gpt3s_sizes_bring_their_context():
    def context(**given):
        return train_options(**given).block_size

    assert (context(), context(model_type="gpt2-xl")) == (1024, 1024)
    assert context(model_type="gpt3-175b") == 2048
    assert context(model_type="gpt3-175b", block_size=512) == 512


def test_a_batch_that_does_not_divide_says_what_would():
    config = TrainOptions(total_batch_size=2049, micro_batch_size=4, block_size=128)
    with user_error("give 2,048$"):
        config.micro_steps(data_parallel=2)
    assert train_options(micro_batch_size=16).micro_steps(data_parallel=8) == 4


def test_warmup_and_the_last_rate_follow_the_length_and_the_recipe_of_the_run():
    assert train_options().warmup_steps == 715 and train_options(max_steps=500).warmup_steps == 50
    assert train_options(max_lr=1e-3).min_lr == pytest.approx(1e-4)
    modern = train_options(recipe="modern")
    assert (modern.max_lr, modern.min_lr) == (0.012, 0)


def test_the_architecture_of_other_weights_is_adopted_or_a_contradiction_named():
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}
    weights = TrainOptions(**sizes).model_config(parse_recipe("modern"), 257)

    def shape(recipe="gpt2", **options):
        return continued_model_config(TrainOptions(**options), parse_recipe(recipe), weights)

    assert shape(init_from="x", block_size=16) == replace(weights, block_size=16)
    assert shape("modern", resume="x", **sizes) == weights
    for options, message in (
        ({"init_from": "x", "block_size": 16, "n_layer": 3}, "x holds .* n_layer 2 .here 3."),
        ({"init_from": "x", "block_size": 64}, "x has a context of 32: give that --block_size"),
        (
            {"resume": "y", "block_size": 16},
            "y holds a model of another architecture: block_size 32",
        ),
        # nor one that began from other weights: its optimizer state has 32 positions
        (
            {"resume": "y", "init_from": "x", "block_size": 16},
            "y holds .*: block_size 32 .here 16.",
        ),
    ):
        with user_error(message):
            shape(**options)


def test_flops_follow_the_palm_formula_and_peaks_are_of_the_very_chip():
    model = build_without_weights(GPT, GPTConfig())
    assert model.flops_per_token() == 6 * 123_653_376 + 12 * 12 * 768 * 1024
    assert gpu_of(torch.device("cpu"), torch.bfloat16) is None
    for name, peak_flops in {
        "A100-SXM4-80GB": 312e12,
        "H100 80GB HBM3": 989e12,
        "H100 PCIe": 756e12,
        "L4": 121e12,
        "L40": None,
        "A10G": 70e12,
        "A10": None,
        "RTX A6000": 154.8e12,
        "RTX 6000 Ada Generation": None,
        "RTX PRO 6000 Blackwell Workstation Edition": 503.8e12,
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition": 438.9e12,
        "RTX PRO 6000 Blackwell Server Edition": None,  # no data sheet gives its peak
        "RTX A1000": None,
        "GeForce RTX 3080": 59.5e12,
        "GeForce RTX 3080 Ti": None,
        "GeForce RTX 4080": 97.5e12,
        "GeForce RTX 4080 SUPER": None,
        "GeForce RTX 5080": 112.6e12,
        "GeForce RTX 5090": 209.5e12,
        "GeForce RTX 4090 Laptop GPU": None,
        "GB10": 125e12,
        "GB200": 2500e12,
        "V100-SXM2-32GB": 125e12,
        "V100-PCIE-16GB": 112e12,
        "V100S-PCIE-32GB": None,
        "A100-SXM4-40GB MIG 1g.5gb": None,
    }.items():
        gpu = find_gpu(f"NVIDIA {name}")
        assert (gpu and gpu.peak_flops) == peak_flops
