import math
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, script
from training.initial_model import adopt_shape

from config import RECIPES, TrainConfig, recipe_of
from model.config import GPTConfig
from model.empty import empty_gpt
from utils import distributed
from utils.devices import is_emulated, pick_device
from utils.errors import UserError
from utils.gpus import find_gpu
from utils.throughput import peak_flops


@pytest.mark.parametrize("name", ["train.py", "sample.py", "plot.py", "data/fineweb-edu.py"])
def test_help_tells_every_flag(name):
    text = script(name, "--help").stdout
    flags = {"train.py": "--total_batch_size", "sample.py": "--top_p", "plot.py": "--log"}
    assert flags.get(name, "--val_fraction") in text and "default" in text


def test_train_has_at_most_48_flags():
    assert len(TrainConfig.__dataclass_fields__) <= 48


def test_a_misspelt_flag_gets_a_suggestion():
    done = script("sample.py", "--temprature", "1", code=2)
    assert "--temperature" in done.stdout + done.stderr


def test_a_batch_that_does_not_divide_says_what_would():
    config = TrainConfig(total_batch_size=2049, micro_batch_size=4, block_size=128)
    with pytest.raises(UserError, match="; give --total_batch_size 2,048"):
        config.sequences_per_step(world_size=2)
    assert TrainConfig().sequences_per_step(8) == 512


@pytest.mark.parametrize("name", ["max_lr", "weight_decay"])
def test_an_option_that_is_not_finite_is_named_as_the_user_gave_it(name):
    for value in (math.inf, math.nan):
        with pytest.raises(UserError, match=f"--{name} {value} must be at least 0"):
            TrainConfig(**{name: value}).check()


def test_settings_survive_the_checkpoint():
    config = TrainConfig(max_lr=1e-3, resume="auto", overwrite=True)
    again = TrainConfig.from_dict(config.to_dict())
    assert (again.max_lr, again.resume, again.overwrite) == (1e-3, None, False)
    assert again.data_dir == config.data_dir


def test_a_speedrun_has_shorter_ngrams_where_tokens_are_longer():
    assert TrainConfig(recipe="speedrun").model_config(257).ngrams == 5
    assert TrainConfig(recipe="speedrun").model_config(50257).ngrams == 2
    assert TrainConfig(recipe="speedrun,ngrams=3").model_config(50257).ngrams == 3
    bytewise = TrainConfig(recipe="speedrun").model_config(257)
    assert recipe_of(bytewise) == "speedrun,window=128"
    assert adopt_shape(TrainConfig(recipe="speedrun", init_from="x"), bytewise) == bytewise


def test_a_speedrun_of_before_keeps_its_ngrams():
    saved = TrainConfig(recipe="speedrun").to_dict()
    del saved["resolved_recipe"]["ngram_bits"]  # as of a version without it
    del saved["resolved_recipe"]["model"]["ngram_rows"]
    saved["resolved_recipe"]["model"]["ngrams"] = 5
    shape = TrainConfig.from_dict(saved).model_config(50257)
    assert (shape.ngrams, shape.ngram_rows) == (5, 65_536)


def test_a_run_keeps_the_recipe_that_it_began_with(monkeypatch):
    saved = TrainConfig(recipe="modern", max_lr=0.02).to_dict()
    assert TrainConfig.from_dict(saved).recipe == "modern"
    model = RECIPES["modern"].model | {"qk_norm": False}
    later = replace(RECIPES["modern"], model=model, max_lr=1.0, momentum_warmup=5)
    monkeypatch.setitem(RECIPES, "modern", later)
    del saved["resolved_recipe"]["normuon"]  # as of a version without it
    again = TrainConfig.from_dict(saved)
    assert again.recipe == "modern,normuon=0.0,momentum_warmup=0,qk_norm=True"
    assert again.resolved_recipe.max_lr == 0.02


def test_devices_that_are_not_here_are_named():
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("cuda:99", "tpu", "cpu:x"):
        with pytest.raises(UserError, match=f"--device {name} is not available; this machine"):
            pick_device(name)
    with pytest.raises(UserError, match="--device tpu is not available to local rank 3; this"):
        pick_device("tpu", local_rank=3)


def test_a_processor_without_bfloat16_is_known(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: False)
    assert is_emulated(torch.bfloat16, cpu) and not is_emulated(torch.float32, cpu)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    assert not is_emulated(torch.bfloat16, cpu)


def test_flops_follow_the_palm_formula_and_unknown_devices_get_no_peak():
    assert empty_gpt(GPTConfig()).flops_per_token() == 6 * 123_653_376 + 12 * 12 * 768 * 1024
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_peaks_are_of_the_very_chip():
    assert find_gpu("NVIDIA A100-SXM4-80GB").peak == 312e12
    assert find_gpu("NVIDIA H100 80GB HBM3").peak == 989e12
    assert find_gpu("NVIDIA H100 PCIe").peak == 756e12
    assert find_gpu("NVIDIA GeForce RTX 4090").peak == 165.2e12
    for name in (
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ):
        assert find_gpu(name) is None, name


@pytest.mark.parametrize(
    "name", ["train", "sample", "evaluate", "plot", "convert", "sweep", "bench"]
)
def test_a_script_without_arguments_ends_in_a_sentence(name, tmp_path):
    done = script(ROOT / f"{name}.py", code=2, cwd=tmp_path)
    assert "Traceback" not in done.stderr and done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "8"}, "has WORLD_SIZE=8, but no RANK: start with torchrun, or unset"),
        ({"RANK": "1"}, "has RANK=1: start with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "but no MASTER_ADDR"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE=many in the environment is not a number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment is not a number from 1 on"),
    ],
)
def test_an_environment_left_by_another_launcher_is_named(monkeypatch, environment, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        distributed.start("cpu")
