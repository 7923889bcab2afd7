"""Losses, gradients and advantages of fine-tuning: those of trl, which record_trl.py has written to
trl.json, and numbers computed by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from record_trl import BLOCK_SIZE, FILE, OLD, POLICY, REFERENCE, SHAPE, filled
from torch import Tensor

from finetuning.examples import Batch
from finetuning.grpo import GroupRelativePolicy
from finetuning.methods import DirectPreference, Method, RewardModeling, token_logprobs
from finetuning.objectives import group_advantages, grpo_losses
from finetuning.options import FinetuneConfig
from finetuning.rewards import RewardModel
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import weights_from_hf, weights_to_hf

TRL = json.loads(FILE.read_text())
TOLERANCE = 1e-5


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


def loss_of(kind: type[Method], model: GPT, batch: Batch, divisor: int, **options) -> Tensor:
    """Return the loss of a method, which reads no rows for it, on one batch."""
    method = object.__new__(kind)
    paths = {"init_from": "", "data": Path(), "reward": "exact"}
    method.config = FinetuneConfig(method="grpo", **paths, **options)
    return method.partial_means(model, batch, divisor)["loss"]


def assert_close(ours: Tensor, theirs: Tensor | list | float) -> None:
    """Compare tensors of the same shape."""
    theirs = torch.as_tensor(theirs, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), theirs, atol=TOLERANCE, rtol=0)


def assert_equal(model: GPT, loss: Tensor, recorded: dict) -> None:
    """Compare the loss and its gradients with those of trl."""
    assert_close(loss, recorded["loss"])
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert_close(torch.nn.utils.get_total_norm(grads.values()), recorded["norm"])
    head = grads.pop("reward_head.weight", None)
    ours = weights_to_hf(grads, model.config) | {"score.weight": head}
    for name, theirs in recorded["gradients"].items():
        assert_close(ours[name], theirs)


def test_supervised_tuning_is_that_of_trl():
    model, batch = make_model(POLICY), make_batch(TRL["sft"])
    assert_equal(model, model(batch.idx, batch.targets), TRL["sft"])


def test_dpo_is_that_of_trl():
    model, recorded = make_model(POLICY), TRL["dpo"]
    batch = make_batch(recorded)
    batch.ref_logprobs = token_logprobs(make_model(REFERENCE), batch).sum(1).detach()
    loss = loss_of(DirectPreference, model, batch, len(batch.idx) // 2, beta=recorded["beta"])
    assert_equal(model, loss, recorded)


def test_reward_modeling_is_that_of_trl():
    model, batch = make_model(POLICY, RewardModel), make_batch(TRL["reward"])
    loss = loss_of(RewardModeling, model, batch, len(batch.idx) // 2)
    assert_equal(model, loss, TRL["reward"])


def test_grpo_is_that_of_trl():
    recorded, model = TRL["grpo"], make_model(POLICY)
    assert 0 < recorded["clipped"] < 1  # the share of tokens whose ratio is clipped
    batch = make_batch(recorded)
    batch.advantages = group_advantages(torch.tensor(recorded["rewards"])).flatten()
    assert_close(batch.advantages, recorded["advantages"])
    batch.old_logprobs = token_logprobs(make_model(OLD), batch).detach()
    batch.ref_logprobs = token_logprobs(make_model(REFERENCE), batch).detach()
    loss_mask = batch.targets >= 0
    assert_close(batch.old_logprobs[loss_mask], recorded["old_logprobs"])
    assert_close(batch.ref_logprobs[loss_mask], recorded["ref_logprobs"])
    options = {"clip": recorded["clip"], "kl": recorded["kl"]}
    loss = loss_of(GroupRelativePolicy, model, batch, len(batch.idx), **options)
    assert_equal(model, loss, recorded)


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
