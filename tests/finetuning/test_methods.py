"""The figures of each method on tiny models, against the objectives by hand."""

import copy
import itertools
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
from finetune import train_step
from finetuning.answers import Questions
from finetuning.chat import Example, decode_completion, encode_completion
from finetuning.examples import TextEncoder, collate_padded, packed_mask
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import DirectPreference, Method, RewardModeling, SupervisedTuning
from finetuning.objectives import group_advantages, grpo_losses, mean_over_tokens
from finetuning.options import FinetuneConfig
from finetuning.rewards import Completion, RewardModel, load_reward, rate
from model.config import GPTConfig
from model.gpt import GPT
from training.run import TrainState
from utils.distributed import Process

BYTES = ByteTokenizer()
TEXTS = [("2+3=", "5", "six"), ("10+20=", "30", "3"), ("7+7=", "fourteen", "4"), ("0=", "0", "0!")]
ROWS = [dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)) for texts in TEXTS]


LETTERS = [{"prompt": "a" * n, "completion": "b" * n} for n in (3, 9, 5, 25, 12, 28, 1)]


@pytest.fixture
def make(tmp_path):
    """A function that makes a method on rows of plain text."""

    def make_method(kind: type[Method], rows=ROWS, compared=(None, None), **options) -> Method:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths = {"init_from": "a", "data": path, "method": "sft"}
        config = FinetuneConfig(micro_batch_size=3, **paths, **options)
        process = Process(0, 1, torch.device("cpu"))
        run = SimpleNamespace(config=config, process=process, dtype=torch.float32)
        return kind(run, TextEncoder(BYTES, False, 64), path, *compared)

    return make_method


