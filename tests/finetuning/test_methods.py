"""The figures of each method on tiny models, against the objectives by hand."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from data.tokenizer import ByteTokenizer
from finetuning.chat import decode_completion, encode_completion
from finetuning.examples import ChatData, collate
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import DirectPreference, Method, RewardModeling, SupervisedTuning
from finetuning.objectives import group_advantages, grpo_loss
from finetuning.options import FinetuneConfig
from finetuning.rewards import Completion, reward_of_model
from finetuning.rows import Row
from finetuning.start import with_reward_head
from model.config import GPTConfig
from model.gpt import GPT
from utils.distributed import Process

BYTES = ByteTokenizer()
ALONE = Process(0, 0, 1, torch.device("cpu"))
TEXTS = [("2+3=", "5", "six"), ("10+20=", "30", "3"), ("7+7=", "fourteen", "4"), ("0=", "0", "0!")]


def make_model(seed: int = 0, **shape) -> GPT:
    """A tiny model whose output differs from token to token."""
    torch.manual_seed(seed)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 64, "vocab_size": 257}
    model = GPT(GPTConfig(**sizes | shape))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def data(*fields: str) -> ChatData:
    rows = [dict(zip(("prompt", *fields), texts, strict=False)) for texts in TEXTS]
    return ChatData([Row(row, f"line {i}") for i, row in enumerate(rows)], BYTES, False, 64)


def setup(**options) -> tuple:
    """Options, process and dtype of a method."""
    paths = {"init_from": "a", "data": Path("b")}
    config = FinetuneConfig(micro_batch_size=3, **paths, **options)
    return config, ALONE, torch.float32


def logprob(model: GPT, prompt: str, completion: str) -> Tensor:
    """Log-probability of a completion and its end of text, from plain logits."""
    tokens = torch.tensor([BYTES.eot, *prompt.encode(), *completion.encode(), BYTES.eot])
    found = F.log_softmax(model(tokens[None, :-1])[0], -1)
    picked = found.gather(1, tokens[1:, None])[:, 0]
    return picked[len(prompt) :].sum()


def means(method: Method, model: GPT) -> tuple[dict, list, dict[str, Tensor]]:
    """Figures for the log of one step on all examples, its batches, and the means of a step."""
    ids = np.arange(len(method))
    items = method.divisor(ids) if method.unit == "prompts" else len(ids)
    grid = np.arange(items).reshape(2, -1)
    found, figures = method.micro_batches(model, 0, ids, grid)
    batches = list(found)
    parts = [method.partial_means(model, batch, method.divisor(ids)) for batch in batches]
    return figures, batches, {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.parametrize("ngrams, position", [(1, "learned"), (3, "rotary")])
def test_packed_examples_do_not_see_each_other(ngrams, position):
    shape = {"position": position, "ngrams": ngrams}
    model = make_model(**shape | ({"conv": 3, "window": 4} if ngrams > 1 else {})).eval()
    rows = [Row({"prompt": "a" * n, "completion": "b" * n}, "") for n in (3, 9, 5)]
    method = SupervisedTuning(ChatData(rows, BYTES, False, 64), *setup())
    assert len(method) == 1
    batch = method.batch(np.arange(1))
    losses = model(**batch, reduction="none").flatten()
    apart = []
    for example in method.examples_of(0):
        one = {k: torch.from_numpy(x) for k, x in collate([example], 64).items()}
        found = model(one["idx"], one["targets"], reduction="none")[0, : len(example) - 1]
        apart.append(found)
    apart = torch.cat(apart)
    torch.testing.assert_close(losses[: len(apart)], apart)
    assert losses[len(apart) :].eq(0).all()
    # what is trained on is the mean over the targets, of which each completion has n + 1
    loss = method.partial_means(model, batch, method.divisor(np.arange(1)))["loss"]
    torch.testing.assert_close(loss, apart.sum() / (4 + 10 + 6))


def test_dpo_compares_with_the_reference():
    reference, model = make_model(1), make_model(2)
    method = DirectPreference(data("chosen", "rejected"), *setup(beta=0.3), reference=reference)
    by_hand = [[logprob(reference, p, side[i]) for p, *side in TEXTS] for i in (0, 1)]
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


def test_a_reward_is_read_at_the_last_token():
    model = with_reward_head(make_model(3))
    torch.nn.init.normal_(model.reward_head.weight)
    model.requires_grad_(False)
    by_hand = []
    for prompt, *sides in TEXTS:
        examples = [encode_completion(prompt, side, BYTES, chat=False) for side in sides]
        texts = [torch.from_numpy(example.tokens.astype(np.int64)) for example in examples]
        by_hand.append([model(tokens[None])[0, -1, 0] for tokens in texts])
    margin = torch.stack([chosen - rejected for chosen, rejected in by_hand])
    method = RewardModeling(data("chosen", "rejected"), *setup())
    found = means(method, model)[2]
    torch.testing.assert_close(found["loss"], -F.logsigmoid(margin).mean())
    torch.testing.assert_close(found["margin"], margin.mean())
    completions = [
        Completion(row, "", encode_completion(row["prompt"], row["chosen"], BYTES, chat=False))
        for row in method.data.rows
    ]
    rated = reward_of_model(model, torch.float32)(completions)
    torch.testing.assert_close(torch.tensor(rated), torch.stack([pair[0] for pair in by_hand]))


@pytest.mark.parametrize("updates", [1, 2])
def test_grpo_compares_with_the_reference_and_the_sampling_model(updates):
    """A completion ends with end of text unless it is as long as a completion may be."""
    reference, model = make_model(4), make_model(5)
    given = []

    def reward(completions):
        given.extend(completions)
        return [len(set(c.text)) + c.text.count("a") / 7 for c in completions]

    options = {"group_size": 4, "max_new_tokens": 12, "updates": updates, "kl": 0.2, "clip": 0.1}
    method = GroupRelativePolicy(data(), *setup(**options), reference=reference, reward=reward)
    with torch.no_grad():  # so that some completions end early
        model.transformer.wte.weight[BYTES.eot] *= 4
    _, batches, _ = means(method, model)
    endings = set()
    for completion in given:
        said = completion.example.tokens[completion.example.loss_mask].tolist()
        ended = said[-1] == BYTES.eot
        endings.add(ended)
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
        compared = (now, old, score(reference), advantages[[number]], mask[None])
        expected.append(grpo_loss(*compared, clip=0.1, kl=0.2)[0])
    found = sum(method.partial_means(model, batch, 16)["loss"] for batch in batches)
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_without_a_reference_there_is_no_kl():
    method = GroupRelativePolicy(
        data(),
        *setup(group_size=2, max_new_tokens=4, kl=0.0),
        reference=None,
        reward=lambda completions: [0.0] * len(completions),
    )
    assert list(means(method, make_model(6))[2]) == ["loss"]
