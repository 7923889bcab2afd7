"""Losses, gradients and advantages of fine-tuning: those of trl, as record_trl.py has written them
to trl.json."""

import json

import pytest
import torch
from record_trl import BLOCK_SIZE, FILE, MODEL_FIELDS, PAD, POLICY, REFERENCE, filled

from finetune import METHODS
from finetuning.examples import Batch
from finetuning.grpo import group_advantages
from finetuning.methods import token_logprobs
from finetuning.options import FinetuneOptions
from finetuning.rewards import RewardModel
from model.config import GPTConfig
from model.formats.huggingface_weights import model_from_hf, weights_to_hf
from model.gpt import GPT

TRL = json.loads(FILE.read_text())


def make_model(phase, kind=GPT):
    """Return our GPT with the weights that record_trl.py gives the model of transformers."""
    model_config = GPTConfig(block_size=BLOCK_SIZE, **MODEL_FIELDS)
    shapes = {
        name: x.shape
        for name, x in weights_to_hf(GPT(model_config).state_dict(), model_config).items()
    }
    if kind is RewardModel:
        shapes["score.weight"] = (1, model_config.n_embd)
    weights = filled(shapes, phase)
    head = {"reward_head.weight": weights.pop("score.weight")} if kind is RewardModel else {}
    model = kind(model_config)
    model.load_state_dict(model_from_hf(GPT, weights, model_config).state_dict() | head)
    return model


def make_batch(recorded):
    """Return a recorded batch of N texts, padded on the right or, of grpo, on both sides."""
    idx = torch.tensor(recorded["input_ids"])
    targets = idx.masked_fill(torch.tensor(recorded["learned"]) == 0, -1).roll(-1, 1)
    targets[:, -1] = -1
    return Batch(idx, targets, last_columns=(idx != PAD).sum(1) - 1)


def assert_close(ours, theirs):
    theirs = torch.tensor(theirs, dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "grpo"])
def test_loss_and_gradients_are_those_of_trl(name):
    recorded = TRL[name]
    model = make_model(POLICY, RewardModel if name == "reward" else GPT)
    batch = make_batch(recorded)
    num_texts = len(batch.idx)
    divisor = {"sft": (batch.targets >= 0).sum(), "grpo": num_texts}.get(name, num_texts / 2)
    if name in ("dpo", "grpo"):
        batch.ref_logprobs = token_logprobs(make_model(REFERENCE), batch).detach()
    if name == "dpo":
        batch.ref_logprobs = batch.ref_logprobs.sum(1)
    if name == "grpo":
        batch.advantages = group_advantages(torch.tensor(recorded["rewards"])).flatten()
        assert_close(batch.advantages, recorded["advantages"])

    method = object.__new__(METHODS[name])  # it reads no rows
    method.options = FinetuneOptions(method=name, init_from="", data="", reward="exact")
    loss = method.metric_sums(model, batch)["loss"] / divisor
    assert_close(loss, recorded["loss"])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    head = gradients.pop("reward_head.weight", None)
    ours = weights_to_hf(gradients, model.config) | {"score.weight": head}
    for name, theirs in recorded["gradients"].items():
        assert_close(ours[name], theirs)
