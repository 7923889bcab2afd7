import importlib
import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import documents, script
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers

import evaluate
import train
from data.file_tokenizer import (
    byte_characters,
    pretrained_tokenizer,
    read_tokenizer,
    save_tokenizer,
)
from data.loader import TokenStream
from data.mixture import Mixture
from data.shards import folder_tokenizer, read_manifest, write_manifest
from data.tokenizer import GPT2Tokenizer, load_tokenizer
from evaluation.scoring import pack
from evaluation.tasks import Item
from model.config import GPTConfig
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


EVERY_BYTE = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


@dataclass
class Parts:
    """What a tokenizer.json is made of."""

    model: models.Model
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None
    normalizer: normalizers.Normalizer | None = None
    decoder: decoders.Decoder | None = None

    def train(self, folder):
        """Train them on English; return the path of the tokenizer.json."""
        engine = Engine(self.model)
        if self.pre_tokenizer:
            engine.pre_tokenizer = self.pre_tokenizer
        engine.normalizer, engine.decoder = self.normalizer, self.decoder
        trainer = engine.model.get_trainer()
        trainer.special_tokens = ["</s>", "[UNK]", *EVERY_BYTE]
        trainer.vocab_size, trainer.show_progress = 700, False
        if self.pre_tokenizer is BYTE_LEVEL:
            trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
        engine.train_from_iterator(documents()[:50], trainer)
        engine.save(str(folder / "tokenizer.json"))
        return folder / "tokenizer.json"


KINDS = {
    "words": Parts(models.BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace()),
    "words, no unknown": Parts(models.BPE(), pre_tokenizers.Whitespace()),
    "llama": Parts(
        models.BPE(byte_fallback=True),
        normalizer=normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        ),
        decoder=decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
    ),
    "metaspace": Parts(
        models.BPE(unk_token="[UNK]"), pre_tokenizers.Metaspace(), decoder=decoders.Metaspace()
    ),
    "byte-level": Parts(models.BPE(), BYTE_LEVEL, decoder=decoders.ByteLevel()),
    "no decoder": Parts(models.BPE(), BYTE_LEVEL),
    "NFKC, lower case": Parts(
        models.BPE(),
        BYTE_LEVEL,
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        decoders.ByteLevel(),
    ),
    "bert": Parts(
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.Whitespace(),
        decoder=decoders.WordPiece(),
    ),
}
MIXED = "tale\t天地 e 🐍 Bü ﬁ"  # with a ligature, which NFKC writes as two letters


@pytest.mark.parametrize(
    ("name", "decoded", "lost"),
    [
        ("words", "tale[UNK][UNK]e[UNK]B[UNK][UNK]", "\t    天地🐍üﬁ"),
        ("words, no unknown", "taleeB", "\t    天地🐍üﬁ"),
        ("metaspace", " tale[UNK][UNK][UNK] e [UNK] B[UNK] [UNK]", "\t天地🐍üﬁ"),
        ("llama", f" {MIXED}", ""),
        ("byte-level", MIXED, ""),
        ("no decoder", MIXED, ""),
        ("NFKC, lower case", "tale\t天地 e 🐍 bü fi", ""),
    ],
)
def test_what_a_tokenizer_does_not_give_back_is_known(tmp_path, name, decoded, lost):
    tokenizer = load_tokenizer(read_tokenizer(KINDS[name].train(tmp_path)))
    ids = tokenizer.encode(MIXED)
    assert tokenizer.decode_bytes(ids.tolist()).decode() == decoded
    assert sorted(tokenizer.lost_text(MIXED, ids)) == sorted(lost)


def test_a_model_whose_tokenizer_drops_spaces_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("llama", "metaspace", "no decoder"):
        assert pretrained_tokenizer(KINDS[name].train(tmp_path).parent, 700)
    for name in ("words", "bert"):
        with pytest.raises(UserError, match="tokenizer.json drops the spaces of a text"):
            pretrained_tokenizer(KINDS[name].train(tmp_path).parent, 700)


