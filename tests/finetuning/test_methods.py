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
from finetuning.examples import Example, TextEncoder
from finetuning.grpo import group_advantages
from finetuning.methods import Method
from finetuning.options import FinetuneConfig
from finetuning.rewards import RewardModel, load_reward_function, rate
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
LETTERS = [{"prompt": "a" * n, "completion": "b" * n} for n in (3, 9, 5, 25, 12, 28, 1, 18)]


@pytest.fixture
def make(tmp_path):
    """A function that makes a method on rows of plain text."""

    def make_method(
        name: str, rows=PAIRS, reference=None, reward_function=None, **options
    ) -> Method:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"batch_size": len(rows), "micro_batch_size": 2, "reward": "function"} | options
        config = FinetuneConfig(init_from="a", data=path, method=name, **given)
        encoder = TextEncoder(BYTES, False, 64)
        return METHODS[name](config, CPU, torch.float32, encoder, reference, reward_function, path)

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


def step_means(method: Method, model: GPT) -> dict[str, Tensor]:
    """The means of one step on all examples, or the part of them that a process has."""
    prepared = method.prepare(model, 0, np.arange(len(method.examples)))
    means: dict[str, Tensor] = {}
    for batch in prepared.batches:
        for name, value in method.metric_sums(model, batch).items():
            means[name] = means.get(name, 0) + value / prepared.divisor
    return means


@pytest.mark.parametrize("micro_batch_size, world_size", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_sft_has_the_loss_of_each_dialog_alone_for_all_slicings(make, micro_batch_size, world_size):
    """The mean is that over all targets, and dialogs of one length stand together."""
    model = make_model().eval()
    method = make("sft", LETTERS, micro_batch_size=micro_batch_size)
    loss = 0.0
    num_tokens = 0
    for rank in range(world_size):
        method.process = Process(rank, world_size, torch.device("cpu"))
        loss += step_means(method, model)["loss"]
        batches = method.prepare(model, 0, np.arange(len(method.examples))).batches
        assert {len(batch.idx) for batch in batches} == {micro_batch_size}
        num_tokens += sum(batch.idx.numel() for batch in batches)
    alone = torch.cat([-logprobs_by_hand(model, dialog) for dialog in method.examples])
    torch.testing.assert_close(loss, alone.mean())
    assert num_tokens <= 8 * (8 + 8 + 16 + 24 + 32 + 40 + 56 + 64) / 4


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


def test_grpo_rewards_what_it_samples_and_scores_it_by_the_reference(make):
    """A completion ends with end of text unless it is as long as a completion may be."""
    reference, model = make_model(4), make_model(5)
    with torch.no_grad():  # so that some completions end early
        model.transformer.wte.weight[BYTES.eot] *= 4
    completions: list[Completion] = []

    def reward(written: list[Completion]) -> list[float]:
        completions.extend(written)
        return [len(set(x.text)) + x.text.count("a") / 7 for x in written]

    options = {"group_size": 4, "max_new_tokens": 12, "micro_batch_size": 8}
    method = make("grpo", reference=reference, reward_function=reward, **options)
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
        by_hand = logprobs_by_hand(reference, completion.example)
        torch.testing.assert_close(batch.ref_logprobs[row][is_target], by_hand)


def test_a_step_that_is_not_finite_counts_and_changes_no_weight(make, monkeypatch):
    """Without a reference, grpo has no kl."""
    method = make(
        "grpo", PAIRS[:1], reward_function=lambda written: range(len(written)),
        group_size=2, max_new_tokens=4, kl=0.0, max_steps=9, warmup_steps=0, max_lr=1e-3,
    )  # fmt: skip
    metric_sums = method.metric_sums
    factors = [1.0, math.nan, math.nan]
    monkeypatch.setattr(
        method, "metric_sums", lambda *args: {"loss": metric_sums(*args)["loss"] * factors.pop(0)}
    )
    model, state = make_model(8), TrainState()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr_scale": 1.0}])
    process = replace(CPU, stop=SimpleNamespace(signal=0))
    run = SimpleNamespace(config=method.config, process=process, dtype=torch.float32, state=state)
    for step in (1, 2, 3):
        prepared = method.prepare(model, step, np.arange(1))
        assert list(metric_sums(model, prepared.batches[0])) == ["loss"]
        before = model.head_weight.clone()
        result = train_step(run, model, [optimizer], method, prepared)
        assert (result.skip_reason is None) == (step == 1) == (not before.equal(model.head_weight))
        assert (state.step, state.bad_steps) == (step, step - 1)


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
    reward_function = load_reward_function("exact", encoder, CPU, torch.float32)
    for longest in (4, 8):
        questions = Questions(path, encoder, CPU, torch.float32, longest, 1)
        (result,), (row,) = questions.score(model)
        assert result.value == (exact if longest == 8 else 0.0)
        assert row["cut"] == (longest == 4 or not end_ids)
        assert reward_function(questions.answers(model)) == [result.value]
