"""An edited block is forecast as what it is: what a real forward pass on a CPU keeps."""

import pytest
import torch
from conftest import train_options
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from model.config import GPTConfig
from model.execution import Execution
from model.gpt import GPT, MLP, Block
from recipes import parse_recipe
from training.forecast.blocks import measure_blocks
from training.forecast.memory import Hardware, forecast_memory
from utils.devices import autocast

CPU = torch.device("cpu")
T, C = 64, 32
SHAPE = GPTConfig(block_size=T, vocab_size=64, n_layer=2, n_head=2, n_embd=C)


class GatedBlock(Block):
    """Block with one more linear layer, and a forward of its own."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.gate = nn.Linear(C, C)

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
            self.mlp.c_fc = nn.Linear(C, 10 * C)
            self.mlp.c_proj = nn.Linear(10 * C, C)


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


def really_kept(dtype):
    """Return the bytes that a model really keeps of one sequence, by layer."""
    by_layer = []
    for block in GPT(SHAPE).transformer.h:
        weights = {p.untyped_storage()._cdata for p in block.parameters()}

        def kept(batch, block=block, weights=weights):
            storages, saved = {}, []

            def keep(x):
                saved.append(x)
                storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
                return x

            x = torch.randn(batch, T, C, requires_grad=True)
            with autocast(CPU, dtype, keep_weights=False), saved_tensors_hooks(keep, lambda x: x):
                assert block(x, None, None, None).requires_grad  # so that something is kept
            return sum(size for key, size in storages.items() if key not in weights)

        by_layer.append((kept(6) - kept(2)) / 4)
    return by_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_class", [Block, GatedBlock, ExpertsBlock, WiderBlock])
def test_an_edited_block_is_forecast_to_keep_what_it_keeps(edit, block_class, dtype):
    edit(block_class)
    measured = [block.activation_bytes for block in measure(dtype)]
    # An expert keeps a few bytes for each expert that has tokens.
    tolerance = 0.02 if block_class is ExpertsBlock else 0
    assert measured == pytest.approx(really_kept(dtype), rel=tolerance)


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
    options = train_options(
        micro_batch_size=4,
        total_batch_size=4 * T,
        block_size=T,
        activation_checkpointing="block",
        use_torch_compile=False,
    )
    hardware = Hardware(CPU, torch.float32, 0)
    forecast = forecast_memory(options, parse_recipe("gpt2"), SHAPE, hardware)
    # inputs of the blocks and of the final norm
    assert forecast["activations"] == 4 * 4 * T * C * (SHAPE.n_layer + 1)
    widest = max(block.activation_bytes for block in measure())
    backward = forecast["head and logits, or one block's backward pass"]
    gradients = 4 * C * (3 * 4 * T + SHAPE.padded_vocab_size)
    assert backward == gradients + 4 * (widest - 4 * T * C)


def test_processes_that_share_a_block_divide_queries_keys_values_and_the_mlp():
    whole, shared = (measure(tensor_parallel=degree)[0] for degree in (1, 2))
    # queries, keys, values and heads' outputs; the MLP's hidden layer twice; attention's statistics
    divided = 4 * T * (3 * C + C + 2 * 4 * C + SHAPE.n_head)
    assert whole.activation_bytes - shared.activation_bytes == divided / 2
    assert 2 * shared.flops == whole.flops
