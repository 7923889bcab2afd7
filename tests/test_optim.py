import torch

from model.config import GPTConfig
from model.gpt import GPT
from utils.optim import make_optimizer
from utils.parallel import load_optimizer_state, optimizer_state

CONFIG = GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8)


def test_matrices_decay_and_vectors_do_not():
    model = GPT(CONFIG)
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95))
    decay, rest = optimizer.param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decay["params"]} == {2} and {p.dim() for p in rest["params"]} == {1}
    assert len(decay["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_state_by_name_carries_over():
    models = [GPT(CONFIG) for _ in "ab"]
    a, b = (make_optimizer(m, weight_decay=0.1, betas=(0.9, 0.95)) for m in models)
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randint(0, 64, (2, 8))
    models[0](x, x).backward()
    a.step()
    models[1].load_state_dict(models[0].state_dict())
    load_optimizer_state(models[1], b, optimizer_state(models[0], a))
    for model, optimizer in zip(models, (a, b), strict=True):
        model.zero_grad()
        model(x, x).backward()
        optimizer.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
