"""Activation checkpointing and compilation of the blocks, which change no gradient."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_gpt
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from model.chunked_loss import cross_entropy_by_rows_
from model.execution import SAVED_OPS, Execution, uncompiled
from utils.devices import autocast

IDX = torch.arange(32).view(2, 16) ** 2 % 257


attend = F.scaled_dot_product_attention
SAVED_OPS.append(torch.ops.aten.native_dropout.default)  # on a CPU of attend_and_drop alone


def attend_and_drop(q, k, v, mask, dropout, is_causal):
    """Draw the mask in an operation that "cheap" keeps, as attention on a GPU does."""
    return torch.native_dropout(attend(q, k, v, mask, 0.0, is_causal), dropout, True)[0]


def gradients(recipe, execution, dtype=torch.float32, **changes):
    model = tiny_gpt(recipe, execution, **changes)
    torch.manual_seed(0)  # of dropout
    with autocast(torch.device("cpu"), dtype, keep_weights=False):
        loss = model(IDX, IDX)
    loss.backward()
    return [p.grad for p in model.parameters()]


def test_an_uncompiled_loss_is_the_one_that_takes_little_memory():
    """Until the context ends, also by an error."""
    loss = tiny_gpt("gpt2", Execution(compiled=True)).loss
    compiled = loss.chunk_cross_entropy_
    with pytest.raises(ZeroDivisionError), uncompiled(True, loss):
        assert loss.chunk_cross_entropy_ is cross_entropy_by_rows_ is not compiled
        raise ZeroDivisionError
    with uncompiled(False, loss):
        assert loss.chunk_cross_entropy_ is compiled


@pytest.mark.parametrize("checkpointing", ["cheap", "block"])
@pytest.mark.parametrize("dtype, dropout", [(torch.float32, 0.2), (torch.bfloat16, 0.0)])
@pytest.mark.parametrize("recipe", ["gpt2", "modern", "llama,n_kv_head=1"])
def test_recomputation_changes_no_gradient(checkpointing, dtype, dropout, recipe, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend_and_drop)
    with FlopCounterMode(display=False) as plain:
        expected = gradients(recipe, Execution("none"), dtype, dropout=dropout)
    with FlopCounterMode(display=False) as recomputing:
        found = gradients(recipe, Execution(checkpointing), dtype, dropout=dropout)
    assert all(p.equal(q) for p, q in zip(found, expected, strict=True))
    more_flops = recomputing.get_total_flops() - plain.get_total_flops()
    if checkpointing == "block":
        assert more_flops > 0
    elif not dropout:  # no matmul is done twice
        assert more_flops == 0


@pytest.mark.parametrize("mode", ["none", "cheap", "block"])
def test_all_blocks_run_one_graph_which_gives_the_gradients_of_plain_ones(mode, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    options = {"fullgraph": True, "dynamic": False, "backend": counter}
    monkeypatch.setattr("model.execution.compile_static", partial(torch.compile, **options))
    monkeypatch.setattr("model.loss.PLAIN_BYTES", 0)  # the loss of large models
    torch._dynamo.reset()
    expected = gradients("modern", Execution("none"))
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = gradients("modern", Execution(mode, compiled=True))
    assert counter.frame_count == 1
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