def make_model(seed: int = 0, kind: type[GPT] = GPT, **shape) -> GPT:
    """A tiny model whose output differs from token to token."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 64, "vocab_size": 257}
    model = kind(GPTConfig(**sizes | shape))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def logprob(model: GPT, prompt: str, completion: str) -> Tensor:
    """Log-probability of a completion and its end of text, from plain logits."""
    tokens = torch.tensor([BYTES.eot, *prompt.encode(), *completion.encode(), BYTES.eot])
    found = F.log_softmax(model(tokens[None, :-1])[0], -1)
    picked = found.gather(1, tokens[1:, None])[:, 0]
    return picked[len(prompt) :].sum()


def means(method: Method, model: GPT) -> tuple[dict, list, dict[str, Tensor]]:
    """Figures for the log of one step on all examples, its batches, and the means of a step."""
    ids, options = np.arange(len(method)), method.options
    options.batch_size, options.method = len(ids), "grpo" if method.unit == "prompts" else "dpo"
    options.micro_batch_size = options.items_per_step // 2
    batches, figures = method.micro_batches(model, 0, ids)
    parts = [method.partial_means(model, batch, method.divisor(ids)) for batch in batches]
    return figures, batches, {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("ngrams, position", [(1, "learned"), (3, "rotary")])
def test_packed_examples_do_not_see_each_other(make, ngrams, position):
    model = make_model(position=position, ngrams=ngrams).eval()
    method = make(SupervisedTuning, LETTERS[:3])
    (batch,), _ = method.micro_batches(model, 0, np.arange(3))
    assert batch["idx"].shape == (1, 40)  # 37 inputs in one row
    mask = packed_mask(batch["part"])
    where = {"positions": batch["positions"], "mask": mask}
    losses = model(batch["idx"], batch["targets"], **where, reduction="none").flatten()
    apart = torch.cat([losses_alone(model, example) for example in method.pack_rows(range(3))[0]])
    torch.testing.assert_close(losses[: len(apart)], apart)
    assert losses[len(apart) :].eq(0).all()
    # what is trained on is the mean over the targets, of which each completion has n + 1
    loss = method.partial_means(model, batch, method.divisor(np.arange(3)))["loss"]
    torch.testing.assert_close(loss, apart.sum() / (4 + 10 + 6))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size, compiled", [(1, False), (2, False), (4, True)])
def test_a_step_of_dialogs_has_one_loss_for_all_slicings(
    make, world_size, micro_batch_size, compiled
):
    """Its processes have equally many batches, none larger than --micro_batch_size rows."""
    model = make_model().eval()
    ids = np.array([4, 0, 6, 2, 5])
    total, shapes = 0.0, set()
    for rank in range(world_size):
        method = make(SupervisedTuning, LETTERS, use_torch_compile=compiled)
        method.process = Process(rank, world_size, torch.device("cpu"))
        method.options.micro_batch_size = micro_batch_size
        batches, _ = method.micro_batches(model, 0, ids)
        shapes.add((len(batches), *{len(batch["idx"]) for batch in batches}))
        for batch in batches:
            assert batch["idx"].shape[0] <= micro_batch_size and batch["idx"].shape[1] <= 64
            total += method.partial_means(model, batch, method.divisor(ids))["loss"]
    assert len(shapes) == 1
    alone = torch.cat([losses_alone(model, method.examples[i]) for i in ids])
    torch.testing.assert_close(total, alone.sum() / (alone != 0).sum())


def losses_alone(model: GPT, example: Example) -> Tensor:
    """The loss of each token of an example in a row of its own."""
    one = collate_padded([example], 64)
    return model(one["idx"], one["targets"], reduction="none")[0, : len(example.tokens) - 1]


def test_dpo_compares_with_the_reference(make):
    reference, model = make_model(1), make_model(2)
    method = make(DirectPreference, compared=(reference, None), beta=0.3)
    by_hand = [[logprob(reference, p, side[i]).item() for p, *side in TEXTS] for i in (0, 1)]
    torch.testing.assert_close(method.reference.float(), torch.tensor(by_hand))
    assert means(method, reference)[2]["loss"].item() == pytest.approx(math.log(2), abs=1e-5)
    margins = [
        0.3 * (logprob(model, p, c) - logprob(reference, p, c))
        - 0.3 * (logprob(model, p, r) - logprob(reference, p, r))
        for p, c, r in TEXTS
    ]
    found = means(method, model)[2]
    torch.testing.assert_close(found["loss"], -F.logsigmoid(torch.stack(margins)).mean())
    assert found["accuracy"] == np.mean([margin.item() > 0 for margin in margins])


def test_a_reward_is_read_at_the_last_token(make):
    model = make_model(3, RewardModel).requires_grad_(False)
    by_hand = []
    for prompt, *sides in TEXTS:
        examples = [encode_completion(prompt, side, BYTES, chat=False) for side in sides]
        texts = [torch.from_numpy(example.tokens.astype(np.int64)) for example in examples]
        by_hand.append([model(tokens[None])[0, -1, 0] for tokens in texts])
    margin = torch.stack([chosen - rejected for chosen, rejected in by_hand])
    found = means(make(RewardModeling), model)[2]
    torch.testing.assert_close(found["loss"], -F.logsigmoid(margin).mean())
    torch.testing.assert_close(found["margin"], margin.mean())
    completions = [
        Completion(row, "", encode_completion(row["prompt"], row["chosen"], BYTES, chat=False))
        for row in ROWS
    ]
    rated = rate(model, torch.float32, completions)
    torch.testing.assert_close(torch.tensor(rated), torch.stack([pair[0] for pair in by_hand]))


@pytest.mark.parametrize("updates", [1, 2])
def test_grpo_compares_with_the_reference_and_the_sampling_model(make, updates):
    """A completion ends with end of text unless it is as long as a completion may be."""
    reference, model = make_model(4), make_model(5)
    given = []

    def reward(completions):
        given.extend(completions)
        return [len(set(c.text)) + c.text.count("a") / 7 for c in completions]

    options = {"group_size": 4, "max_new_tokens": 12, "updates": updates, "kl": 0.2, "clip": 0.1}
    method = make(GroupRelativePolicy, compared=[reference, reward], **options)
    with torch.no_grad():  # so that some completions end early
        model.transformer.wte.weight[BYTES.eot] *= 4
    figures, batches, _ = means(method, model)
    assert figures["cut"] == np.mean([completion.is_cut for completion in given])
    endings = set()
    for completion in given:
        said = completion.example.tokens[completion.example.loss_mask].tolist()
        ended = said[-1] == BYTES.eot
        endings.add(ended)
        assert ended != completion.is_cut
        assert ended == (BYTES.eot in said) and (ended or len(said) == 12)
        assert decode_completion(said[: len(said) - ended], BYTES, False) == completion.text
    assert endings == {False, True} and len(given) == 16
    sampled = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    rewards = torch.tensor(reward(given[:16])).view(-1, 4)
    advantages = group_advantages(rewards).flatten()
    expected = []
    for number, completion in enumerate(given[:16]):
        tokens = torch.from_numpy(completion.example.tokens.astype(np.int64))
        mask = torch.from_numpy(completion.example.loss_mask)[1:]

        def score(scorer, tokens=tokens, mask=mask):
            found = F.log_softmax(scorer(tokens[None, :-1])[0], -1)
            return (found.gather(1, tokens[1:, None])[:, 0] * mask)[None]

        now = score(model)
        old = score(sampled) if updates > 1 else now.detach()
        compared = (now, old, score(reference), advantages[[number]])
        losses = grpo_losses(*compared, clip=0.1, kl=0.2)
        expected.append(mean_over_tokens(losses, mask[None])[0])
    found = sum(method.partial_means(model, batch, 16)["loss"] for batch in batches)
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_without_a_reference_there_is_no_kl(make):
    compared = (None, lambda completions: [0.0] * len(completions))
    options = {"group_size": 2, "max_new_tokens": 4, "kl": 0.0}
    method = make(GroupRelativePolicy, compared=compared, **options)
    assert list(means(method, make_model(6))[2]) == ["loss"]


def test_a_step_counts_once_and_says_how_many_updates_were_applied(make, monkeypatch):
    """Here the second of two updates is never finite."""
    options = {"group_size": 2, "max_new_tokens": 4, "kl": 0.0, "updates": 2, "batch_size": 4}
    options |= {"max_steps": 9, "warmup_steps": 0, "max_lr": 1e-3}
    compared = (None, lambda completions: [len(c.text) for c in completions])
    method = make(GroupRelativePolicy, compared=compared, **options)
    method.options.method, method.options.micro_batch_size = "grpo", 8
    partial_means, factors = method.partial_means, itertools.cycle([1.0, math.nan])

    def second_is_not_finite(*args):
        factor = next(factors)
        return {name: x * factor for name, x in partial_means(*args).items()}

    monkeypatch.setattr(method, "partial_means", second_is_not_finite)
    model, state = make_model(8), TrainState()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "lr_scale": 1.0}])
    process = replace(method.process, stop=SimpleNamespace(signal=0))
    run = SimpleNamespace(config=method.options, process=process, dtype=torch.float32, state=state)
    for step in (1, 2, 3):
        row, skip_reason = train_step(run, model, model, [optimizer], method)
        assert row["updates"] == 1 and math.isfinite(row["loss"]) and "loss nan" in skip_reason
        assert state.step == state.bad_steps == step


@pytest.mark.parametrize("end_ids, exact", [([], 0.0), ([ord("!")], 1.0)])
def test_a_cut_answer_is_not_exact(tmp_path, end_ids, exact):
    """A model that writes "aaa..." gives the answer "aaaa" only if it ends there."""
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
    tokenizer = SimpleNamespace(
        eot=256, end_ids=frozenset([256, *end_ids]), chat_template=None,
        encode=BYTES.encode, decode_bytes=BYTES.decode_bytes,
    )  # fmt: skip
    row = {"prompt": "b", "answer": "aaaa"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    encoder = TextEncoder(tokenizer, False, 64)
    process = Process(0, 1, torch.device("cpu"))
    for longest in (4, 8):
        questions = Questions(tmp_path / "rows.jsonl", encoder, process, torch.float32, longest, 1)
        (result,), (example,) = questions.score(model)
        assert result.value == (exact if longest == 8 else 0.0)
        assert example["cut"] == (longest == 4 or not end_ids)
        completion = Completion(row, example["completion"], None, example["cut"])
        reward = load_reward("exact", encoder, process.device, torch.float32)
        assert reward([completion]) == [result.value]
