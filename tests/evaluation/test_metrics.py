import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from evaluation.metrics import validation_loss

from data.loader import Sequences, TokenStream
from data.tokenizer import bytes_per_token, load_tokenizer
from model.config import GPTConfig
from model.gpt import GPT
from utils.distributed import Process

ALONE = Process(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=257, n_layer=1, n_head=2, n_embd=16))


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_it_is_the_mean_over_the_first_tokens_for_any_batch_size(shards, model, batch_size):
    val = Sequences(TokenStream(shards, "val"), 32)
    scores = validation_loss(
        model,
        val,
        ALONE,
        tokens=3210,
        batch_size=batch_size,
        dtype=torch.float32,
        token_bytes=bytes_per_token(load_tokenizer("bytes")),
    )
    x, y = (torch.from_numpy(a) for a in val.batch(np.arange(3210 // 32)))
    expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    assert scores["loss"] == pytest.approx(expected, rel=1e-6)
    n_bytes = (y != 256).sum().item()
    assert scores["bits_per_byte"] == pytest.approx(
        expected * y.numel() / math.log(2) / n_bytes, rel=1e-6
    )
    assert model.training  # left as training needs it


def test_no_more_than_there_is_is_read(shards, model):
    val = Sequences(TokenStream(shards, "val"), 32)
    options = {"batch_size": 64, "dtype": torch.float32}
    whole = validation_loss(model, val, ALONE, tokens=10**9, **options)
    assert whole == validation_loss(model, val, ALONE, tokens=len(val) * 32, **options)
