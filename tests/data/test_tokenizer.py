import json

import numpy as np
import pytest

from data.tokenizer import GPT2Tokenizer, bytes_per_token, load_tokenizer
from data.tokenizer_files import save_tokenizer
from utils.errors import UserError


@pytest.fixture(scope="module")
def gpt2():
    try:
        return GPT2Tokenizer()
    except UserError as error:
        pytest.skip(str(error))


def test_bytes_round_trip_any_text():
    tokenizer = load_tokenizer("bytes")
    text = "def naïve(): return '🐍'\n\x00"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.max() < 256
    assert tokenizer.decode_bytes([tokenizer.eot, *ids.tolist()]).decode() == text


def test_gpt2_round_trip_and_special_tokens_are_plain_text(gpt2):
    text = "Hello <|endoftext|> naïve 🐍"
    ids = gpt2.encode(text)
    assert gpt2.eot not in ids
    assert gpt2.decode_bytes(ids.tolist()).decode() == text
    assert gpt2.encode("Hello world").tolist() == [15496, 995]


def test_bytes_per_token_adds_up_to_the_text(gpt2):
    text = "The quick brown fox, naïve 🐍.\n\n  indented"
    table = bytes_per_token(gpt2)
    assert table[gpt2.encode(text)].sum() == len(text.encode())
    assert table[gpt2.eot] == 0 and len(table) == 50257


def test_saved_merges_and_vocabulary_are_gpt2s_own_files(gpt2, tmp_path):
    save_tokenizer(gpt2, tmp_path, block_size=1024)
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    merges = (tmp_path / "merges.txt").read_text(encoding="utf-8").split("\n")
    assert (vocab["!"], vocab["\u0120the"], vocab["<|endoftext|>"]) == (0, 262, 50256)
    assert merges[:3] == ["#version: 0.2", "\u0120 t", "\u0120 a"]
    assert len(vocab) == 50257 and len(merges) == 50002


def test_saved_bytes_have_no_merges(tmp_path):
    save_tokenizer(load_tokenizer("bytes"), tmp_path, block_size=32)
    assert (tmp_path / "merges.txt").read_text() == "#version: 0.2\n"
    assert len(json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))) == 257
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 32
