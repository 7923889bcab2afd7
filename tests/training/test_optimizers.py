import pytest
import torch
import torch.distributed as dist
from conftest import train_options

from model.config import GPTConfig
from model.gpt import GPT
from recipes import Recipe, parse_recipe
from training.muon import Muon, orthogonalize, orthogonalize_together
from training.optimizers import make_optimizers

SHAPE = {"block_size": 8, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}


def group_of_each_parameter(model, *optimizers):
    names = {p: name for name, p in model.named_parameters()}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {names[p]: group for group in groups for p in group["params"]}


def test_adamw_decays_matrices_and_no_vectors():
    model = GPT(GPTConfig(**SHAPE))
    groups = group_of_each_parameter(model, *make_optimizers(model, train_options(), Recipe()))
    for name, p in model.named_parameters():
        assert groups[name]["lr_scale"] == 1.0
        assert groups[name]["weight_decay"] == (0.1 if p.dim() == 2 else 0.0)


@pytest.mark.parametrize("name", ["gpt2", "modern", "llama,n_kv_head=1"])
def test_muon_updates_the_matrices_of_the_blocks_and_adamw_the_rest(name):
    recipe = parse_recipe(f"{name},optimizer=muon,embedding_rate=0.3,head_rate=0.2")
    model = GPT(GPTConfig(**SHAPE | recipe.model_fields(16)))
    *adamw, muon = make_optimizers(model, train_options(), recipe)
    of_adamw = group_of_each_parameter(model, *adamw)
    of_muon = group_of_each_parameter(model, muon)
    rates = {"lm_head": 0.2, "transformer.wte": 0.3, "transformer.wpe": 0.3}
    for name, p in model.named_parameters():
        if ".h." in name and p.dim() == 2:
            group = of_muon.pop(name)
            assert (group["lr_scale"], group["weight_decay"]) == (1.0, 0.1)
            assert sum(group["local_fused_rows"]) == p.size(0)
            if "c_attn" in name:  # matrices of queries, keys and values
                assert len(group["local_fused_rows"]) == 3
        else:
            group = of_adamw.pop(name)
            rate = rates.get(name.removesuffix(".weight"), 1.0)
            assert (group["lr_scale"], group["weight_decay"]) == (rate, 0.0)
    assert not of_muon and not of_adamw


def step_muon(weights, gradients, fused_rows=None, decay=0.0, dtype=torch.float32, **recipe):
    """Return parameters that Muon has updated, each a group of its own, and the optimizer."""
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    groups = []
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.clone()
        groups.append({"params": [p], "local_fused_rows": fused_rows or (p.size(0),), "lr": 0.1})
    optimizer = Muon(groups, Recipe(**recipe), decay, dtype)
    optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("shape", [(24, 24), (48, 12), (12, 48)])
def test_one_matrix_steps_as_with_torch_optim_muon(shape):
    torch.manual_seed(0)
    theirs = torch.nn.Parameter(torch.ones(shape))
    theirs.grad = torch.randn(shape)
    (ours,), muon = step_muon([theirs], [theirs.grad], decay=0.1, dtype=torch.bfloat16)
    optimizer = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, momentum=0.95)
    for _ in range(4):
        optimizer.step()
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        muon.step()
    optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)
    assert not torch.allclose(ours, torch.ones(shape), atol=0.05)


def test_matrices_stacked_in_a_weight_step_as_if_alone():
    torch.manual_seed(0)
    gradient, sizes = torch.randn(10, 6), (6, 2, 2)
    (stacked,), _ = step_muon([torch.zeros(10, 6)], [gradient], fused_rows=sizes)
    alone, _ = step_muon([torch.zeros(rows, 6) for rows in sizes], gradient.split(sizes))
    torch.testing.assert_close(stacked, torch.cat(alone))


def test_normuon_divides_by_a_running_mean_that_begins_at_1():
    """Rows of updates then have about the same norm."""
    gradient = torch.logspace(-1, 1, 24)[:, None] * torch.eye(24, 6).add(1)
    (plain,), _ = step_muon([torch.zeros(24, 6)], [gradient])
    (p,), optimizer = step_muon([torch.zeros(24, 6)], [gradient], normuon=0.9)
    square_norms = (plain / 0.1).square().sum(1, keepdim=True)  # the rate is 0.1
    mean = torch.ones(24, 1)
    expected = torch.zeros(24, 6)
    for _ in range(3):
        mean = 0.9 * mean + 0.1 * square_norms
        expected += plain * mean.rsqrt()
        torch.testing.assert_close(p.detach(), expected)
        p.grad = gradient.clone()  # equal gradients have equal momenta, but for their size
        optimizer.step()


def test_several_processes_divide_the_matrices_of_muon(monkeypatch):
    torch.manual_seed(0)
    stack = torch.randn(3, 6, 4)  # two for the first process, one for the second
    expected = orthogonalize(stack, (4, 2))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    sent = []
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda _, own: sent.append(own.clone()))
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        orthogonalize_together(stack, (4, 2))
    assert (torch.cat(sent)[3] == 0).all()  # fills up the share of the second process
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda out, _: out.copy_(torch.cat(sent)))
    assert torch.equal(orthogonalize_together(stack, (4, 2)), expected)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)  # more than matrices: sends nothing
    monkeypatch.setattr(dist, "all_gather_into_tensor", None)
    assert torch.equal(orthogonalize_together(stack, (4, 2)), expected)
