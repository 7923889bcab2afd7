"""Recipes: built field by field, and trained as exactly as GPT-2's."""

import json
import re
from dataclasses import asdict, fields
from typing import Literal, get_args, get_origin

import pytest
from conftest import (
    bad,
    gap,
    losses,
    same_run,
    script,
    slow,
    torchrun,
    train_args,
    user_error,
)

from config import TrainOptions
from model.config import NOT_IN_RECIPES, GPTConfig
from recipes import RECIPES, Recipe, parse_recipe
from training.optimizers import MATRIX_OPTIMIZERS, matrix_optimizer
from utils.cli import parse
from utils.logger import read_metrics


def test_a_recipe_is_changed_field_by_field_and_read_back_from_a_checkpoint():
    assert parse_recipe("gpt2") == Recipe()
    changed = parse_recipe("modern, qk_norm=False,n_kv_head=2,optimizer=adamw,max_lr=1")
    assert changed.model == {**RECIPES["modern"].model, "qk_norm": False, "n_kv_head": 2}
    assert (changed.optimizer, changed.max_lr) == ("adamw", 1.0)
    for recipe in (changed, *RECIPES.values()):
        assert Recipe(**json.loads(json.dumps(asdict(recipe)))) == recipe


@pytest.mark.parametrize(
    "text, message",
    [
        ("modren", "there are gpt2, modern, llama"),
        ("modern,qk_nrom=True", "has no 'qk_nrom=True'; its fields, .* qk_norm=False"),
        ("modern, n_embd=8", "has no 'n_embd=8'"),
        ("modern,max_lr=fast", "has no 'max_lr=fast'; .* max_lr=0.0006"),
        ("modern,tied=0", "has no 'tied=0'; .* tied=True"),
        ("modern,normuon=2", "normuon 2.0 must be at least 0 and below 1"),
        ("gpt2,optimizer=sgd", "there is no optimizer 'sgd'; there are adamw, muon"),
    ],
)
def test_a_recipe_that_is_none_is_named(text, message):
    with user_error(message):
        matrix_optimizer(parse_recipe(text))


def test_modern_resumes_to_the_bit_and_with_its_optimizer_alone(shards, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    recipe = ("--recipe", "modern", "--max_lr", 0.02, "--eval_every", 0)
    script(*train_args(shards, whole, 12, *recipe, "--save_every", 6, "--keep_last", 2))
    sixth = whole / "checkpoints/model_step_000006.pt"
    args = train_args(shards, resumed, 12, *recipe, "--resume", sixth)
    bad([*args, "--recipe", "modern,optimizer=adamw"], "the state of another optimizer")
    script(*args)
    assert same_run(resumed, whole)


@pytest.mark.parametrize(
    "sharding, dtype, far",
    [
        ("zero2", "float32", 1e-4),
        slow("none", "float32", 1e-4),
        slow("zero3", "bfloat16", 1e-2),
    ],
)
def test_unequal_shares_step_alike(shards, tmp_path, sharding, dtype, far):
    """On three processes 32 rows are 11, 11 and 10, and two matrices of a kind 1, 1 and 0."""
    more = ("--recipe", "modern", "--max_lr", 0.02, "--dtype", dtype, "--eval_every", 0)
    more += ("--total_batch_size", 768)
    script(*train_args(shards, tmp_path / "one", 6, *more))
    torchrun(3, *train_args(shards, tmp_path / "three", 6, *more, "--sharding", sharding))
    assert gap(tmp_path / "three", tmp_path / "one") < far and len(losses(tmp_path / "three")) == 6


def test_a_wsd_run_goes_on_from_before_its_decay_as_if_it_had_been_longer(shards, tmp_path):
    short, longer, whole = (tmp_path / name for name in ("short", "longer", "whole"))
    wsd = ("--schedule", "wsd", "--dropout", 0.1, "--eval_every", 0)
    script(*train_args(shards, short, 10, *wsd, "--save_every", 8, "--keep_last", 2))
    assert read_metrics(short)["train"][-1]["lr"] < 1e-3
    stable = short / "checkpoints/model_step_000008.pt"  # the decay takes the last two steps
    script(*train_args(shards, longer, 14, "--resume", stable))
    script(*train_args(shards, whole, 14, *wsd))
    assert same_run(longer, whole)


def test_help_lists_the_fields_of_a_recipe_and_their_values(capsys):
    with pytest.raises(SystemExit):
        parse(TrainOptions, ["--help"])
    text = capsys.readouterr().out.partition("--recipe")[2].partition("--model_type")[0]
    words = set(re.findall(r"\w+", text))
    for field in (*fields(Recipe), *fields(GPTConfig)):
        if field.name not in ("model", *NOT_IN_RECIPES):
            assert field.name in words
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            assert words.issuperset(choices), field.name
    assert words.issuperset(MATRIX_OPTIMIZERS) and words.issuperset(RECIPES)
