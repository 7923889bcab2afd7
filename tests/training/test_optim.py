import pytest
import torch
from conftest import train_options

from model.config import GPTConfig
from model.gpt import GPT
from model.recipes import Recipe, parse_recipe
from training.muon import Muon
from training.optim import make_optimizers
from utils.errors import UserError

SHAPE = {"block_size": 8, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}


def group_of_each_parameter(model, optimizer):
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: group for group in optimizer.param_groups for p in group["params"]}


def test_adamw_decays_matrices_and_no_vectors():
    model = GPT(GPTConfig(**SHAPE))
    (optimizer,) = make_optimizers(model, train_options(), Recipe())
    groups = group_of_each_parameter(model, optimizer)
    for name, p in model.named_parameters():
        assert groups[name]["lr_scale"] == 1.0
        assert groups[name]["weight_decay"] == (0.1 if p.dim() == 2 else 0.0)
    with pytest.raises(UserError, match="optimizer is one of adamw, muon"):
        make_optimizers(model, train_options(), Recipe(optimizer="sgd"))


@pytest.mark.parametrize("name", ["gpt2", "modern", "speedrun", "llama,n_kv_head=1"])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(name):
    recipe = parse_recipe(f"{name},optimizer=muon,embedding_rate=0.3,head_rate=0.2")
    model = GPT(GPTConfig(**SHAPE | recipe.shape(16, 8, 64)))
    adamw, muon = make_optimizers(model, train_options(), recipe)
    of_muon = group_of_each_parameter(model, muon)
    of_adamw = group_of_each_parameter(model, adamw)
    assert not set(of_muon) & set(of_adamw)
    for name, p in model.named_parameters():
        if ".h." in name and p.dim() == 2:
            group = of_muon[name]
            is_gated = "c_fc" in name and model.config.activation == "swiglu"
            assert len(group["split_sizes"]) == (3 if "c_attn" in name else 2 if is_gated else 1)
            assert p.size(0) == sum(group["split_sizes"])
            assert (group["lr_scale"], group["weight_decay"]) == (1.0, 0.1)
        else:
            is_table = name.startswith(("transformer.w", "transformer.ngrams"))
            rate = 0.2 if "lm_head" in name else 0.3 if is_table else 1.0
            assert (of_adamw[name]["lr_scale"], of_adamw[name]["weight_decay"]) == (rate, 0.0)


def step_muon(weights, gradients, split_sizes=None, decay=0.0, **recipe):
    """Return parameters that Muon has updated, each a group of its own, and the optimizer."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = []
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
        groups.append({"params": [p], "split_sizes": split_sizes or (p.size(0),), "lr": 0.1})
    optimizer = Muon(groups, Recipe(**recipe), decay, torch.float32)
    optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)])
def test_one_matrix_steps_as_with_torch_optim_muon(shape):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    group = {"params": [ours], "split_sizes": (shape[0],), "lr": 0.1}
    a = Muon([group], Recipe(), 0.1, torch.bfloat16)
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
    gradient, sizes = torch.randn(10, 6), (6, 2, 2)
    (stacked,), _ = step_muon([torch.zeros(10, 6)], [gradient], split_sizes=sizes)
    alone, _ = step_muon([torch.zeros(rows, 6) for rows in sizes], gradient.split(sizes))
    torch.testing.assert_close(stacked, torch.cat(alone))


def test_normuon_gives_the_rows_of_updates_about_the_same_norm():
    torch.manual_seed(0)
    scale, norms = torch.logspace(-1, 1, 24)[:, None], {}
    for normuon in (0.0, 0.9):
        start = (torch.zeros(24, 6), scale * torch.randn(24, 6))
        (p,), optimizer = step_muon(start[:1], start[1:], normuon=normuon)
        for _ in range(60):
            before, p.grad = p.detach().clone(), scale * torch.randn(24, 6)
            optimizer.step()
        norms[normuon] = (p.detach() - before).norm(dim=1) / 0.1
    assert norms[0.0].max() > 30 * norms[0.0].min() and norms[0.9].max() < 15 * norms[0.9].min()
    assert 0.5 < norms[0.9].mean() < 2
    assert optimizer.state[p]["row_squares"].shape == (24, 1)


def test_cautious_decay_spares_weights_that_the_update_makes_larger():
    torch.manual_seed(0)
    start, gradient = torch.randn(8, 8), torch.randn(8, 8)
    (plain,), _ = step_muon([start], [gradient])
    (decayed,), _ = step_muon([start], [gradient], decay=0.5)
    (cautious,), _ = step_muon([start], [gradient], decay=0.5, cautious=True)
    shrinks = start * (start - plain) > 0
    torch.testing.assert_close(cautious, torch.where(shrinks, decayed, plain))
    assert shrinks.any() and not shrinks.all()
