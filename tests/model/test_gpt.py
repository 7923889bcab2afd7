import math

import pytest
import torch
import torch.nn.functional as F
from conftest import script
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from model.cache import KVCache
from model.config import SIZES, GPTConfig, ModelError
from model.functional import gelu
from model.gpt import GPT
from model.loss import CHUNK_BYTES, PART_BYTES, SLICE_BYTES, SUM_BYTES, HeadCrossEntropy, look_up
from model.norm import rms_norm
from model.rotary import rotate, rotations
from recipes import recipe_of
from training.parallel import recompute
from utils.distributed import autocast

RECIPES = ("gpt2", "modern", "llama,n_kv_head=1")
TRIANGLE = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]


def tiny(recipe="gpt2", **changes):
    torch.manual_seed(0)
    shape = {"block_size": 16, "vocab_size": 257, "n_layer": 2, "n_head": 2, "n_embd": 32}
    return GPT(GPTConfig(**{**shape, **recipe_of(recipe).model, **changes})).eval()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_named_sizes_have_openai_s_parameter_counts(name, count):
    with torch.device("meta"):
        model = GPT(GPTConfig(**SIZES[name]))
    assert model.num_parameters() == count
    assert model.num_multiplying() == count - 1024 * model.config.n_embd
    assert model.transformer.wte.weight.shape[0] == 50304


def test_initialisation_follows_gpt2():
    model = tiny(n_layer=8, n_embd=64)
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    block = model.transformer.h[3]
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for projection in (block.attn.c_proj, block.mlp.c_proj):
        assert projection.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_loss_is_near_ln_of_the_vocabulary(recipe):
    model = tiny(recipe)
    x = torch.randint(0, 257, (8, 16))
    assert abs(model(x, x.roll(-1, 1)).item() - math.log(257)) < 0.1


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_token_sees_a_later_one(recipe):
    model = tiny(recipe)
    x = torch.randint(0, 257, (1, 16))
    changed = x.clone()
    changed[0, 9] = (x[0, 9] + 1) % 257
    a, b = model(x), model(changed)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cache_filled_in_any_steps_gives_the_same_logits(recipe):
    model = tiny(recipe)
    x = torch.randint(0, 257, (3, 16))
    cache = KVCache(16)
    parts = [model.logits(model.hidden(part, cache)) for part in x.split([5, 4, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 7, 32, 1000])
def test_targets_looked_up_slice_by_slice_are_those_of_all_logits(monkeypatch, width):
    torch.manual_seed(0)
    N, V = 300, 50
    monkeypatch.setitem(SLICE_BYTES, "cpu", 4 * N * width)
    x, weight = torch.randn(N, 4).round(), torch.randn(V, 4).round()  # so products are exact
    weight[[5, 20, 33]] = weight[[30, 3, 44]]  # logits that tie, within slices and across
    logits = x @ weight.T
    banned = logits.argmax(-1).unique()[:3].tolist()
    allowed = logits.index_fill(-1, torch.tensor(banned), -torch.inf)
    targets = torch.randint(V, (N,))
    targets[:100], targets[100:200] = logits.argmax(-1)[:100], allowed.argmax(-1)[100:200]

    logprob, hit, filtered = look_up(x, weight, targets, banned)

    plain = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logprob, plain, rtol=0, atol=1e-5)
    assert hit.tolist() == (logits.argmax(-1) == targets).tolist()
    assert filtered.tolist() == (allowed.argmax(-1) == targets).tolist()
    assert hit.any() and (hit > filtered).any() and (hit < filtered).any()


