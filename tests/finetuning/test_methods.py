"""What each method computes from its rows with tiny models, against log-probabilities by hand."""

import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import user_error, write_rows
from torch.amp import GradScaler

from data.named_tokenizer import ByteTokenizer
from finetune import METHODS, train_step
from finetuning.completions import Completion
from finetuning.examples import TextEncoder
from finetuning.grpo import group_advantages
from finetuning.options import FinetuneOptions, resolve_options
from finetuning.rewards import load_reward_function
from model.config import GPTConfig
from model.gpt import GPT
from training.run import Progress
from utils.distributed import ALONE, Process

BYTES = ByteTokenizer()
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

    def make_method(name, rows=PAIRS, reference=None, reward_function=None, **options):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        given = {"batch_size": len(rows), "micro_batch_size": 2, "reward": "function"} | options
        given_options = FinetuneOptions(init_from="a", data=path, method=name, **given)
        encoder = TextEncoder(BYTES, False, 64)
        return METHODS[name](given_options, ALONE, encoder, reference, reward_function)

    return make_method


def make_model(seed=0):
    """A tiny model whose output differs from token to token."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(64, 257, 2, 2, 16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def logprobs_by_hand(model, example):
    """Log-probability of each token that counts in the loss, from plain logits."""
    tokens = torch.from_numpy(example.tokens.astype(np.int64))
    logprobs = F.log_softmax(model(tokens[None, :-1])[0], -1)
    picked = logprobs.gather(1, tokens[1:, None])[:, 0]
    return picked[torch.from_numpy(example.loss_mask[1:])]


def step_mean(method, model, name):
    """The mean of a metric of one step on all examples, or what a process adds to it."""
    prepared = method.prepare(model, 0, np.arange(len(method.examples)))
    sums = [method.metric_sums(model, batch)[name] for batch in prepared.batches]
    return sum(sums) / prepared.divisor


@pytest.mark.parametrize("micro_batch_size, world_size", [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_sft_has_the_loss_of_each_dialog_alone_for_all_slicings(make, micro_batch_size, world_size):
    model = make_model()
    method = make("sft", LETTERS, micro_batch_size=micro_batch_size)
    loss = 0.0
    for rank in range(world_size):
        method.process = Process(rank, world_size, torch.device("cpu"))
        loss += step_mean(method, model, "loss")
    by_hand = torch.cat([-logprobs_by_hand(model, dialog) for dialog in method.examples])
    torch.testing.assert_close(loss, by_hand.mean())


def test_dialogs_of_one_length_share_a_micro_batch_of_sft(make):
    method = make("sft", LETTERS)
    prepared = method.prepare(make_model(), 0, np.arange(8))
    assert [batch.idx.shape for batch in prepared.batches] == [(2, 8), (2, 24), (2, 40), (2, 64)]


def test_dpo_asks_the_reference_for_log_probabilities_once(make):
    reference = make_model(1).requires_grad_(False)
    method = make("dpo", reference=reference, beta=0.3)
    for pair in method.examples:
        examples = (pair.chosen, pair.rejected)
        by_hand = torch.stack([logprobs_by_hand(reference, x).sum() for x in examples])
        torch.testing.assert_close(pair.ref_logprobs, by_hand)
    assert step_mean(method, reference, "accuracy") == 0  # equal models: a tie is wrong


def test_grpo_rewards_what_it_samples_and_asks_the_reference_for_log_probabilities(make):
    """A completion ends with end of text unless it is as long as a completion may be."""
    reference, model = make_model(4), make_model(6)
    with torch.no_grad():  # so that some completions end early
        model.transformer.wte.weight[BYTES.eot] *= 4
    completions: list[Completion] = []

    def reward_function(written):
        completions.extend(written)
        return [float(len(set(x.text))) for x in written]

    options = {"group_size": 4, "max_new_tokens": 12, "micro_batch_size": 8}
    method = make("grpo", reference=reference, reward_function=reward_function, **options)
    completions.clear()  # the first call tried the function on a row's answer
    prepared = method.prepare(model, 0, np.arange(4))
    assert prepared.metrics["cut"] == np.mean([x.is_cut for x in completions]) not in (0, 1)
    rewards = torch.tensor(reward_function(completions[:]))
    advantages = group_advantages(rewards.view(4, 4)).view(2, 8)
    num_values = np.array([len(set(group)) for group in rewards.view(4, 4).tolist()])
    assert prepared.metrics["equal_rewards"] == (num_values == 1).mean()
    for i, completion in enumerate(completions[:16]):
        batch, row = prepared.batches[i // 8], i % 8
        ids = completion.example.tokens[completion.example.loss_mask]
        assert (ids == BYTES.eot).nonzero()[0].tolist() == [len(ids) - 1][completion.is_cut :]
        assert len(ids) == 12 or not completion.is_cut
        torch.testing.assert_close(batch.advantages, advantages[i // 8])
        by_hand = logprobs_by_hand(reference, completion.example)
        torch.testing.assert_close(batch.ref_logprobs[row][batch.targets[row] >= 0], by_hand)


def make_run(method, model, **scaling):
    """Return what train_step needs of a run, and an optimizer of the model in a list."""
    options = resolve_options(method.options, 9, 9, 1)
    process = replace(method.process, stop=SimpleNamespace(signal=0))
    run = SimpleNamespace(options=options, process=process, progress=Progress())
    run.scaler = GradScaler("cpu", **scaling)
    return run, [torch.optim.SGD([{"params": model.parameters(), "lr_scale": 1.0}])]


def test_steps_in_a_row_that_are_not_finite_count_and_change_no_weight(make):
    method = make("sft", LETTERS, max_steps=9, warmup_steps=0, max_lr=1e-3)
    model = make_model()
    run, optimizers = make_run(method, model, init_scale=2.0**10)  # as in float16
    state = run.progress
    for divisor in (0, 100, 0, 0):
        prepared = replace(method.prepare(model, 0, np.arange(8)), divisor=divisor)
        before = model.head_weight.clone()
        if divisor:
            nats = torch.cat([logprobs_by_hand(model, x) for x in method.examples]).sum() / divisor
            gradients = torch.autograd.grad(nats, list(model.parameters()))
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        result = train_step(run, model, optimizers, method, prepared)
        state.advance(result)
        assert not divisor or result.metrics["grad_norm"] == pytest.approx(norm.item())
        assert (result.skip_reason is not None) == before.equal(model.head_weight) == (divisor == 0)
    assert (state.step, state.bad_steps) == (4, 2)
    assert Progress.start(asdict(state)) == state


@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_pairs_of_the_same_tokens_are_refused_and_counted(make, method):
    """Equal as they are, and equal after the cut to 64 tokens."""
    same = {"prompt": "a", "chosen": "b", "rejected": "b"}
    cut = {"prompt": "a" * 60, "chosen": "bbbbb", "rejected": "bbbb"}
    with user_error("line 2: .*the same 4 tokens.*; and 2 more rows .*: lines 4, 5$"):
        make(method, [PAIRS[0], same, PAIRS[1], cut, same], make_model(1))


def test_one_forward_pass_casts_no_weight_twice_and_keeps_no_copy(make):
    """In a step, in an evaluation, and by the reference model."""
    method = make("dpo", reference=make_model(1), dtype="bfloat16")
    seen = []

    class Spy(GPT):
        def forward(self, *args, **kwargs):
            casts = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
            seen.append((*casts, torch.is_autocast_cache_enabled()))
            return super().forward(*args, **kwargs)

    model = Spy(make_model().config)
    method.process = replace(ALONE, dtype=torch.bfloat16)
    method.held_out = method.examples
    method.evaluate(model)
    method.reference = model
    method.reference_logprobs(method.examples)
    run, optimizers = make_run(method, model, enabled=False)
    train_step(run, model, optimizers, method, method.prepare(model, 0, np.arange(4)))
    assert len(seen) == 2 + 1 + 2 and set(seen) == {(True, torch.bfloat16, False)}


def test_rewards_may_take_longer_than_a_collective(monkeypatch):
    """The processes meet while the function runs in the main thread, until all are done."""
    answers = iter([False, False, True])
    threads = []

    def all_agree(self, is_done):
        threads.append(threading.current_thread())
        return next(answers)

    monkeypatch.setattr(Process, "all_agree", all_agree)
    with ALONE.without_timeout():
        while not threads:
            time.sleep(0.001)
    assert len(threads) == 3 and threading.main_thread() not in threads
    assert next(answers, None) is None


@pytest.mark.parametrize(
    "text, is_cut, reward", [(" 4\n", False, 1), ("4", True, 0), ("44", False, 0)]
)
def test_an_answer_is_exact_unless_it_is_cut(text, is_cut, reward):
    completion = Completion({"prompt": "2+2?", "answer": 4}, text, None, is_cut)
    assert load_reward_function("exact", None, ALONE)([completion]) == [reward]


@pytest.mark.parametrize("reward", [0.1, 1e8 + 0.1])
def test_equal_rewards_have_no_advantage(reward):
    """Also where their mean is rounded to another number."""
    rewards = torch.full((2, 7), reward, dtype=torch.float64)
    rewards[1] += torch.arange(7)
    equal, growing = group_advantages(rewards)
    assert not equal.any() and growing[0] < 0 < growing[-1]
