from dataclasses import replace
from functools import partial

import pytest
import torch

from config import TrainConfig
from data.loader import Sequences, TokenStream
from data.tokenizer import load_tokenizer
from evaluation.periodic import (
    Evaluator,
    evenly_spaced_subset,
    load_tokenizer_on_all,
    read_benchmarks,
)
from model.config import GPTConfig
from model.gpt import GPT
from utils.distributed import Process

ALONE = Process(0, 0, 1, torch.device("cpu"))
CONFIG = TrainConfig(
    max_steps=7, eval_every=3, sample_every=2, lambada_every=5, val_tokens=320, micro_batch_size=4
)
ROWS = {"lambada": [{"text": f"the cat {i}"} for i in range(9)]}


@pytest.fixture(scope="module")
def evaluator(shards):
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=257, n_layer=1, n_head=2, n_embd=16))
    val = Sequences(TokenStream(shards, "val"), 32)
    return partial(Evaluator, CONFIG, model, val, process=ALONE, dtype=torch.float32)


def test_each_part_is_due_at_its_interval_and_at_the_last_step(evaluator):
    full = evaluator(tokenizer=load_tokenizer("bytes"), benchmark_rows=ROWS)
    assert [step for step in range(8) if full.due(step)] == [0, 3, 6, 7]
    assert [step for step in range(8) if list(full.benchmarks(step))] == [0, 5, 7]
    assert [step for step in range(8) if full.sample(step) is not None] == [0, 2, 4, 6, 7]
    never = replace(full, config=replace(CONFIG, eval_every=0, sample_every=0))
    assert [step for step in range(8) if never.due(step)] == [7] and never.sample(7) is None


def test_figures_are_repeatable_and_the_model_keeps_training(evaluator):
    full = evaluator(tokenizer=load_tokenizer("bytes"), benchmark_rows=ROWS)
    assert full.validate() == full.validate() and set(full.validate()) == {"loss", "bits_per_byte"}
    ((task, figures),) = full.benchmarks(5)
    assert task == "lambada" and figures["n"] == 9 and 0 <= figures["acc"] <= 1
    assert full.sample(2) == full.sample(2) != full.sample(4)
    assert full.model.training


def test_without_a_tokenizer_only_the_loss_is_left(evaluator):
    bare = evaluator(tokenizer=None, benchmark_rows=ROWS)
    assert set(bare.validate()) == {"loss"}
    assert not list(bare.benchmarks(7)) and bare.sample(7) is None


def test_a_missing_tokenizer_is_noted():
    notes = []
    assert load_tokenizer_on_all("none", ALONE, notes) is None and "goes without" in notes[0]
    assert load_tokenizer_on_all("bytes", ALONE, notes).name == "bytes" and len(notes) == 1


def test_benchmarks_are_subsets_unless_full(tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(f'{{"text": "the cat {i}"}}\n' for i in range(1200)))
    config = replace(CONFIG, lambada_data=path)
    rows = read_benchmarks(config, ALONE)["lambada"]
    assert (
        len(rows) == 500 and rows[0]["text"] == "the cat 0" and rows[-1]["text"] == "the cat 1199"
    )
    assert len(read_benchmarks(replace(config, eval_full=True), ALONE)["lambada"]) == 1200
    assert evenly_spaced_subset(rows[:3], 5) == rows[:3]
