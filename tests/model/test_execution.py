"""Activation checkpointing and compilation of the blocks."""

from functools import partial

import pytest
import torch
from tiny import tiny_gpt
from torch._dynamo.testing import CompileCounterWithBackend

from model.execution import Execution
from utils.devices import autocast

CPU = torch.device("cpu")


def gradients(model, idx, dtype=torch.float32):
    with autocast(CPU, dtype, keep_weights=False):
        loss = model(idx, idx)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["none", "cheap", "block"])
def test_all_blocks_run_one_graph_which_gives_the_gradients_of_plain_ones(mode, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    options = {"fullgraph": True, "dynamic": False, "backend": counter}
    monkeypatch.setattr("model.gpt.compile_static", partial(torch.compile, **options))
    torch._dynamo.reset()
    idx = torch.randint(0, 257, (2, 16))
    monkeypatch.setattr("model.loss.PLAIN_BYTES", 0)
    expected = gradients(tiny_gpt("modern"), idx)
    model = tiny_gpt("modern", Execution(mode, compiled=True))
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = gradients(model, idx)
    assert counter.frame_count == 1
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-6, rtol=1e-4)
