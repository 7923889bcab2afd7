"""The loss and metrics of each method on tiny models, against the objectives by hand."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenizer import ByteTokenizer
from finetune import METHODS, train_step
from finetuning.answers import Questions
from finetuning.completions import Completion, decode_completion
from finetuning.examples import Batch, Example, TextEncoder
from finetuning.methods import Method
from finetuning.objectives import group_advantages
from finetuning.options import FinetuneConfig
from finetuning.rewards import RewardModel, load_reward, rate
from model.config import GPTConfig
from model.gpt import GPT
from training.run import TrainState
from utils.distributed import Process

BYTES = ByteTokenizer()
CPU = Process(0, 1, torch.device("cpu"))
PAIRS = [
    {"prompt": "2+3=", "chosen": "5", "rejected": "six"},
    {"prompt": "10+20=", "chosen": "30", "rejected": "3"},
    {"prompt": "7+7=", "chosen": "fourteen", "rejected": "4"},
    {"prompt": "0=", "chosen": "0", "rejected": "0!"},
]
LETTERS = [{"prompt": "a" * n, "completion": "b" * n} for n in (3, 9, 5, 25, 12, 28, 1)]


@pytest.fixture
def make(tmp_path):
    """A function that makes a method on rows of plain text."""

    def make_method(name: str, rows=PAIRS, reference=None, reward=None, **options) -> Method:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"batch_size": len(rows), "micro_batch_size": 2, "reward": "function"} | options
        config = FinetuneConfig(init_from="a", data=path, method=name, **given)
        encoder = TextEncoder(BYTES, False, 64)
        return METHODS[name](config, CPU, torch.float32, encoder, reference, reward, path)

    return make_method


def make_model(seed: int = 0, kind: type[GPT] = GPT, **shape) -> GPT:
    """A tiny model whose output differs from token to token."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 64, "vocab_size": 257}
    model = kind(GPTConfig(**sizes | shape))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def logprobs_by_hand(model: GPT, example: Example) -> Tensor:
    """Log-probability of each token that counts in the loss, from plain logits."""
    tokens = torch.from_numpy(example.tokens.astype(np.int64))
    logprobs = F.log_softmax(model(tokens[None, :-1])[0], -1)
    picked = logprobs.gather(1, tokens[1:, None])[:, 0]
    return picked[torch.from_numpy(example.loss_mask[1:])]


def sum_means(method: Method, model: GPT, batches: list[Batch], divisor: int) -> dict[str, Tensor]:
    """The means over a step, from the parts of its batches."""
    means: dict[str, Tensor] = {}
    for batch in batches:
        for name, part in method.partial_means(model, batch, divisor).items():
            means[name] = means.get(name, 0) + part
    return means


def step_means(method: Method, model: GPT) -> dict[str, Tensor]:
    """The means of one step on all examples."""
    prepared = method.prepare(model, 0, np.arange(len(method)))
    return sum_means(method, model, prepared.batches, prepared.divisor)


@pytest.mark.parametrize(
    ("world_size", "shape"), [(1, {}), (3, {"position": "rotary", "ngrams": 3})]
)
@pytest.mark.parametrize(("micro_batch_size", "compiled"), [(1, False), (2, False), (4, True)])
def test_packed_dialogs_have_the_loss_of_each_alone_for_all_slicings(
    make, world_size, shape, micro_batch_size, compiled
):
    """Processes have equally many batches, none larger than --micro_batch_size rows."""
    model = make_model(**shape).eval()
    ids = np.array([4, 0, 6, 2, 5])  # 103 inputs, which two rows of 64 hold
    options = {"use_torch_compile": compiled, "micro_batch_size": micro_batch_size}
    method = make("sft", LETTERS, **options)
    assert len(method.items([method.examples[i] for i in ids])) == 2
    total = 0.0
    shapes = set()
    for rank in range(world_size):
        method.process = Process(rank, world_size, torch.device("cpu"))
        prepared = method.prepare(model, 0, ids)
        shapes.add((len(prepared.batches), *{len(batch.idx) for batch in prepared.batches}))
        for batch in prepared.batches:
            assert batch.idx.shape[0] <= micro_batch_size and batch.idx.shape[1] <= 64
        total += sum_means(method, model, prepared.batches, prepared.divisor)["loss"]
    assert len(shapes) == 1
    alone = torch.cat([-logprobs_by_hand(model, method.examples[i]) for i in ids])
    torch.testing.assert_close(total, alone.mean())


def test_dpo_scores_the_texts_by_the_reference_once(make):
    reference = make_model(1).requires_grad_(False)
    method = make("dpo", reference=reference, beta=0.3)
    for pair in method.examples:
        texts = (pair.chosen, pair.rejected)
        by_hand = torch.stack([logprobs_by_hand(reference, text).sum() for text in texts])
        torch.testing.assert_close(pair.ref_logprobs, by_hand)
    means = step_means(method, reference)  # a model that equals its reference has no preference
    assert means["loss"].item() == pytest.approx(math.log(2), abs=1e-5)
    assert means["accuracy"] == 0


