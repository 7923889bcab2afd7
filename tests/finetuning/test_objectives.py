"""Losses, gradients and advantages of fine-tuning: those of trl, which record_trl.py has written to
trl.json, and numbers computed by hand."""

import json
import math

import pytest
import torch
from record_trl import BLOCK_SIZE, FILE, OLD, POLICY, REFERENCE, SHAPE, filled
from torch import Tensor

from finetune import METHODS
from finetuning.examples import Batch
from finetuning.methods import token_logprobs
from finetuning.objectives import group_advantages, grpo_losses
from finetuning.options import FinetuneConfig
from finetuning.rewards import RewardModel
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import weights_from_hf, weights_to_hf

TRL = json.loads(FILE.read_text())


def make_model(phase: float, kind: type[GPT] = GPT) -> GPT:
    """Return our GPT with the weights that record_trl.py gives the model of transformers."""
    config = GPTConfig(block_size=BLOCK_SIZE, **SHAPE)
    shapes = {name: x.shape for name, x in weights_to_hf(GPT(config).state_dict(), config).items()}
    if kind is RewardModel:
        shapes["score.weight"] = (1, config.n_embd)
    weights = filled(shapes, phase)
    head = {"reward_head.weight": weights.pop("score.weight")} if kind is RewardModel else {}
    model = kind(config)
    model.load_state_dict(weights_from_hf(weights, config) | head)
    return model


def make_batch(recorded: dict) -> Batch:
    """Return a recorded batch of N texts, padded on the right or, of grpo, on both sides."""
    idx = torch.tensor(recorded["input_ids"])
    targets = idx.masked_fill(torch.tensor(recorded["learned"]) == 0, -1).roll(-1, 1)
    targets[:, -1] = -1
    return Batch(idx, targets, last=torch.tensor(recorded["attention_mask"]).sum(1) - 1)


def loss_of(name: str, model: GPT, batch: Batch, recorded: dict) -> Tensor:
    """Return the loss of a method, which reads no rows for it, on one batch."""
    if name == "sft":
        return model(batch.idx, batch.targets)
    method = object.__new__(METHODS[name])
    given = {key: recorded[key] for key in ("beta", "clip", "kl") if key in recorded}
    method.config = FinetuneConfig(method=name, init_from="", data="", reward="exact", **given)
    num_items = len(batch.idx) if name == "grpo" else len(batch.idx) // 2  # else pairs
    return method.partial_means(model, batch, num_items)["loss"]


def assert_close(ours: Tensor, theirs: list | float) -> None:
    theirs = torch.tensor(theirs, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "grpo"])
def test_loss_and_gradients_are_those_of_trl(name):
    recorded = TRL[name]
    model = make_model(POLICY, RewardModel if name == "reward" else GPT)
    batch = make_batch(recorded)
    if name in ("dpo", "grpo"):
        batch.ref_logprobs = token_logprobs(make_model(REFERENCE), batch).detach()
    if name == "dpo":
        batch.ref_logprobs = batch.ref_logprobs.sum(1)
    if name == "grpo":
        assert 0 < recorded["clipped"] < 1  # the share of tokens whose ratio is clipped
        batch.advantages = group_advantages(torch.tensor(recorded["rewards"])).flatten()
        assert_close(batch.advantages, recorded["advantages"])
        batch.old_logprobs = token_logprobs(make_model(OLD), batch).detach()

    loss = loss_of(name, model, batch, recorded)
    assert_close(loss, recorded["loss"])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    head = gradients.pop("reward_head.weight", None)
    ours = weights_to_hf(gradients, model.config) | {"score.weight": head}
    for name, theirs in recorded["gradients"].items():
        assert_close(ours[name], theirs)


@pytest.mark.parametrize("reward", [0.1, 1e8 + 0.1])
def test_equal_rewards_have_no_advantage(reward):
    """Also where their mean is rounded to another number."""
    rewards = torch.full((2, 7), reward, dtype=torch.float64)
    rewards[1] += torch.arange(7)
    equal, growing = group_advantages(rewards)
    assert not equal.any() and growing[0] < 0 < growing[-1]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(2, 1, -1.2), (2, -1, 2), (0.5, 1, -0.5), (0.5, -1, 0.8), (1.1, 3, -3.3), (0.9, -3, 2.7)],
)
def test_ratios_are_clipped_by_hand(ratio, advantage, expected):
    old = torch.full((1, 1), -3.0)
    new = old + math.log(ratio)
    loss = grpo_losses(new, old, new, torch.tensor([float(advantage)]), clip=0.2, kl=0.5)
    assert loss.tolist() == [pytest.approx([expected])]
