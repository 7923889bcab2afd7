"""Examples with numbers that stand in docstrings and comments of the code."""

import torch

from model.chunked_loss import tokens_per_chunk
from model.config import GPTConfig
from model.formats.checkpoint import flatten, split_float32
from model.generate import positions_and_mask
from model.proof import narrow_config
from training.forecast.step_time import split_by_link
from training.parallel.tensor_parallel import row_order
from utils.cli import named_flags, to_flags


def test_examples_in_docstrings_are_true():
    assert tokens_per_chunk(16_384, 50_304, torch.device("cuda")) == 4096
    assert tokens_per_chunk(5312, 50_304, torch.device("cuda")) == 5312
    high, low = split_float32(torch.tensor([0x3F80C000]).int().view(torch.float32))
    assert (high.view(torch.int16).item(), low.item()) == (0x3F81, -0x4000)
    state = {"lm_head.weight": {"exp_avg": 0j, "factors": [1j, 2j], "count": 3}}
    assert list(flatten(state).values()) == [0j, 1j, 2j]
    assert list(flatten(state))[1:] == ["lm_head.weight factors 0", "lm_head.weight factors 1"]
    positions, _ = positions_and_mask(torch.tensor([2, 0]), 4, 4)
    assert positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    narrow = narrow_config(GPTConfig(), 2)
    assert (narrow.n_embd, narrow.n_head, narrow.n_layer, narrow.vocab_size) == (32, 2, 4, 509)
    assert split_by_link(16, 16, 8) == (14, 1)
    assert row_order((4, 2, 2), 2).tolist() == [0, 1, 4, 6, 2, 3, 5, 7]
    assert to_flags({"max_lr": 1e-3, "wandb": False}) == ["--max_lr", "0.001", "--no_wandb"]
    assert named_flags(["--max_lr", "1e-3", "--wandb"]) == [("max_lr", "1e-3"), ("wandb", None)]
