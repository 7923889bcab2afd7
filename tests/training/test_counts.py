"""The forecast is a count: FLOPs are those of FlopCounterMode, activations the bytes that autograd
keeps, peaks those of a tracker, for each value of each option that a formula depends on, and for
edited blocks."""

import pytest
import torch
from conftest import train_options
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from model import chunked_loss, loss
from model.config import GPTConfig
from model.execution import Execution, execute
from model.gpt import GPT, MLP, Block
from model.layers import rotary_angles
from recipes import parse_recipe
from training.forecast.blocks import measure_blocks
from training.forecast.memory import Hardware, forecast_memory, head_bytes
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


def keep(model, mode, dtype, layer=0):
    """Return the bytes that autograd keeps of a block."""
    shape = model.config
    angles = None
    if shape.position == "rotary":
        angles = rotary_angles(torch.arange(T), shape.head_size, shape.rope_base)
    x = torch.randn(B, T, shape.n_embd, requires_grad=True)
    block = model.transformer.h[layer]
    memory = MemTracker()
    memory.track_external(model, x, *(angles or ()))
    with memory, autocast(CPU, dtype, keep_weights=False):
        y = block(x, angles, None, None)
        total = memory.get_tracker_snapshot()[CPU]["Total"]
    weights = sum(p.nbytes for p in model.parameters())
    if dtype is torch.bfloat16 and mode == "none":  # the forecast counts cast weights elsewhere
        weights += sum(2 * p.numel() for p in block.parameters() if p.dim() == 2)
    # y is the next block's input
    return total - weights - y.nbytes - sum(angle.nbytes for angle in angles or ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["none", "cheap", "block"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forecast_of_a_block_is_the_bytes_that_autograd_keeps(recipe, mode, dtype):
    _, model = build(recipe, mode)
    measured = measure_blocks(model.config, Execution(mode), "cpu", dtype)[0]
    assert keep(model, mode, dtype) == B * measured.activation_bytes


@pytest.mark.parametrize("recipe", ["modern", "llama,n_kv_head=2"])
def test_a_forecast_for_a_gpu_counts_its_kernel_for_rms_norm(fused_norms, recipe):
    _, model = build(recipe)
    kept = keep(model, "none", torch.float32)
    shape = model.config
    blocks = measure_blocks(shape, Execution(), "cuda", torch.float32)
    activations = B * blocks[0].activation_bytes
    # a number more of each row that is normalized
    assert 0 <= activations - kept <= B * T * 4 * (2 + 2 * shape.n_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_holds_the_bytes_that_are_forecast(monkeypatch, dtype):
    monkeypatch.setattr(loss, "PLAIN_BYTES", 0)  # the loss of large models
    monkeypatch.setattr(chunked_loss, "SOFTMAX_BYTES_ON_CPU", 2**18)
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


C = 32
SHAPE = GPTConfig(block_size=T, vocab_size=64, n_layer=2, n_head=2, n_embd=C)


class GatedBlock(Block):
    """Block with one more linear layer, and a forward of its own."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.gate = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, *others):
        return super().forward(x, *others) * torch.sigmoid(self.gate(x))


class ExpertsBlock(Block):
    """Block whose router sends each token to one of four MLPs, by values."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.router = nn.Linear(C, 4, bias=False)
        self.experts = nn.ModuleList(MLP(config) for _ in range(4))

    def forward(self, x, *others):
        x = super().forward(x, *others)
        probabilities, choices = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = choices == index
            y[chosen] = (expert(x[chosen]) * probabilities[chosen, None]).float()
        return x + y


class WiderBlock(Block):
    """Block whose MLP is wider in the second layer than in the first."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        if layer == 1:
            self.mlp.c_fc = nn.Linear(config.n_embd, 10 * config.n_embd)
            self.mlp.c_proj = nn.Linear(10 * config.n_embd, config.n_embd)


@pytest.fixture
def edit(monkeypatch):
    """A function that puts a class in place of Block."""

    def replace_block(block_class):
        monkeypatch.setattr("model.gpt.Block", block_class)
        measure_blocks.cache_clear()

    yield replace_block
    measure_blocks.cache_clear()


def measure(dtype=torch.float32, **options):
    return measure_blocks(SHAPE, Execution(), "cpu", dtype, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_class", [GatedBlock, ExpertsBlock, WiderBlock])
def test_an_edited_block_is_forecast_to_keep_what_it_keeps(edit, block_class, dtype):
    edit(block_class)
    model = GPT(SHAPE)
    # An expert keeps a few bytes for each expert that has tokens.
    tolerance = 0.02 if block_class is ExpertsBlock else 0
    for layer, measured in enumerate(measure(dtype)):
        kept = keep(model, "none", dtype, layer)
        assert kept == pytest.approx(B * measured.activation_bytes, rel=tolerance)


@pytest.mark.parametrize(
    "block_class, flops",  # of a token in two layers, beyond those of Block
    [
        (GatedBlock, 2 * 2 * C * C),
        (ExpertsBlock, 2 * 2 * (8 * C * C + 4 * C)),  # one expert for each token, and the router
        (WiderBlock, 2 * 2 * C * 6 * C),
    ],
)
def test_flops_of_an_edited_block_are_forecast(edit, block_class, flops):
    edit(Block)
    plain = sum(block.flops for block in measure())
    edit(block_class)
    assert sum(block.flops for block in measure()) - plain == flops * T


def test_a_forecast_of_memory_and_the_widest_block_come_from_the_measurement(edit):
    edit(WiderBlock)
    options, _ = build("gpt2", "block")
    hardware = Hardware(CPU, torch.float32, 0)
    forecast = forecast_memory(options, parse_recipe("gpt2"), SHAPE, hardware)
    # inputs of the blocks and of the final norm
    assert forecast["activations"] == B * 4 * T * C * (SHAPE.n_layer + 1)
    widest = max(block.activation_bytes for block in measure())
    backward = forecast["head and logits, or one block's backward pass"]
    gradients = 4 * C * (3 * B * T + SHAPE.padded_vocab_size)
    assert backward == gradients + B * (widest - 4 * T * C)


def test_processes_that_share_a_block_divide_queries_keys_values_and_the_mlp():
    whole, shared = (measure(tensor_parallel=degree)[0] for degree in (1, 2))
    # queries, keys, values and heads' outputs; the MLP's hidden layer twice; attention's statistics
    divided = 4 * T * (3 * C + C + 2 * 4 * C + SHAPE.n_head)
    assert whole.activation_bytes - shared.activation_bytes == divided / 2
    assert 2 * shared.flops == whole.flops