@pytest.mark.parametrize("chunk_rows", [1, 7, 48, 1000])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_chunked_loss_and_its_gradients_are_the_plain_ones(monkeypatch, chunk_rows, recipe):
    model = tiny(recipe)
    row = 4 * model.config.padded_vocab_size
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_rows * row)
    monkeypatch.setitem(PART_BYTES, "cpu", 5 * row)
    monkeypatch.setitem(SUM_BYTES, "cpu", 4 * 32 * 100)  # of 320 rows of the embedding
    x, y = torch.randint(0, 257, (2, 3, 16))
    y[0, :5] = -1  # does not count
    ours = model(x, y)
    (2 * ours).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    plain = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
    (2 * plain).backward()
    torch.testing.assert_close(ours, plain)
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_tied_embedding_learns_in_the_gradient_of_the_head():
    model, made = tiny(), []

    class Made(TorchDispatchMode):
        """Notes tensors as large as the embedding that an operation has made."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if getattr(result, "shape", None) == model.head_weight.shape:
                known = {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
                made.extend([function] if result.data_ptr() not in known else [])
            return result

    loss = model(*torch.randint(0, 257, (2, 3, 16)))
    with Made():
        loss.backward()
    assert model.head_weight.grad is not None and not made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_gives_the_same_where_it_is_compiled(monkeypatch, dtype):  # as on GPUs it is
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 320 * 48)
    torch.manual_seed(0)
    x, weight = torch.randn(100, 32), torch.randn(320, 32)
    targets = torch.randint(300, (100,))
    targets[::7] = -1
    found = []
    for head in (HeadCrossEntropy.apply, torch.compile(HeadCrossEntropy.apply, fullgraph=True)):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with autocast(torch.device("cpu"), dtype):
            loss = head(*leaves, targets, 300, True)
        (3 * loss).backward()
        found.append([loss, *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found)


def test_gelu_is_the_same_where_it_is_compiled():
    compiled = torch.compile(gelu)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for function in (gelu, compiled):
            x = torch.linspace(-30, 30, 1001).to(dtype).requires_grad_()
            function(x).sum().backward()
            found.append([function(x), x.grad])
        torch.testing.assert_close(*found)


def test_padding_of_the_vocabulary_is_not_scored_and_not_learned():
    model = tiny()
    with torch.no_grad():
        model.transformer.wte.weight[257:] = 100.0  # would win every softmax
    x, y = torch.randint(0, 257, (2, 3, 16))
    loss = model(x, y)
    loss.backward()
    assert model(x).shape[-1] == 257 and loss.item() < 2 * math.log(257)
    assert (model.transformer.wte.weight.grad[257:] == 0).all()


def test_heads_of_queries_that_share_keys_are_as_with_keys_repeated():
    model, C = tiny("llama", n_head=4, n_kv_head=2), 32
    plain = tiny("llama", n_head=4)
    state = model.state_dict()
    for layer in range(2):
        name = f"transformer.h.{layer}.attn.c_attn.weight"
        q, k, v = state[name].split([C, C // 2, C // 2])
        k, v = (x.view(2, 8, C).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))
        state[name] = torch.cat([q, k, v])
    plain.load_state_dict(state)
    x = torch.randint(0, 257, (2, 16))
    torch.testing.assert_close(model(x), plain(x))


def test_rotary_logits_follow_from_distances_alone():
    model = tiny("modern", n_layer=1)
    x = torch.randint(0, 257, (1, 8))
    shifted = model.logits(model.hidden(x, positions=torch.arange(5, 13)[None], mask=TRIANGLE))
    torch.testing.assert_close(shifted, model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rotations_and_their_gradients_are_the_plain_ones(dtype):
    x = torch.randn(2, 5, 3, 16, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 3, 5, 16, dtype=dtype).transpose(1, 2)
    cos, sin = rotary = rotations(torch.arange(5), 16, 10_000.0)
    ours = rotate(x, rotary)
    ours.backward(grad)
    found, x.grad = x.grad, None
    a, b = x.chunk(2, dim=-1)
    plain = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    plain.backward(grad)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(found, x.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rms_norm_is_pytorch_s(dtype):
    x, grad = torch.randn(2, 3, 5, 16, dtype=dtype)
    x.requires_grad_()
    ours = rms_norm(x)
    ours.backward(grad)
    found, x.grad = x.grad, None
    plain = F.rms_norm(x, (16,), eps=1e-5)
    plain.backward(grad)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(found, x.grad)
    assert dtype is torch.float32 or torch.autograd.gradcheck(rms_norm, x)


def test_rms_norm_keeps_bfloat16_under_the_autocast_of_cuda():
    enabled = torch.is_autocast_enabled("cuda")
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(2, 4, 16, dtype=torch.bfloat16, device="cuda")
        torch.set_autocast_enabled("cuda", True)
        try:
            assert rms_norm(x).dtype is torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", enabled)


@pytest.mark.parametrize(
    "change",
    [
        {"n_head": 5},
        {"n_layer": 0},
        {"dropout": 1.0},
        {"n_kv_head": 5},
        {"n_inner": 0},
        {"norm": "batch"},
        {"activation": None},
        {"bias": 1},
        {"rope_base": None},
    ],
)
def test_shapes_that_cannot_be_are_named(change):
    with pytest.raises(ModelError, match=next(iter(change))):
        GPTConfig(**change)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ModelError, match="17 tokens do not fit the context of 16"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


PLAIN = """
import sys, torch
from model.config import GPTConfig
from model.gpt import GPT
idx = torch.zeros(1, 16, dtype=torch.long)
GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=16))(idx, idx).backward()
print("torch._dynamo" in sys.modules)
"""


def test_a_plain_step_does_without_the_compiler_which_takes_a_second_to_import():
    assert script("-c", PLAIN).stdout == "False\n"


@pytest.mark.parametrize("what", ["mlp", "cheap", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_computed_again_changes_no_gradient(what, dtype, recipe):
    found, flops = {}, {}
    idx = torch.randint(0, 257, (2, 16))
    for again in ("none", what):
        model = tiny(recipe)
        recompute(model, again)
        with FlopCounterMode(display=False) as counter:
            with autocast(torch.device("cpu"), dtype, keep_weights=False):
                loss = model(idx, idx)
            loss.backward()
        found[again] = {name: p.grad for name, p in model.named_parameters()}
        flops[again] = counter.get_total_flops()
    for name, grad in found["none"].items():
        assert torch.equal(grad, found[what][name]), name
    if what == "block":
        assert flops[what] > flops["none"]
    else:  # no matrix product is done twice
        assert flops[what] == flops["none"]
