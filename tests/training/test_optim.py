import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config import TrainConfig, parse_recipe
from model.config import GPTConfig
from model.gpt import GPT
from training.muon import Muon, newton_schulz
from training.optim import make_optimizers

SHAPE = {"block_size": 8, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
RATES = {"embedding_rate": 0.3, "head_rate": 0.2, "vector_rate": 0.1}


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(**SHAPE))
    (optimizer,) = make_optimizers(model, TrainConfig())
    dims = {0.1: set(), 0.0: set()}
    for group in optimizer.param_groups:
        assert group["lr_scale"] == 1.0
        dims[group["weight_decay"]] |= {p.dim() for p in group["params"]}
    assert dims == {0.1: {2}, 0.0: {1}}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))


@pytest.mark.parametrize("recipe", ["gpt2", "modern", "speedrun,conv=3", "llama,n_kv_head=1"])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(recipe):
    model = GPT(GPTConfig(**SHAPE, **parse_recipe(recipe).shape(8, 64)))
    rates = ",".join(f"{name}={rate}" for name, rate in RATES.items())
    adamw, muon = make_optimizers(model, TrainConfig(recipe=f"{recipe},optimizer=muon,{rates}"))
    names = {p: name for name, p in model.named_parameters()}
    theirs = {names[p]: group for group in muon.param_groups for p in group["params"]}
    assert set(theirs) == {n for n, p in model.named_parameters() if ".h." in n and p.dim() == 2}
    for name, group in theirs.items():
        matrices = 3 if "c_attn" in name else 2 if "c_fc" in name and "llama" in recipe else 1
        assert len(group["split_sizes"]) == matrices and group["lr_scale"] == 1.0
        assert {p.shape for p in group["params"]} == {
            torch.Size((sum(group["split_sizes"]), p.size(1))) for p in group["params"]
        }
    rest = {names[p]: group["lr_scale"] for group in adamw.param_groups for p in group["params"]}
    assert set(rest) | set(theirs) == set(names.values()) and not set(rest) & set(theirs)
    for name, rate in rest.items():
        table = name.startswith(("transformer.w", "transformer.ngrams"))
        kind = "head" if "lm_head" in name else "embedding" if table else "vector"
        assert rate == RATES[f"{kind}_rate"], name


@pytest.mark.parametrize("shape", [(16, 16), (16, 64)])
def test_updates_are_near_orthogonal(shape):
    torch.manual_seed(0)
    x = torch.randn(3, *shape)
    y = newton_schulz(x)
    singular = torch.linalg.svdvals(y)
    assert y.shape == x.shape and 0.6 < singular.min() and singular.max() < 1.25
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    nearest = (u @ v).flatten(1)
    assert torch.cosine_similarity(y.flatten(1), nearest).min() > 0.95


@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)])
def test_one_matrix_steps_as_with_torch_optim_muon(shape):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    group = {"params": [ours], "split_sizes": (shape[0],)}
    a = Muon([group], weight_decay=0.1, cautious=False, dtype=torch.bfloat16)
    b = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95)
    a.param_groups[0]["lr"] = 0.02
    for _ in range(5):
        theirs.grad = torch.randn(shape)
        ours.grad = theirs.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)
    assert not torch.allclose(ours, torch.ones(shape), atol=0.01)


def test_matrices_stacked_in_a_weight_step_as_if_alone():
    torch.manual_seed(0)
    whole, parts = torch.nn.Parameter(torch.zeros(10, 6)), [(6, 6), (2, 6), (2, 6)]
    alone = [torch.nn.Parameter(torch.zeros(shape)) for shape in parts]
    whole.grad = torch.randn(10, 6)
    for p, grad in zip(alone, whole.grad.split([6, 2, 2]), strict=True):
        p.grad = grad.clone()
    groups = [{"params": [p], "split_sizes": (p.size(0),)} for p in alone]
    for own in ([{"params": [whole], "split_sizes": (6, 2, 2)}], groups):
        muon = Muon(own, weight_decay=0.0, cautious=False, dtype=torch.float32)
        for group in muon.param_groups:
            group["lr"] = 0.1
        muon.step()
    torch.testing.assert_close(whole, torch.cat(alone))


def test_normuon_gives_the_rows_of_updates_about_the_same_norm():
    torch.manual_seed(0)
    scale, norms = torch.logspace(-1, 1, 24)[:, None], {}
    for decay in (0.0, 0.9):
        p = torch.nn.Parameter(torch.zeros(24, 6))
        groups = [{"params": [p], "split_sizes": (24,), "lr": 1.0}]
        options = {"weight_decay": 0.0, "cautious": False, "dtype": torch.float32}
        muon = Muon(groups, normuon=decay, **options)
        for _ in range(60):
            before, p.grad = p.detach().clone(), scale * torch.randn(24, 6)
            muon.step()
        norms[decay] = (p.detach() - before).norm(dim=1)
    assert norms[0.0].max() > 30 * norms[0.0].min() and norms[0.9].max() < 15 * norms[0.9].min()
    assert 0.5 < norms[0.9].mean() < 2
    assert muon.state[p]["row_squares"].shape == (24, 1)


def test_cautious_decay_spares_weights_that_the_update_makes_larger():
    torch.manual_seed(0)
    start, grad = torch.randn(8, 8), torch.randn(8, 8)
    found = {}
    for decay, cautious in ((0.0, False), (0.5, False), (0.5, True)):
        p = torch.nn.Parameter(start.clone())
        p.grad = grad.clone()
        groups = [{"params": [p], "split_sizes": (8,), "lr": 0.1}]
        Muon(groups, weight_decay=decay, cautious=cautious, dtype=torch.float32).step()
        found[decay, cautious] = p.detach()
    smaller = start * (start - found[0.0, False]) > 0
    expected = torch.where(smaller, found[0.5, False], found[0.0, False])
    torch.testing.assert_close(found[0.5, True], expected)
    assert smaller.any() and not smaller.all()


def test_a_step_of_muon_takes_few_kernels_for_any_number_of_layers():
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "aten" and not func.is_view and "view" not in func.name():
                ops.append(func.name())
            return func(*args, **kwargs or {})

    counts = {}
    for n_layer in (2, 12):
        config = TrainConfig(recipe="modern", n_layer=n_layer, n_head=2, n_embd=32, block_size=16)
        model, ops = GPT(config.model_config(257)), []
        _, muon = make_optimizers(model, config, torch.bfloat16)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        muon.step()  # creates the buffers
        with Count():
            muon.step()
        counts[n_layer] = len(ops)
    assert counts[2] == counts[12] <= 90, "\n".join(ops)
