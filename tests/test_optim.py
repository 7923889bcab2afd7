from model.config import GPTConfig
from model.gpt import GPT
from utils.optim import make_optimizer

CONFIG = GPTConfig(block_size=8, vocab_size=64, n_layer=1, n_head=1, n_embd=8)


def test_matrices_decay_and_vectors_do_not():
    model = GPT(CONFIG)
    optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95))
    decay, rest = optimizer.param_groups
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decay["params"]} == {2} and {p.dim() for p in rest["params"]} == {1}
    assert len(decay["params"]) + len(rest["params"]) == len(list(model.parameters()))
