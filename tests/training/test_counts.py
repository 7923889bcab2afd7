"""The forecast is a count: FLOPs are those of FlopCounterMode, activations the bytes that autograd
keeps, peaks those of a tracker, for each value of each option that a formula depends on."""

import pytest
import torch
from conftest import train_options
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from model import chunked_loss, loss
from model.config import GPTConfig
from model.execution import Execution, execute
from model.gpt import GPT
from model.layers import rotary_angles
from recipes import parse_recipe
from training.forecast.blocks import measure_blocks
from training.forecast.memory import Hardware, head_bytes
from training.forecast.step_time import step_flops
from utils.devices import autocast

CPU = torch.device("cpu")
B, T = 2, 64
# one field of a recipe at a time, and those that change what attention reads together
RECIPES = [
    "gpt2",
    "gpt2,bias=False",
    "gpt2,activation=gelu_exact",
    "gpt2,activation=relu2",
    "gpt2,activation=swiglu",
    "gpt2,mlp_ratio=3",
    "gpt2,norm=rms",
    "gpt2,tied=False",
    "gpt2,position=rotary",
    "gpt2,qk_norm=True",
    "gpt2,n_kv_head=2",
    "gpt2,n_kv_head=1,qk_norm=True",
    "llama,n_kv_head=1",
    "llama,n_kv_head=2,qk_norm=True",
    "modern",
]


class FusedNorm(torch.autograd.Function):
    """What autograd keeps of a GPU's kernel for RMSNorm, which CPUs lack: input and scale. The
    compiler, too, keeps no more."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, scale)
        return (x * scale if weight is None else x * scale * weight).type_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None


@pytest.fixture
def fused_norms(monkeypatch):
    def forward(norm, x):
        return FusedNorm.apply(x, norm.weight, norm.eps)

    monkeypatch.setattr(torch.nn.RMSNorm, "forward", forward)


def build(recipe, mode="none", **given):
    """Return the options of a small run and its model."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": T, "micro_batch_size": B}
    options = train_options(
        recipe=recipe, total_batch_size=B * T, activation_checkpointing=mode, **sizes, **given
    )
    shape = options.model_config(parse_recipe(recipe), 64 * 64)  # without padding
    model = GPT(shape)
    execute(model, Execution(mode, options.use_torch_compile))
    return options, model


def attention_flops(query, *args, **kwargs):
    """Return the FLOPs of two matmuls, which the counter does not know of the kernel of CPUs."""
    batch, heads, time, width = query
    return 4 * batch * heads * time * time * width


def attention_backward_flops(grad, query, *args, **kwargs):
    """Return twice as many: MFU does not count that the kernel computes its scores again."""
    return 2 * attention_flops(query)


FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
KERNELS = {FORWARD: attention_flops, BACKWARD: attention_backward_flops}


DROPPING = [("gpt2", 0.1), ("modern", 0.1)]


@pytest.mark.parametrize("mode", ["none", "cheap", "block"])
@pytest.mark.parametrize("recipe, dropout", [*((recipe, 0.0) for recipe in RECIPES), *DROPPING])
def test_flops_of_a_step_are_those_that_are_counted(recipe, dropout, mode):
    options, model = build(recipe, mode, dropout=dropout)
    idx = torch.zeros(B, T, dtype=torch.long)
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        model(idx, idx).backward()
    assert counter.get_total_flops() == pytest.approx(step_flops(options, model.config))


def keep(recipe, mode, dtype):
    """Return a model, and the bytes that autograd keeps of one of its blocks."""
    _, model = build(recipe, mode)
    shape = model.config
    angles = None
    if shape.position == "rotary":
        angles = rotary_angles(torch.arange(T), shape.head_size, shape.rope_base)
    x = torch.randn(B, T, shape.n_embd, requires_grad=True)
    block = model.transformer.h[0]
    memory = MemTracker()
    memory.track_external(model, x, *(angles or ()))
    with memory, autocast(CPU, dtype, keep_weights=False):
        y = block(x, angles, None, None)
        total = memory.get_tracker_snapshot()[CPU]["Total"]
    weights = sum(p.nbytes for p in model.parameters())
    # y is the next block's input
    return model, total - weights - y.nbytes - sum(angle.nbytes for angle in angles or ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["none", "cheap", "block"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forecast_of_a_block_is_the_bytes_that_autograd_keeps(recipe, mode, dtype):
    model, kept = keep(recipe, mode, dtype)
    shape = model.config
    if dtype is torch.bfloat16 and mode == "none":  # the forecast counts cast weights elsewhere
        kept -= sum(2 * p.numel() for p in model.transformer.h[0].parameters() if p.dim() == 2)
    assert kept == B * measure_blocks(shape, Execution(mode), "cpu", dtype)[0].activation_bytes


@pytest.mark.parametrize("recipe", ["modern", "llama,n_kv_head=2"])
def test_a_forecast_for_a_gpu_counts_its_kernel_for_rms_norm(fused_norms, recipe):
    model, kept = keep(recipe, "none", torch.float32)
    shape = model.config
    blocks = measure_blocks(shape, Execution(), "cuda", torch.float32)
    activations = B * blocks[0].activation_bytes
    # a number more of each row that is normalized
    assert 0 <= activations - kept <= B * T * 4 * (2 + 2 * shape.n_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_holds_the_bytes_that_are_forecast(monkeypatch, dtype):
    monkeypatch.setattr(loss, "PLAIN_BYTES", 0)  # the loss of large models
    monkeypatch.setattr(chunked_loss, "SOFTMAX_BYTES_ON_CPU", 2**16)
    config = GPTConfig(vocab_size=8192, n_layer=1, n_embd=32, n_head=2)
    model = GPT(config)
    loss.has_fast_loss(model)  # compares both computations, once
    hidden = torch.randn(2048, 32, requires_grad=True)
    weight = model.head_weight
    targets = torch.zeros(2048, dtype=torch.long)
    memory = MemTracker()
    memory.track_external(hidden, weight, targets)
    with memory, autocast(CPU, dtype, keep_weights=False):
        model.loss(model, hidden, targets)
    peak = memory.get_tracker_snapshot("peak")[CPU]["Total"] - weight.nbytes - targets.nbytes
    forecast = head_bytes(config, 2048, Hardware(CPU, dtype, 0), compiled=False)
    assert forecast == pytest.approx(peak, rel=0.02)
