from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from config.options import TrainConfig
from config.recipes import Recipe, parse_recipe
from model.config import GPTConfig
from model.gpt import GPT
from training.muon import Muon
from training.optim import make_optimizers
from utils.errors import UserError

SHAPE = {"block_size": 8, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
RATES = {"embedding_rate": 0.3, "head_rate": 0.2}


def test_matrices_decay_and_vectors_do_not():
    model = GPT(GPTConfig(**SHAPE))
    (optimizer,) = make_optimizers(model, TrainConfig(), Recipe())
    dims = {0.1: set(), 0.0: set()}
    for group in optimizer.param_groups:
        assert group["lr_scale"] == 1.0
        dims[group["weight_decay"]] |= {p.dim() for p in group["params"]}
    assert dims == {0.1: {2}, 0.0: {1}}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(UserError, match="optimizer is one of adamw, muon"):
        make_optimizers(model, TrainConfig(), Recipe(optimizer="sgd"))
    assert len(held) == len(set(held)) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["gpt2", "modern", "speedrun", "llama,n_kv_head=1"])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(name):
    rates = ",".join(f"{name}={rate}" for name, rate in RATES.items())
    recipe = parse_recipe(f"{name},optimizer=muon,{rates}")
    model = GPT(GPTConfig(**SHAPE | recipe.shape(16, 8, 64)))
    adamw, muon = make_optimizers(model, TrainConfig(), recipe)
    names = {p: name for name, p in model.named_parameters()}
    theirs = {names[p]: group for group in muon.param_groups for p in group["params"]}
    assert set(theirs) == {n for n, p in model.named_parameters() if ".h." in n and p.dim() == 2}
    for name, group in theirs.items():
        gated = "c_fc" in name and model.config.activation == "swiglu"
        assert len(group["split_sizes"]) == (3 if "c_attn" in name else 2 if gated else 1)
        assert {p.size(0) for p in group["params"]} == {sum(group["split_sizes"])}
        assert group["lr_scale"] == 1.0 and group["weight_decay"] == 0.1
    rest = {names[p]: group for group in adamw.param_groups for p in group["params"]}
    assert set(rest) | set(theirs) == set(names.values()) and not set(rest) & set(theirs)
    for name, group in rest.items():
        table = name.startswith(("transformer.w", "transformer.ngrams"))
        rate = RATES["head_rate"] if "lm_head" in name else RATES["embedding_rate"]
        assert group["lr_scale"] == (rate if table or "lm_head" in name else 1.0), name
        assert group["weight_decay"] == 0


def muon(parameters, split_sizes=None, decay=0.0, dtype=torch.float32, **recipe):
    """Return Muon for parameters, each a group, with a learning rate of 0.1."""
    groups = [
        {"params": [p], "split_sizes": split_sizes or (p.size(0),), "lr": 0.1} for p in parameters
    ]
    return Muon(groups, Recipe(**recipe), decay, dtype)


@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)])
def test_one_matrix_steps_as_with_torch_optim_muon(shape):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    a = muon([ours], decay=0.1, dtype=torch.bfloat16)
    b = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.95)
    for _ in range(5):
        theirs.grad = torch.randn(shape)
        ours.grad = theirs.grad.clone()
        a.step()
        b.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)
    assert not torch.allclose(ours, torch.ones(shape), atol=0.05)


def test_matrices_stacked_in_a_weight_step_as_if_alone():
    torch.manual_seed(0)
    whole, sizes = torch.nn.Parameter(torch.zeros(10, 6)), (6, 2, 2)
    alone = [torch.nn.Parameter(torch.zeros(rows, 6)) for rows in sizes]
    whole.grad = torch.randn(10, 6)
    for p, grad in zip(alone, whole.grad.split(sizes), strict=True):
        p.grad = grad.clone()
    muon([whole], split_sizes=sizes).step()
    muon(alone).step()
    torch.testing.assert_close(whole, torch.cat(alone))


def test_normuon_gives_the_rows_of_updates_about_the_same_norm():
    torch.manual_seed(0)
    scale, norms = torch.logspace(-1, 1, 24)[:, None], {}
    for decay in (0.0, 0.9):
        p = torch.nn.Parameter(torch.zeros(24, 6))
        optimizer = muon([p], normuon=decay)
        for _ in range(60):
            before, p.grad = p.detach().clone(), scale * torch.randn(24, 6)
            optimizer.step()
        norms[decay] = (p.detach() - before).norm(dim=1) / 0.1
    assert norms[0.0].max() > 30 * norms[0.0].min() and norms[0.9].max() < 15 * norms[0.9].min()
    assert 0.5 < norms[0.9].mean() < 2
    assert optimizer.state[p]["row_squares"].shape == (24, 1)


def test_cautious_decay_spares_weights_that_the_update_makes_larger():
    torch.manual_seed(0)
    start, grad = torch.randn(8, 8), torch.randn(8, 8)
    found = {}
    for decay, cautious in ((0.0, False), (0.5, False), (0.5, True)):
        p = torch.nn.Parameter(start.clone())
        p.grad = grad.clone()
        muon([p], decay=decay, cautious=cautious).step()
        found[decay, cautious] = p.detach()
    smaller = start * (start - found[0.0, False]) > 0
    expected = torch.where(smaller, found[0.5, False], found[0.0, False])
    torch.testing.assert_close(found[0.5, True], expected)
    assert smaller.any() and not smaller.all()


def test_the_compiled_passes_of_muon_change_nothing_and_compile_for_two_steps_alone(monkeypatch):
    found, counts, counter = [], [], CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    for compiled in (False, True):
        torch.manual_seed(0)
        p = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(3)]
        groups = [{"params": p, "split_sizes": (8,)}]
        optimizer = Muon(groups, Recipe(normuon=0.9, cautious=True), 0.1, torch.float32, compiled)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            for x in p:
                x.grad = torch.randn(8, 4)
            optimizer.step()
            counts.append(counter.frame_count)
        found.append(torch.stack(p))
    torch.testing.assert_close(*found, atol=0, rtol=1e-6)
    assert counts[-1] == counts[-5] > 0  # the first step makes the state; no rate compiles anew
