"""Losses, gradients and advantages of fine-tuning: those of trl, which record_trl.py has written to
trl.json, and numbers computed by hand."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from record_trl import BLOCK_SIZE, FILE, OLD, POLICY, REFERENCE, SHAPE, filled
from torch import Tensor

from finetuning.objectives import (
    dpo_margin,
    group_advantages,
    grpo_losses,
    mean_over_tokens,
)
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
        shapes |= {"score.weight": (1, config.n_embd)}
    weights = filled(shapes, phase)
    head = {"reward_head.weight": weights.pop("score.weight")} if kind is RewardModel else {}
    model = kind(config)
    model.load_state_dict(weights_from_hf(weights, config) | head)
    return model


def tensor(values: list, dtype: torch.dtype | None = None) -> Tensor:
    """Return recorded values as a tensor."""
    return torch.tensor(values, dtype=dtype)


def batch(recorded: dict) -> tuple[Tensor, Tensor]:
    """Return token ids and targets (N, T) of a recorded batch; the target of a token is the next
    one, -1 where that does not count."""
    idx, loss_mask = tensor(recorded["input_ids"]), tensor(recorded["learned"], torch.bool)
    targets = idx.masked_fill(~loss_mask, -1).roll(-1, 1)
    targets[:, -1] = -1
    return idx, targets


def logprobs(model: GPT, recorded: dict) -> Tensor:
    """Return log-probabilities (N, T) of the tokens that count, 0 elsewhere."""
    return -model(*batch(recorded), reduction="none")


def largest_difference(ours: Tensor, theirs: Tensor | list | float) -> float:
    """Return the largest absolute difference of two tensors of the same shape."""
    theirs = torch.as_tensor(theirs, dtype=ours.dtype)
    assert ours.shape == theirs.shape
    return (ours.detach() - theirs).abs().max().item()


def assert_equal(model: GPT, loss: Tensor, recorded: dict) -> None:
    """Compare the loss and its gradients with those of trl."""
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    found = {"loss": largest_difference(loss, recorded["loss"])}
    found["norm"] = largest_difference(norm, recorded["norm"])
    head = grads.pop("reward_head.weight", None)
    ours = weights_to_hf(grads, model.config) | {"score.weight": head}
    for name, theirs in recorded["gradients"].items():
        found[name] = largest_difference(ours[name], theirs)
    assert max(found.values()) < TOLERANCE, found


def test_supervised_tuning_is_that_of_trl():
    model = make_model(POLICY)
    assert_equal(model, model(*batch(TRL["sft"])), TRL["sft"])


def test_dpo_is_that_of_trl():
    model, recorded = make_model(POLICY), TRL["dpo"]
    with torch.no_grad():
        reference = logprobs(make_model(REFERENCE), recorded).sum(1).chunk(2)
    current = logprobs(model, recorded).sum(1).chunk(2)
    margin = dpo_margin(*current, *reference, recorded["beta"])
    assert_equal(model, -F.logsigmoid(margin).mean(), recorded)


def test_reward_modeling_is_that_of_trl():
    model, recorded = make_model(POLICY, RewardModel), TRL["reward"]
    last = tensor(recorded["attention_mask"]).sum(1) - 1
    rewards = model(tensor(recorded["input_ids"]))[torch.arange(len(last)), last, 0]
    chosen, rejected = rewards.chunk(2)
    assert_equal(model, -F.logsigmoid(chosen - rejected).mean(), recorded)


def test_grpo_is_that_of_trl():
    recorded, model = TRL["grpo"], make_model(POLICY)
    assert 0 < recorded["clipped"] < 1  # the share of tokens whose ratio is clipped
    advantages = group_advantages(tensor(recorded["rewards"])).flatten()
    assert largest_difference(advantages, recorded["advantages"]) < TOLERANCE
    loss_mask, scores = batch(recorded)[1] >= 0, {}
    for name, phase in (("old", OLD), ("ref", REFERENCE)):
        scores[name] = logprobs(make_model(phase), recorded).detach()
        assert largest_difference(scores[name][loss_mask], recorded[f"{name}_logprobs"]) < TOLERANCE
    compared = (logprobs(model, recorded), scores["old"], scores["ref"], advantages)
    losses = grpo_losses(*compared, clip=recorded["clip"], kl=recorded["kl"])
    assert_equal(model, mean_over_tokens(losses, loss_mask).mean(), recorded)


@pytest.mark.parametrize("reward", [0.1, 1e8 + 0.1])
def test_equal_rewards_have_no_advantage(reward):
    """Also where their mean is rounded to another number."""
    rewards = torch.full((2, 7), reward, dtype=torch.float64)
    rewards[1] += torch.arange(7)
    found = group_advantages(rewards)
    assert not found[0].any() and found[1, 0] < 0 < found[1, -1]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(2, 1, -1.2), (2, -1, 2), (0.5, 1, -0.5), (0.5, -1, 0.8), (1.1, 3, -3.3), (0.9, -3, 2.7)],
)
def test_ratios_are_clipped_by_hand(ratio, advantage, expected):
    old = torch.full((1, 1), -3.0)
    new = old + math.log(ratio)
    loss = grpo_losses(new, old, new, tensor([float(advantage)]), clip=0.2, kl=0.5)
    assert loss.tolist() == [pytest.approx([expected])]
