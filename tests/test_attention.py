"""The choice of a kernel for attention, here of those that a CPU has."""

import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.config import GPTConfig
from model.gpt import GPT
from utils import attention

CPU = torch.device("cpu")
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=128, block_size=512, vocab_size=257)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What is preferred is let go of after a test."""
    monkeypatch.setattr(attention, "preferred", None)
    yield
    if attention.preferred:
        attention.preferred.__exit__(None, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_cannot_do_it_are_left_out(dtype):
    seconds = attention.seconds_of_kernels(SHAPE, 2, dtype, CPU)
    assert list(seconds) == [FLASH] and seconds[FLASH] > 0


def test_the_fastest_comes_first_and_every_other_stays(monkeypatch):
    monkeypatch.setattr(attention, "KERNELS", [MATH, *attention.KERNELS])
    before = torch._C._get_sdp_priority_order()
    told = attention.prefer_fastest(SHAPE, 2, torch.float32, CPU)
    names, milliseconds = zip(*re.findall(r"([A-Z_]+) ([\d.]+) ms", told), strict=True)
    assert set(names) == {FLASH.name, MATH.name}
    assert float(milliseconds[0]) <= float(milliseconds[1])
    order = torch._C._get_sdp_priority_order()
    assert [SDPBackend(kernel).name for kernel in order[:2]] == list(names)
    assert sorted(order) == sorted(before)


def test_no_kernel_changes_a_loss_or_a_gradient():
    model = GPT(SHAPE)
    batch, found = torch.randint(0, 257, (2, 2, 512)), []
    for kernel in (FLASH, MATH):
        model.zero_grad()
        with sdpa_kernel(kernel):
            loss = model(*batch)
            loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)