def shard(tmp_path, rows, path, **options):
    """Shard texts in this process; return the manifest, the folder is tmp_path / "out"."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    fineweb_edu = importlib.import_module("data.fineweb-edu")
    config = fineweb_edu.DataConfig(
        tmp_path / "out", input=(str(tmp_path / "rows.jsonl"),), tokenizer=str(path), **options
    )
    fineweb_edu.main(config)
    return read_manifest(tmp_path / "out")


def test_text_is_lost_only_where_that_is_asked_for_and_the_share_is_printed(tmp_path, capsys):
    path, rows = KINDS["words, no unknown"].train(tmp_path), ["tale tale", MIXED]
    with pytest.raises(UserError, match=r"loses 1 characters of a text, as ' '; .*--allow_loss"):
        shard(tmp_path, rows, path)
    manifest = shard(tmp_path, rows, path, allow_loss=True)
    num_bytes, lost = sum(len(row.encode()) for row in rows), 1 + len("\t    天地🐍üﬁ".encode())
    assert sum(manifest["bytes"].values()) == num_bytes and manifest["lost_bytes"] == lost
    assert f"lost: {lost / num_bytes:.2%} of the bytes" in capsys.readouterr().out


def test_end_of_text_is_part_of_a_tokenizer(tmp_path):
    path = KINDS["byte-level"].train(tmp_path)
    streams = {}
    for end in ("</s>", "[UNK]"):
        folder = tmp_path / end.strip("</>[]")
        folder.mkdir()
        shard(folder, documents()[:60], path, end_of_text=end)
        streams[end] = TokenStream(folder / "out", "val")
    a, b = streams.values()
    name = read_manifest(a.folders[0])["tokenizer"]
    assert [stream.tokenizer_identity for stream in streams.values()] == [
        f"{name} with </s>",
        f"{name} with [UNK]",
    ]
    with pytest.raises(UserError, match="have several tokenizers"):
        TokenStream([*a.folders, *b.folders], "val")
    with pytest.raises(UserError, match="have several tokenizers"):
        Mixture([f"{folder}:0.5" for folder in (*a.folders, *b.folders)], "val", 8)
    # --resume and --init_from; then evaluate.py
    with pytest.raises(UserError, match=r"x takes tokens of .* with </s>, .* with \[UNK\]"):
        train.check_tokenizer(b, "x", a.tokenizer)
    scorer = SimpleNamespace(
        model=SimpleNamespace(config=GPTConfig(block_size=8)), tokenizer=load_tokenizer(a.tokenizer)
    )
    config = evaluate.EvalConfig(data_dir=tuple(b.folders))
    with pytest.raises(UserError, match=r"with \[UNK\], the model takes those of .* with </s>"):
        evaluate.open_validation(config, scorer, {})


@pytest.fixture
def pairs(tmp_path):
    """A Hugging Face folder with vocab.json and merges.txt of as many tokens as GPT-2 has."""
    letters = byte_characters()
    merges = [(a, b) for a in letters for b in letters][:50_000]
    tokens = [*letters, *("".join(pair) for pair in merges), "</s>"]
    vocab = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = "".join(f"{a} {b}\n" for a, b in merges)
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{lines}", encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 50_256}))
    return tmp_path


def test_another_vocabulary_of_the_size_of_gpt2s_is_read_as_itself(pairs):
    tokenizer = load_tokenizer(pretrained_tokenizer(pairs, 50_257))
    assert tokenizer.eot == 50_256 and tokenizer.end_of_text == "</s>"
    ids = tokenizer.encode(MIXED).tolist()
    assert tokenizer.decode_bytes(ids).decode() == MIXED and max(ids) > 256
    (pairs / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    assert load_tokenizer(pretrained_tokenizer(pairs, 50_257)).encode(MIXED).tolist() == ids
    for name in ("tokenizer.json", "merges.txt", "vocab.json"):
        (pairs / name).unlink()
    assert pretrained_tokenizer(pairs, 50_257) == "gpt2"
    with pytest.raises(UserError, match="has no tokenizer.json for its 50,000 tokens"):
        pretrained_tokenizer(pairs, 50_000)


def test_gpt2s_tokens_with_a_normalizer_or_another_end_of_text_are_not_gpt2(gpt2, tmp_path):
    save_tokenizer(gpt2, tmp_path, block_size=1024)
    path = tmp_path / "tokenizer.json"
    assert read_tokenizer(path, 50_256) == read_tokenizer(path, "<|endoftext|>") == "gpt2"
    assert load_tokenizer(read_tokenizer(path, "!")).identity.endswith(" with !")
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    assert load_tokenizer(read_tokenizer(path)).encode("HELLO").tolist() == [31_373]


def test_bytes_are_those_of_the_source_where_a_normalizer_changes_the_text(tmp_path):
    path = KINDS["NFKC, lower case"].train(tmp_path)
    rows = ["\uff34\uff41\uff4c\uff45 TALE " * 40] * 3  # full width: 3 bytes become 1
    manifest = shard(tmp_path, rows, path, val_fraction=0)
    num_bytes = len("".join(rows).encode())
    assert manifest["bytes"] == {"train": num_bytes, "val": 0}
    stream = TokenStream(tmp_path / "out", "train")
    assert stream.bytes_per_token == num_bytes / len(stream)


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
