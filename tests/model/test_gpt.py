import math
from dataclasses import replace

import pytest
import torch
from conftest import train_options, user_error
from tiny import RECIPES, tiny_gpt

from model.config import GPT2_SIZES, GPT3_SIZES, GPTConfig
from model.gpt import GPT
from model.initial_weights import build_without_weights, rebuild
from model.layers import KVCache, attention_kernel
from recipes import Recipe


def tiny(*args, **changes):
    """Return a small model to evaluate."""
    return tiny_gpt(*args, **changes).eval()


def named(name, **options):
    """Return the model of a --model_type, without weights."""
    config = train_options(model_type=name, **options).model_config(Recipe(), 50257)
    return build_without_weights(GPT, config)


COUNTS = (124_439_808, 354_823_168, 774_030_080, 1_557_611_200)


@pytest.mark.parametrize("name, count", list(zip(GPT2_SIZES, COUNTS, strict=True)))
def test_named_sizes_have_openai_s_parameter_counts(name, count):
    model = named(name)
    assert model.num_parameters() == count
    assert model.num_matmul_parameters() == count - 1024 * model.config.n_embd
    assert model.transformer.wte.weight.shape[0] == 50304


def test_gpt3_s_sizes_have_the_paper_s_parameter_counts():
    paper = (125e6, 350e6, 760e6, 1.3e9, 2.7e9, 6.7e9, 13e9, 175e9)
    for name, count in zip(GPT3_SIZES, paper, strict=True):
        assert named(name, block_size=2048).num_parameters() == pytest.approx(count, rel=0.02)


def test_initialisation_follows_gpt2():
    model = tiny(n_layer=8, n_embd=64)
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    block = model.transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_padding_of_the_vocabulary_is_not_scored_and_not_learned():
    model = tiny()
    with torch.no_grad():
        model.transformer.wte.weight[257:] = 100.0  # would win every softmax
    x, y = torch.randint(0, 257, (2, 3, 16))
    loss = model(x, y)
    loss.backward()
    assert model(x).shape[-1] == 257 and loss.item() < 2 * math.log(257)
    assert (model.transformer.wte.weight.grad[257:] == 0).all()


@pytest.mark.parametrize(
    "name, value",
    [
        *(("n_head", 5), ("n_layer", 0), ("n_kv_head", 5)),
        *(("dropout", 1.0), ("norm", "batch"), ("activation", None)),
    ],
)
def test_shapes_that_cannot_be_are_named(name, value):
    with user_error(name):
        GPTConfig(**{name: value})


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(AssertionError, match="17 tokens are too many"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_loss_is_near_ln_of_the_vocabulary(recipe):
    model = tiny(recipe)
    x = torch.randint(0, 257, (8, 16))
    assert abs(model(x, x.roll(-1, 1)).item() - math.log(257)) < 0.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_filled_token_by_token_gives_the_same_logits(recipe):
    """So no token sees a later one, which the cache does not hold yet."""
    model = tiny(recipe)
    x = torch.randint(0, 257, (3, 16))
    cache = KVCache(16)
    parts = [model.logits(model.hidden(part, cache)) for part in x.split([12, 1, 1, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), atol=1e-5, rtol=1e-5)
    cache = KVCache(16)
    model.hidden(x[:, :12], cache)
    with pytest.raises(AssertionError):  # attention would not be causal
        model.hidden(x[:, 12:14], cache)


@pytest.mark.parametrize("recipe", ["gpt2", "llama"])  # tied, and with a head of its own
def test_a_model_with_fewer_tokens_gives_the_logits_of_these(recipe):
    model = tiny(recipe)
    smaller = rebuild(model, replace(model.config, vocab_size=180)).eval()
    assert smaller.head_weight.shape == (192, 32) and smaller.head_weight.requires_grad
    x = torch.randint(0, 180, (2, 16))
    torch.testing.assert_close(smaller(x), model(x)[..., :180])


def test_the_attention_kernel_of_training_has_a_name():
    config = GPTConfig(n_layer=1)
    assert attention_kernel(config, torch.device("cpu"), torch.float32) == "FLASH_ATTENTION"
    assert (
        attention_kernel(replace(config, dropout=0.1), torch.device("cpu"), torch.float32) == "MATH"
    )
