"""The choice of a kernel for attention, here of those that a CPU has."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment
from torch.backends import cuda as enabled
from torch.nn.attention import SDPBackend

from model.config import GPTConfig
from model.gpt import GPT
from utils import attention
from utils.distributed import Process

ALONE = Process(0, 0, 1, torch.device("cpu"))
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=128, block_size=512, vocab_size=257)


@pytest.fixture(autouse=True)
def restored():
    with torch.compiler.config.patch(cache_key_tag=""):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_cannot_do_it_are_left_out(dtype):
    seconds = attention.seconds_of_kernels(SHAPE, 2, dtype, ALONE)
    assert list(seconds) == [FLASH] and seconds[FLASH] > 0
    assert f"FLASH_ATTENTION {1000 * seconds[FLASH]:.2f} ms" in attention.describe(seconds)
    assert "no kernel" in attention.describe({})


def test_the_fastest_comes_first(monkeypatch):
    monkeypatch.setattr(attention, "KERNELS", [MATH, *attention.KERNELS])
    seconds = attention.seconds_of_kernels(SHAPE, 2, torch.float32, ALONE)
    assert set(seconds) == {FLASH, MATH}
    assert list(seconds.values()) == sorted(seconds.values())
    with attention.preferring(seconds):
        assert torch._C._get_sdp_priority_order()[:2] == [int(kernel) for kernel in seconds]


def test_what_is_preferred_falls_back_to_the_plain_one_and_is_let_go_of():
    for order in ([], [FLASH], [SDPBackend.CUDNN_ATTENTION]):
        with attention.preferring(order):
            assert enabled.math_sdp_enabled()
            assert enabled.flash_sdp_enabled() == (FLASH in order or not order)
        assert enabled.flash_sdp_enabled() and enabled.mem_efficient_sdp_enabled()


def test_no_kernel_changes_a_loss_or_a_gradient():
    model = GPT(SHAPE)
    batch, found = torch.randint(0, 257, (2, 2, 512)), []
    for kernel in (FLASH, MATH):
        model.zero_grad()
        with attention.preferring([kernel]):
            loss = model(*batch)
            loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


COMPILED = """
import sys, torch
from torch.profiler import profile
from model.config import GPTConfig
from utils import attention
from utils.distributed import Process
attention.KERNELS = [getattr(attention.SDPBackend, sys.argv[1])]
shape = GPTConfig(n_layer=1, n_head=2, n_embd=128, block_size=300, vocab_size=257)
process = Process(0, 0, 1, torch.device("cpu"))
kernels = attention.seconds_of_kernels(shape, 1, torch.float32, process)
attend = torch.compile(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x))
x = torch.randn(1, 2, 300, 64, requires_grad=True)
with profile() as trace, attention.preferring(kernels):
    attend(x).sum().backward()
print(any("flash" in event.key for event in trace.key_averages()))
"""


def test_the_cache_of_compiled_code_does_not_bring_another_kernel(tmp_path):
    for kernel in (FLASH, MATH):
        done = subprocess.run(
            [sys.executable, "-c", COMPILED, kernel.name],
            cwd=ROOT,
            env=environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [str(kernel is FLASH)], done.stderr
