import pytest
import torch
from edited import READERS, SlidingWindow
from tiny import RECIPES, tiny_gpt

from config import SamplingConfig
from model.config import GPTConfig
from model.generate import cache_agrees, complete, draw_uniforms, generate, sample_token
from model.proof import is_proven


@pytest.fixture(scope="module", params=RECIPES)
def model(request):
    model = tiny_gpt(request.param).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(0, 0.3)  # far from uniform, so that wrong positions would show
    return model


def sampling_of(n, **options):
    return SamplingConfig(n, **{"temperature": 1.0, "seed": 0, **options})


def tokens(model, prompts, n, first_index=0, **options):
    steps = list(generate(model, prompts, sampling_of(n, **options), first_index))
    return torch.stack(steps, 1).tolist()


@torch.no_grad()
def tokens_without_cache(model, prompts, n, first_index, **options):
    """Read the whole context for each token."""
    sampling, context, steps = sampling_of(n, **options), torch.tensor(prompts), []
    for uniform in draw_uniforms(len(prompts), sampling, first_index).unbind(1):
        if context.size(1) > 16:
            context = context[:, -8:]
        steps.append(sample_token(model(context)[:, -1], uniform, sampling))
        context = torch.cat([context, steps[-1][:, None]], 1)
    return torch.stack(steps, 1).tolist()


def check_each_token(model, **options):
    """Compare samples of prompts of different lengths, up to the context of 16 and beyond it."""
    prompts = [[1], list(range(2, 18)), [3, 4, 5], list(range(30, 40))]
    sampled = tokens(model, prompts, 30, **options)
    for row, prompt in enumerate(prompts):
        assert [sampled[row]] == tokens_without_cache(model, [prompt], 30, row, **options)
    assert len(set(map(tuple, sampled))) == 4


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 3}, {"seed": 3, "top_k": 5}])
def test_the_cache_changes_no_token_also_beyond_the_context(model, options):
    check_each_token(model, **options)


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours(model):
    three = tokens(model, [[7]] * 3, 20, seed=5)
    assert tokens(model, [[7]], 20, seed=5) == three[:1]
    assert tokens(model, [[7]] * 2, 20, seed=5, first_index=1) == three[1:]
    assert three[0] != three[1] != three[2]
    assert tokens(model, [[7]], 20, seed=6) != three[:1]


def test_seeds_of_any_size_give_numbers_of_their_own():
    seeds = [2**bits + i for bits in (0, 31, 32, 44, 63, 64, 65, 200) for i in (0, 1, 1337)]
    drawn = [draw_uniforms(1, sampling_of(8, seed=seed)) for seed in seeds]
    assert len(torch.cat(drawn).unique(dim=0)) == len(seeds)


def draw(logits, n=20_000, **options):
    uniform = (torch.arange(n) + 0.5) / n
    ids = sample_token(logits.expand(n, -1), uniform, sampling_of(1, **options))
    return torch.bincount(ids, minlength=logits.numel()) / n


LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


@pytest.mark.parametrize(
    "options, shares",
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0068]),  # squares
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.79}, [0.625, 0.375, 0, 0]),  # the smallest set that reaches p
        ({"top_p": 0.81}, [0.5263, 0.3158, 0.1579, 0]),
        ({"top_p": 1e-9}, [1.0, 0, 0, 0]),
    ],
)
def test_choice_follows_the_distribution_temperature_top_k_and_top_p(options, shares):
    torch.testing.assert_close(draw(LOGITS, **options), torch.tensor(shares), atol=1e-3, rtol=0)


def test_top_k_keeps_exactly_k_also_in_ties():
    assert (draw(torch.ones(4), top_k=2) > 0).sum() == 2


def test_no_uniform_number_falls_off_the_end():
    logits = torch.randn(4, 50257)
    top = torch.full((4,), 1 - 2**-24)
    for top_p in (None, 0.9):
        assert (sample_token(logits, top, sampling_of(1, top_p=top_p)) < 50257).all()


def test_a_text_ends_before_the_first_of_several_end_tokens(model):
    sampling = sampling_of(30, seed=2)
    (free,) = complete(model, [[3]], frozenset(), sampling)
    assert len(free.tokens) == 30 and free.end_id is None
    ends = {free.tokens[10], free.tokens[20]}
    (ended,) = complete(model, [[3]], frozenset(ends), sampling)
    place = min(map(free.tokens.index, ends))
    assert (ended.tokens, ended.end_id) == (free.tokens[:place], free.tokens[place])


def test_a_recipe_samples_with_the_cache(model, caplog):
    assert is_proven("the KV cache", cache_agrees, model) and not caplog.records


@pytest.mark.parametrize("model_class", READERS)
@torch.no_grad()
def test_a_model_that_a_cache_does_not_suit_is_sampled_as_it_was_trained(model_class, caplog):
    model = model_class(tiny_gpt("modern").config).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(0, 0.3)
    assert not is_proven("the KV cache", cache_agrees, model)
    assert "the KV cache gives another result" in caplog.text
    check_each_token(model)


@pytest.mark.parametrize("width", [2, 16, 1000, 1020])
def test_a_window_of_any_width_shows(width):
    class Windowed(SlidingWindow):
        def __init__(self, config):
            super().__init__(config)
            for block in self.transformer.h:
                block.attn.attend.width = width

    assert not is_proven("the KV cache", cache_agrees, Windowed(GPTConfig(n_layer=1, n_embd=48)))
