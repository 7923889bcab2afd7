import json

import numpy as np
import pytest
from conftest import script
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers

from data.file_tokenizer import read_tokenizer, save_tokenizer
from data.shards import folder_tokenizer, write_manifest
from data.tokenizer import GPT2Tokenizer, load_tokenizer
from evaluation.scoring import pack
from evaluation.tasks import Item
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


def test_saved_merges_are_gpt2s_own_and_are_read_as_gpt2(gpt2, tmp_path):
    save_tokenizer(gpt2, tmp_path, block_size=1024)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    assert (vocab["!"], vocab["\u0120the"], len(vocab)) == (0, 262, 50256)
    assert [list(merge) for merge in merges[:2]] == [["\u0120", "t"], ["\u0120", "a"]]
    assert content["added_tokens"][0]["id"] == 50256 and len(merges) == 50000
    assert read_tokenizer(tmp_path / "tokenizer.json") == "gpt2"


def test_saved_bytes_have_no_merges_and_are_read_as_bytes(tmp_path):
    save_tokenizer(load_tokenizer("bytes"), tmp_path, block_size=32)
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert content["model"]["merges"] == [] and len(content["model"]["vocab"]) == 256
    assert read_tokenizer(tmp_path / "tokenizer.json") == "bytes"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 32
    write_manifest(tmp_path, {"tokenizer": "gpt2", "vocab_size": 50257, "shards": []})
    with pytest.raises(UserError, match="not the tokenizer of these shards, which have gpt2"):
        folder_tokenizer(tmp_path)


TEXTS = {
    "german": "Die Würde des Menschen ist unantastbar. Größe, 1.234 Äpfel!",
    "chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में",
    "code": "def f(x):\n\treturn x**2  # <|endoftext|> in text is text\n\n\n",
}


@pytest.fixture(scope="module", params=["unicode", "gpt2"])
def own(request, tmp_path_factory):
    """A tokenizer.json of at most 600 tokens, trained on the texts."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "all.txt").write_text("\n".join([*TEXTS.values()] * 400), encoding="utf-8")
    sizes = ["--vocab_size", 600, "--split", request.param]
    for name in ("tokenizer.json", "again.json"):
        args = ["--input", folder / "all.txt", "--out", folder / name]
        script("data/train_tokenizer.py", *args, *sizes)
    assert (folder / "tokenizer.json").read_bytes() == (folder / "again.json").read_bytes()
    return folder / "tokenizer.json"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_own_tokenizer_gives_the_bytes_back_and_the_ids_of_transformers(own, text, tmp_path):
    tokenizer = load_tokenizer(read_tokenizer(own))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and tokenizer.eot == tokenizer.vocab_size - 1 not in ids
    assert tokenizer.decode_bytes([tokenizer.eot, *ids.tolist()]).decode() == text
    assert len(text.encode()) > 1.5 * len(ids)
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tokenizer, tmp_path, block_size=32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eot
    plain = text.replace("<|endoftext|>", "")  # which transformers reads as the token
    assert theirs.encode(plain) == tokenizer.encode(plain).tolist()


def test_a_tokenizer_with_byte_fallback_gives_the_bytes_back(tmp_path):
    vocab = {f"<0x{b:02X}>": b for b in range(256)}
    words = ["</s>", "\u2581", "\u2581hi", "h", "i", "\u2581h"]
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    merges = [("\u2581", "h"), ("\u2581h", "i")]
    engine = Engine(models.BPE(vocab, merges, byte_fallback=True))
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.decoder = decoders.ByteFallback()
    engine.add_special_tokens(["</s>"])
    engine.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(read_tokenizer(tmp_path / "t.json", "</s>"))
    ids = tokenizer.encode(" hi ü").tolist()
    assert ids[:2] == [vocab["\u2581hi"], vocab["\u2581"]] and len(ids) == 4
    assert tokenizer.decode_bytes([*ids, tokenizer.eot]).decode() == " hi ü"
    prepend = normalizers.Prepend("\u2581")  # of Llama 2
    engine.normalizer = normalizers.Sequence([prepend, engine.normalizer])
    engine.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(read_tokenizer(tmp_path / "t.json", "</s>"))
    (row,) = pack([Item("hi", (" hi",))], tokenizer, 32)  # encoded together, as by the harness
    assert row.context == row.choices[0] == [vocab["\u2581hi"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens": []}, "no end of text .*--end_of_text"),
        ({"model": {"type": "BPE", "vocab": {"a": 65_535}, "merges": []}}, "id 65,535"),
        ({"model": {}}, "no tokenizer that can be used"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(own, tmp_path, changes, message):
    content = json.loads(own.read_text(encoding="utf-8"))
    (tmp_path / "t.json").write_text(json.dumps(content | changes))
    with pytest.raises(UserError, match=message):
        read_tokenizer(tmp_path / "t.json")
