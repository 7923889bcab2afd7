from dataclasses import replace

import pytest
import torch
from conftest import user_error, write_rows

from config import TrainOptions
from data.loader import Mixture
from model.config import GPTConfig
from model.generate import TOKENS_PER_CHECK
from model.gpt import GPT
from training import evaluator
from training.evaluator import Evaluator
from utils.distributed import ALONE, Process, Stopped
from utils.errors import UserError


@pytest.fixture
def make(shards, tmp_path):
    rows = [{"text": f"the cat {i}"} for i in range(12)]
    config = TrainOptions(
        max_steps=7, eval_every=3, sample_every=2, val_tokens=320, micro_batch_size=4,
        lambada_every=5, lambada_data=write_rows(tmp_path / "lambada.jsonl", rows),
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=257, n_layer=1, n_head=2, n_embd=16))
    val = Mixture([shards], "val", 32)
    return lambda **options: Evaluator(replace(config, **options), model, val, ALONE)


def due_steps(evaluator):
    """Return the steps of validation, benchmarks and samples."""
    validation = [step for step in range(8) if evaluator.due(step)]
    benchmarks = [step for step in range(8) if list(evaluator.due_benchmarks(step))]
    return validation, benchmarks, [step for step in range(8) if evaluator.sample(step) is not None]


def test_each_part_is_due_at_its_interval_and_at_the_last_step(make):
    assert due_steps(make()) == ([0, 3, 6, 7], [0, 5, 7], [2, 4, 6, 7])
    assert due_steps(make(eval_every=0, sample_every=0, lambada_every=0)) == ([7], [], [])


def test_a_benchmark_that_the_context_is_too_short_for_ends_the_run_before_its_first_step(
    make, tmp_path
):
    (tmp_path / "long.jsonl").write_text(f'{{"text": "a {"b" * 40}"}}')
    with user_error("--lambada_every .* has 41 tokens.* at most 32 fit"):
        make(lambada_data=tmp_path / "long.jsonl")


def test_figures_are_repeatable_and_the_model_keeps_training(make, monkeypatch):
    full = make()
    scores = full.validate()
    assert full.validate() == scores and set(scores) == {"loss", "bits_per_byte", "n"}
    monkeypatch.setattr(evaluator, "SUBSET_EXAMPLES", 5)
    for options, n in (({}, 5), ({"eval_full": True}, 12)):
        ((task, metrics),) = make(**options).due_benchmarks(5)
        assert task == "lambada" and list(metrics) == ["n", "acc", "perplexity"]
        assert metrics["n"] == n
    sample = full.sample(2)
    assert sample == full.sample(2) != full.sample(4)
    assert full.scorer.model.training
    monkeypatch.setattr(full.tokenizer, "bos_ids", (65,))  # begins each document
    assert full.sample(2) != sample


def test_a_sample_ends_on_all_processes_together(make, monkeypatch):
    """Its forward passes can be collectives: one that is done goes on with the others."""
    asked = []
    monkeypatch.setattr(Process, "all_done", lambda self, done: asked.append(done))
    make().sample(2)
    assert len(asked) == 32 / TOKENS_PER_CHECK


def test_all_processes_score_equally_many_batches(monkeypatch):
    """Their forward passes can be collectives: the last batch is scored twice and counts once."""
    own = []  # outputs of each process

    def gather(shares, outputs):
        own.append(dict(outputs))
        shares[:] = [dict(enumerate("ABCD"))]

    meetings = []  # before each item: none waits for all items of another at the end
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: meetings.append(None))
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    for rank in range(3):
        process = replace(ALONE, data_rank=rank, data_parallel=3)
        assert process.map_across_processes(str.upper, "abcd") == list("ABCD")
    assert own == [{0: "A", 3: "D"}, {1: "B", 3: "D"}, {2: "C", 3: "D"}]
    assert len(meetings) == 3 * 2  # two items each


class Signal:
    """Comes at the second look at it."""

    looks = 0

    @property
    def signal(self):
        self.looks += 1
        return 15 if self.looks > 1 else 0


@pytest.mark.parametrize("part", ["validate", "due_benchmarks", "sample"])
def test_a_signal_ends_each_part_at_its_next_batch(make, part):
    evaluator = make(micro_batch_size=1)
    process = replace(ALONE, stop=Signal())
    evaluator.scorer.process = process
    arguments = [] if part == "validate" else [10]
    with pytest.raises(Stopped):
        list(getattr(evaluator, part)(*arguments))
    assert process.stop.looks == 2


def test_without_a_tokenizer_the_validation_is_left(make, monkeypatch, capsys):
    def load_tokenizer(name):
        raise UserError("no vocabulary")

    monkeypatch.setattr(evaluator, "load_tokenizer", load_tokenizer)
    bare = make()
    assert "no vocabulary; so there are no samples" in capsys.readouterr().out
    assert bare.validate() and not list(bare.due_benchmarks(7)) and bare.sample(7) is None
