"""The choice of a kernel for attention: of those that a CPU has, and of a GPU's if there is one."""

import contextvars
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, environment
from torch.nn.attention import sdpa_kernel

from model.config import GPTConfig
from model.gpt import GPT
from training import attention
from utils.distributed import Process, autocast

ALONE = Process(0, 0, 1, torch.device("cpu"))
MATH = attention.SDPBackend.MATH
NAMES = ("cudnn", "flash", "mem_efficient", "math")
SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=128, block_size=512, vocab_size=257)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_that_cannot_do_it_are_left_out(dtype):
    seconds = attention.seconds_of_kernels(SHAPE, 2, dtype, ALONE)
    assert list(seconds) == ["flash"] and seconds["flash"] > 0
    assert f"flash {1000 * seconds['flash']:.2f} ms" in attention.describe(seconds)
    assert "no kernel" in attention.describe({})


def test_a_cpu_s_attention_is_left_to_pytorch():
    assert attention.fastest_kernel(SHAPE, 2, torch.float32, ALONE) == (None, [])


def test_the_fastest_comes_first(monkeypatch):
    monkeypatch.setitem(attention.KERNELS, "math", MATH)
    seconds = attention.seconds_of_kernels(SHAPE, 2, torch.float32, ALONE)
    assert set(seconds) == {"flash", "math"}
    assert list(seconds.values()) == sorted(seconds.values())


def test_what_is_preferred_comes_first_and_is_let_go_of():
    def state():
        enabled = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in NAMES]
        return torch._C._get_sdp_priority_order(), enabled, torch.compiler.config.cache_key_tag

    with torch.compiler.config.patch(cache_key_tag="mine"):
        before = state()
        for name, kernel in attention.KERNELS.items():
            with attention.preferring(name):
                order, enabled, tag = state()
                assert (order[0], order[3]) == (int(kernel), int(MATH))
                assert all(enabled) and tag == f"mine attention {name}"
            assert state() == before
        with attention.preferring(None):
            assert state() == before


def test_thousands_of_micro_steps_leave_nothing_behind():
    def variables():
        with attention.preferring("flash"):
            pass
        return len(contextvars.copy_context())

    assert variables() == variables()


@pytest.mark.parametrize(
    "device, dtype, names",
    [
        ("cpu", torch.float32, ["flash"]),
        pytest.param(
            "cuda",
            torch.bfloat16,
            list(attention.KERNELS),
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ),
    ],
)
def test_no_kernel_changes_a_loss_or_a_gradient(device, dtype, names):
    torch.manual_seed(0)
    model = GPT(SHAPE).to(device)
    batch = torch.randint(0, 257, (2, 2, 512), device=device)

    def learned(kernel):
        model.zero_grad()
        with kernel, autocast(torch.device(device), dtype):
            loss = model(*batch)
            loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    plain = learned(sdpa_kernel(MATH))
    for name in names:
        for a, b in zip(learned(attention.preferring(name)), plain, strict=True):
            assert (a - b).norm() <= 30 * torch.finfo(dtype).eps * b.norm(), name


COMPILED = """
import sys, torch
from torch.profiler import profile
from training import attention
attention.KERNELS = {sys.argv[1]: getattr(attention.SDPBackend, sys.argv[1])}
attend = torch.compile(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x))
x = torch.randn(1, 2, 300, 64, requires_grad=True)
with profile() as trace, attention.preferring(sys.argv[1]):
    attend(x).sum().backward()
print(any("flash" in event.key for event in trace.key_averages()))
"""


def test_the_cache_of_compiled_code_does_not_bring_another_kernel(tmp_path):
    for name in ("FLASH_ATTENTION", "MATH"):
        done = subprocess.run(
            [sys.executable, "-c", COMPILED, name],
            cwd=ROOT,
            env=environment() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == [str(name != "MATH")], done.stderr
