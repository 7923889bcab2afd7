"""Losses, gradients and advantages of fine-tuning: those of trl, which record_trl.py has written to
trl.json, and numbers computed by hand."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from record_trl import BLOCK_SIZE, FILE, OLD, POLICY, REFERENCE, SHAPE, filled
from torch import Tensor

from finetuning.objectives import dpo_loss, group_advantages, grpo_loss, kl_estimate, reward_loss
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import weights_from_hf, weights_to_hf

TRL = json.loads(FILE.read_text())
TOLERANCE = 1e-5
LN2, LN3 = math.log(2), math.log(3)


def make_model(phase: float, reward: bool = False) -> GPT:
    """Return our GPT with the weights that record_trl.py gives the model of transformers."""
    model = GPT(GPTConfig(block_size=BLOCK_SIZE, **SHAPE, reward_head=reward))
    named = weights_to_hf(model.state_dict(), model.config)
    names = {"reward_head.weight": "score.weight"}
    weights = filled({names.get(name, name): x.shape for name, x in named.items()}, phase)
    head = {"reward_head.weight": weights.pop("score.weight")} if reward else {}
    backbone = weights_from_hf(weights, GPTConfig(block_size=BLOCK_SIZE, **SHAPE))
    model.load_state_dict(backbone | head)
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


def differences(model: GPT, loss: Tensor, recorded: dict) -> dict[str, float]:
    """Return the largest differences of the loss and its gradients from trl's."""
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
    found = {"loss": largest_difference(loss, recorded["loss"])}
    found["norm"] = largest_difference(norm, recorded["norm"])
    ours = weights_to_hf(grads, model.config)  # a gradient has the shape of its weight
    for name, theirs in recorded["gradients"].items():
        grad = ours["reward_head.weight" if name == "score.weight" else name]
        found[name] = largest_difference(grad, theirs)
    return found


def grpo(model: GPT) -> Tensor:
    """Return our loss of each completion that trl.json holds."""
    recorded = TRL["grpo"]
    current = logprobs(model, recorded)
    loss_mask = batch(recorded)[1] >= 0
    old, ref = torch.zeros(2, *current.shape)
    old[loss_mask] = tensor(recorded["old_logprobs"])
    ref[loss_mask] = tensor(recorded["ref_logprobs"])
    advantages = group_advantages(tensor(recorded["rewards"])).flatten()
    clip, kl = recorded["clip"], recorded["kl"]
    return grpo_loss(current, old, ref, advantages, loss_mask, clip=clip, kl=kl)


def test_supervised_tuning_is_that_of_trl():
    model = make_model(POLICY)
    found = differences(model, model(*batch(TRL["sft"])), TRL["sft"])
    assert max(found.values()) < TOLERANCE, found


def test_dpo_is_that_of_trl():
    model, recorded = make_model(POLICY), TRL["dpo"]
    with torch.no_grad():
        reference = logprobs(make_model(REFERENCE), recorded).sum(1).chunk(2)
    current = logprobs(model, recorded).sum(1).chunk(2)
    loss = dpo_loss(*current, *reference, beta=recorded["beta"]).mean()
    found = differences(model, loss, recorded)
    assert max(found.values()) < TOLERANCE, found


def test_reward_modeling_is_that_of_trl():
    model, recorded = make_model(POLICY, reward=True), TRL["reward"]
    last = tensor(recorded["attention_mask"]).sum(1) - 1
    rewards = model(tensor(recorded["input_ids"]))[torch.arange(len(last)), last, 0]
    found = differences(model, reward_loss(*rewards.chunk(2)).mean(), recorded)
    assert max(found.values()) < TOLERANCE, found


def test_grpo_is_that_of_trl():
    assert 0 < TRL["grpo"]["clipped"] < 1  # the share of tokens whose ratio is clipped
    model = make_model(POLICY)
    found = differences(model, grpo(model).mean(), TRL["grpo"])
    assert max(found.values()) < TOLERANCE, found


def test_advantages_are_those_of_trl():
    ours = group_advantages(tensor(TRL["grpo"]["rewards"])).flatten()
    assert largest_difference(ours, TRL["grpo"]["advantages"]) < TOLERANCE


@pytest.mark.parametrize(("name", "phase"), [("old", OLD), ("ref", REFERENCE)])
def test_log_probabilities_are_those_of_trl(name, phase):
    recorded = TRL["grpo"]
    ours = logprobs(make_model(phase), recorded)[batch(recorded)[1] >= 0]
    assert largest_difference(ours, recorded[f"{name}_logprobs"]) < TOLERANCE


def test_targets_of_minus_1_do_not_count():
    idx, targets = batch(TRL["sft"])
    count, found = (targets >= 0).sum(), []
    for form in ("plain", "mean", "none"):
        model = make_model(POLICY)
        if form == "plain":
            logits = model(idx).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1)
        elif form == "mean":
            loss = model(idx, targets)
        else:
            losses = model(idx, targets, reduction="none")
            assert not losses[targets < 0].any()
            loss = losses.sum() / count
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert max(map(largest_difference, found[0], other)) < 1e-6


def test_dpo_by_hand():
    # margin (-1 + 3) - (-2 + 3) = 1; sigmoid(ln 3) = 3/4
    loss = dpo_loss(*tensor([[-1.0], [-2.0], [-3.0], [-3.0]]), beta=LN3)
    assert loss.tolist() == pytest.approx([math.log(4 / 3)])


def test_reward_loss_by_hand():
    loss = reward_loss(tensor([LN3, 0.0, 0.0]), tensor([0.0, 0.0, LN3]))
    assert loss.tolist() == pytest.approx([math.log(4 / 3), LN2, math.log(4)])


def test_advantages_by_hand():
    found = group_advantages(tensor([[0.0, 2.0, 4.0], [5.0, 5.0, 5.0]]))  # deviations 2 and 0
    assert found.flatten().tolist() == pytest.approx([-2 / 2.0001, 0, 2 / 2.0001, 0, 0, 0])


def test_kl_estimate_by_hand():
    found = kl_estimate(tensor([[-1.0, -1.0, -1.0]]), tensor([[-1.0, -1.0 + LN2, -1.0 - LN2]]))
    assert found[0].tolist() == pytest.approx([0, 1 - LN2, LN2 - 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(2, 1, -1.2), (2, -1, 2), (0.5, 1, -0.5), (0.5, -1, 0.8), (1.1, 3, -3.3), (0.9, -3, 2.7)],
)
def test_ratios_are_clipped_by_hand(ratio, advantage, expected):
    old, advantages, loss_mask = (
        torch.full((1, 1), -3.0),
        tensor([float(advantage)]),
        tensor([[True]]),
    )
    new = old + math.log(ratio)
    loss = grpo_loss(new, old, new, advantages, loss_mask, clip=0.2, kl=0.5)
    assert loss.tolist() == pytest.approx([expected])


def test_grpo_is_a_mean_over_the_tokens_of_each_completion_by_hand():
    # ratios 1; KL 1 - ln 2 in the first token; advantages -2 and 3
    loss_mask = tensor([[True, True, False], [False, True, False]])
    ref = tensor([[LN2, 0.0, 9.0], [9.0, 0.0, 9.0]])
    zeros, advantages = torch.zeros(2, 3), tensor([-2.0, 3.0])
    loss = grpo_loss(zeros, zeros, ref, advantages, loss_mask, clip=0.2, kl=0.5)
    assert loss.tolist() == pytest.approx([2 + 0.5 * (1 - LN2) / 2, -3])