def test_a_reward_is_read_at_the_last_token(make):
    model = make_model(3, RewardModel).requires_grad_(False)
    method = make("reward")

    def by_hand(example: Example) -> Tensor:
        return model(torch.from_numpy(example.tokens.astype(np.int64))[None])[0, -1, 0]

    chosen = torch.stack([by_hand(pair.chosen) for pair in method.examples])
    rejected = torch.stack([by_hand(pair.rejected) for pair in method.examples])
    torch.testing.assert_close(step_means(method, model)["margin"], (chosen - rejected).mean())
    completions = [Completion({}, "", pair.chosen) for pair in method.examples]
    rewards = rate(model, CPU, torch.float32, completions)
    torch.testing.assert_close(torch.tensor(rewards), chosen)


def test_grpo_rewards_what_it_samples_and_scores_it_by_both_models(make):
    """A completion ends with end of text unless it is as long as a completion may be."""
    reference, model = make_model(4), make_model(5)
    with torch.no_grad():  # so that some completions end early
        model.transformer.wte.weight[BYTES.eot] *= 4
    completions: list[Completion] = []

    def reward(written: list[Completion]) -> list[float]:
        completions.extend(written)
        return [len(set(x.text)) + x.text.count("a") / 7 for x in written]

    options = {"group_size": 4, "max_new_tokens": 12, "updates": 2, "micro_batch_size": 8}
    method = make("grpo", reference=reference, reward=reward, **options)
    prepared = method.prepare(model, 0, np.arange(4))
    advantages = group_advantages(torch.tensor(reward(completions[:16])).view(4, 4)).flatten()
    assert {x.is_cut for x in completions} == {False, True}
    assert prepared.metrics["cut"] == np.mean([x.is_cut for x in completions[:16]])
    for i, completion in enumerate(completions[:16]):
        ids = completion.example.tokens[completion.example.loss_mask].tolist()
        assert len(ids) == 12 or not completion.is_cut
        if not completion.is_cut:
            assert ids.pop() == BYTES.eot
        assert BYTES.eot not in ids
        assert decode_completion(ids, method.encoder) == completion.text

        batch, row = prepared.batches[i // 8], i % 8
        torch.testing.assert_close(batch.advantages[row], advantages[i])
        is_target = batch.targets[row] >= 0
        for scorer, scored in ((reference, batch.ref_logprobs), (model, batch.old_logprobs)):
            by_hand = logprobs_by_hand(scorer, completion.example)
            torch.testing.assert_close(scored[row][is_target], by_hand)


def test_a_step_counts_once_and_says_how_many_updates_were_applied(make, monkeypatch):
    """Here the second of two updates is never finite. Without a reference there is no kl."""
    method = make(
        "grpo", PAIRS[:1], reward=lambda written: [len(x.text) for x in written],
        group_size=2, max_new_tokens=4, kl=0.0, updates=2, max_steps=9, warmup_steps=0, max_lr=1e-3,
    )  # fmt: skip
    partial_means = method.partial_means
    factors = [1.0, math.nan] * 3

    def second_is_not_finite(*args) -> dict[str, Tensor]:
        return {"loss": partial_means(*args)["loss"] * factors.pop(0)}

    monkeypatch.setattr(method, "partial_means", second_is_not_finite)
    model, state = make_model(8), TrainState()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr_scale": 1.0}])
    process = replace(CPU, stop=SimpleNamespace(signal=0))
    run = SimpleNamespace(config=method.config, process=process, dtype=torch.float32, state=state)
    for step in (1, 2, 3):
        prepared = method.prepare(model, step, np.arange(1))
        assert list(partial_means(model, prepared.batches[0], 2)) == ["loss"]
        result = train_step(run, model, [optimizer], method, prepared)
        assert result.figures["updates"] == 1 and math.isfinite(result.figures["loss"])
        assert "loss nan" in result.skip_reason
        assert state.step == state.bad_steps == step


@pytest.mark.parametrize("end_ids, exact", [([], 0.0), ([ord("!")], 1.0)])
def test_a_cut_answer_is_not_exact(tmp_path, end_ids, exact):
    """A model that writes "aaaa!!!!" gives the answer "aaaa" only if it ends there."""
    model = make_model(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.bias[0] = 1.0
        model.transformer.wte.weight[ord("a"), 0] = 1.0
        # the fifth token follows the end of text and the prompt's letter at position 5
        model.transformer.wpe.weight[5, 1] = 10.0
        model.transformer.ln_f.weight[1] = 10.0
        model.transformer.wte.weight[ord("!"), 1] = 1.0
    tokenizer = ByteTokenizer()
    tokenizer.end_ids = frozenset([256, *end_ids])
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "b", "answer": "aaaa"}')
    encoder = TextEncoder(tokenizer, False, 64)
    reward = load_reward("exact", encoder, CPU, torch.float32)
    for longest in (4, 8):
        questions = Questions(path, encoder, CPU, torch.float32, longest, 1)
        (result,), (row,) = questions.score(model)
        assert result.value == (exact if longest == 8 else 0.0)
        assert row["cut"] == (longest == 4 or not end_ids)
        assert reward(questions.answers(model)) == [result.value]
