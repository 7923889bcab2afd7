"""The loss, which GPT.logits and GPT.token_losses define, however it is computed."""

from dataclasses import replace

import pytest
import torch
from edited import LOSSES
from tiny import RECIPES, tiny_gpt
from torch.distributed._tools.mem_tracker import MemTracker

from model import chunked_loss
from model import loss as loss_module
from model.gpt import GPT
from model.loss import has_fast_loss

IDX = torch.arange(64).view(4, 16) ** 2 % 257
TARGETS = IDX.roll(-1, 1).masked_fill(IDX % 5 == 0, -1)


def edited(model_class, **changes):
    torch.manual_seed(0)
    model = model_class(replace(tiny_gpt("modern").config, **changes))
    torch.nn.init.normal_(model.head_weight)  # large logits
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_takes_the_chunked_loss(recipe, caplog):
    assert has_fast_loss(tiny_gpt(recipe)) and not caplog.records


@pytest.mark.parametrize("model_class", LOSSES)
def test_an_edited_loss_is_computed_as_defined_chunk_by_chunk(model_class, monkeypatch, caplog):
    def loss_and_gradients(max_bytes, reduction):
        monkeypatch.setattr(loss_module, "PLAIN_BYTES", max_bytes)
        monkeypatch.setattr(chunked_loss, "LOGITS_BYTES_ON_CPU", max_bytes)
        model = edited(model_class)
        loss = model(IDX, TARGETS, reduction=reduction)
        if reduction == "none":
            assert (loss[TARGETS < 0] == 0).all()
            loss = loss.sum() / (TARGETS >= 0).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    # the definition in two lines
    model = edited(model_class)
    logits = model(IDX).flatten(0, 1)
    losses = model.token_losses(logits, TARGETS.flatten())
    plain = losses[TARGETS.flatten() >= 0].mean()
    plain.backward()
    expected = [plain.detach(), *(p.grad for p in model.parameters())]
    for max_bytes in (2**22, 4 * 320 * 40):  # all logits at once; chunks
        for reduction in ("mean", "none"):
            found = loss_and_gradients(max_bytes, reduction)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not has_fast_loss(model)
    (record,) = caplog.records  # one line, however often the loss is computed
    assert "the chunked loss gives another result" in record.getMessage()


def test_an_edited_loss_takes_the_memory_of_the_chunked_one(monkeypatch):
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES_ON_CPU", 2**23)
    peaks = []
    for model_class in (GPT, LOSSES[0]):
        model = edited(model_class, vocab_size=8192)
        has_fast_loss(model)  # compares both computations, once
        x = torch.randn(2048, 32, requires_grad=True)  # 67 MB of logits
        targets = torch.zeros(2048, dtype=torch.long)
        memory = MemTracker()
        memory.track_external(x, targets, *model.parameters())
        with memory:
            model.loss(model, x, targets).backward()
        peaks.append(memory.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    chunked, edited_peak = peaks
    assert edited_peak < 1.25 * chunked < 30e6, peaks


def test_a_model_whose_copy_cannot_be_built_takes_no_shortcut(caplog):
    class Fixed(GPT):
        def __init__(self, config):
            assert config.n_embd == 64
            super().__init__(config)

    assert not has_fast_loss(edited(Fixed, n_embd=64))
    assert "cannot be compared with the plain model (AssertionError" in caplog.text


def test_a_proof_leaves_random_numbers_and_modes_alone():
    model = edited(LOSSES[0], n_layer=1)
    before = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu"):
        has_fast_loss(model)
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.get_rng_state().equal(before) and model.training
