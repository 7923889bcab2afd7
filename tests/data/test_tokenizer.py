"""Tokenizers: ids and bytes as the libraries that made them give, and what is refused."""

import importlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import documents
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, normalizers, pre_tokenizers

import evaluate
import train
from data.export_tokenizer import save_tokenizer
from data.file_tokenizer import byte_characters, pretrained_tokenizer, read_tokenizer
from data.shards import TokenStream, open_folder, read_manifest, write_manifest
from data.tokenizer import load_tokenizer
from evaluation.scoring import pack
from evaluation.tasks import Item
from model.config import GPTConfig
from utils.errors import UserError

fineweb_edu = importlib.import_module("data.fineweb-edu")
train_tokenizer = importlib.import_module("data.train_tokenizer")
TEXTS = {
    "german": "Die Würde des Menschen ist unantastbar. Größe, 1.234 Äpfel!",
    "chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में",
    "code": "def f(x):\n\treturn x**2  # <|endoftext|> in text is text 🐍\n\n\n",
}
MIXED = "tale\t天地 e 🐍 Bü ﬁ"  # with a ligature, which NFKC writes as two letters


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    """GPT-2's tokenizer as we save it, made once: it takes seconds."""
    folder = tmp_path_factory.mktemp("gpt2")
    try:
        save_tokenizer(load_tokenizer("gpt2"), folder, block_size=1024)
    except UserError as error:
        pytest.skip(str(error))
    return folder


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_any_text_comes_back_and_special_tokens_in_it_are_text(name, request):
    if name == "gpt2":
        request.getfixturevalue("gpt2_folder")
    tokenizer = load_tokenizer(name)
    for text in (*TEXTS.values(), "\x00"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16 and tokenizer.eot not in ids
        assert tokenizer.decode_bytes([tokenizer.eot, *ids.tolist()]).decode() == text


def test_saved_merges_are_gpt2s_own_and_are_read_as_gpt2(gpt2_folder):
    path = gpt2_folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    assert (vocab["!"], vocab["\u0120the"], len(vocab)) == (0, 262, 50256)
    assert list(merges[0]) == ["\u0120", "t"] and len(merges) == 50000
    assert content["added_tokens"][0]["id"] == 50256
    assert read_tokenizer(path, 50_256) == "gpt2"


def test_saved_bytes_are_read_as_bytes_and_are_no_tokenizer_of_gpt2s_shards(tmp_path):
    save_tokenizer(load_tokenizer("bytes"), tmp_path, block_size=32)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["model"]["merges"] == [] and len(content["model"]["vocab"]) == 256
    assert read_tokenizer(path) == "bytes"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 32
    np.save(tmp_path / "val_0.npy", np.zeros(9, np.uint16))
    shards = [{"file": "val_0.npy", "split": "val", "tokens": 9}]
    write_manifest(tmp_path, {"tokenizer": "gpt2", "vocab_size": 50257, "shards": shards})
    with pytest.raises(UserError, match="not the tokenizer of these shards, which have gpt2"):
        open_folder(tmp_path, "val")
    # with another end of text, or a normalizer, it is another tokenizer
    assert load_tokenizer(read_tokenizer(path, "!")).identity.endswith(" with !")
    path.write_text(json.dumps(content | {"normalizer": {"type": "Lowercase"}}))
    assert load_tokenizer(read_tokenizer(path)).encode("HELLO").tolist() == list(b"hello")


@pytest.fixture(scope="module", params=["unicode", "gpt2"])
def own(request, tmp_path_factory):
    """A tokenizer.json of at most 600 tokens, trained on the texts; the same each time."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "all.txt").write_text("\n".join([*TEXTS.values()] * 100), encoding="utf-8")
    inputs = (str(folder / "all.txt"),)
    for name in ("tokenizer.json", "again.json"):
        config = train_tokenizer.TokenizerConfig(inputs, folder / name, 600, request.param)
        train_tokenizer.main(config)
    assert (folder / "tokenizer.json").read_bytes() == (folder / "again.json").read_bytes()
    return folder / "tokenizer.json"


def test_an_own_tokenizer_gives_the_bytes_back_and_saves_tokens(own):
    tokenizer = load_tokenizer(read_tokenizer(own))
    assert tokenizer.eot == tokenizer.vocab_size - 1
    for text in TEXTS.values():
        ids = tokenizer.encode(text)
        assert tokenizer.eot not in ids and len(text.encode()) > 1.3 * len(ids)
        assert tokenizer.decode_bytes([tokenizer.eot, *ids.tolist()]).decode() == text


EVERY_BYTE = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
MARKS = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
# model, pre-tokenizer, normalizer, decoder
KINDS = {
    "words": (models.BPE(unk_token="[UNK]"), pre_tokenizers.Whitespace(), None, None),
    "words, no unknown": (models.BPE(), pre_tokenizers.Whitespace(), None, None),
    "llama": (models.BPE(byte_fallback=True), None, normalizers.Sequence(MARKS), None),
    "metaspace": (
        models.BPE(unk_token="[UNK]"), pre_tokenizers.Metaspace(), None, decoders.Metaspace()
    ),
    "byte-level": (models.BPE(), BYTE_LEVEL, None, decoders.ByteLevel()),
    "no decoder": (models.BPE(), BYTE_LEVEL, None, None),
    "NFKC, lower case": (
        models.BPE(),
        BYTE_LEVEL,
        normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        decoders.ByteLevel(),
    ),
    "bert": (models.WordPiece(unk_token="[UNK]"), pre_tokenizers.Whitespace(), None, None),
}  # fmt: skip


def trained(name, folder):
    """Train a tokenizer of KINDS on English; return the path of its tokenizer.json."""
    model, pre_tokenizer, normalizer, decoder = KINDS[name]
    engine = Engine(model)
    if pre_tokenizer:
        engine.pre_tokenizer = pre_tokenizer
    engine.normalizer, engine.decoder = normalizer, decoder
    trainer = engine.model.get_trainer()
    trainer.special_tokens = ["</s>", "[UNK]", *EVERY_BYTE]
    trainer.vocab_size, trainer.show_progress = 700, False
    if pre_tokenizer is BYTE_LEVEL:
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(documents()[:50], trainer)
    engine.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


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
    tokenizer = load_tokenizer(read_tokenizer(trained(name, tmp_path)))
    ids = tokenizer.encode(MIXED)
    assert tokenizer.decode_bytes(ids.tolist()).decode() == decoded
    assert sorted(tokenizer.lost_text(MIXED, ids)) == sorted(lost)


def test_context_and_continuation_are_encoded_together_by_a_tokenizer_that_marks_spaces(tmp_path):
    vocab = {"</s>": 0, "\u2581": 1, "h": 2, "i": 3, "\u2581h": 4, "\u2581hi": 5}
    engine = Engine(models.BPE(vocab, [("\u2581", "h"), ("\u2581h", "i")]))
    engine.normalizer = normalizers.Sequence(MARKS)  # of Llama 2
    engine.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(read_tokenizer(tmp_path / "t.json", "</s>"))
    (row,) = pack([Item("hi", (" hi",))], tokenizer, 32)  # as by the harness
    assert row.context == row.choices[0] == [5]


def test_a_model_whose_tokenizer_drops_spaces_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("llama", "metaspace", "no decoder"):
        assert pretrained_tokenizer(trained(name, tmp_path).parent, 700)
    for name in ("words", "bert"):
        with pytest.raises(UserError, match="tokenizer.json drops the spaces of a text"):
            pretrained_tokenizer(trained(name, tmp_path).parent, 700)


def shard(folder, rows, path, **options):
    """Shard texts in this process into `folder`; return its manifest."""
    folder.mkdir(exist_ok=True)
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    fineweb_edu.main(
        fineweb_edu.DataConfig(folder, input=(str(source),), tokenizer=str(path), **options)
    )
    return read_manifest(folder)


def test_a_tokenizer_that_loses_text_is_refused(tmp_path):
    path = trained("words, no unknown", tmp_path)
    with pytest.raises(UserError, match="loses 1 characters of a text, as ' '; take another"):
        shard(tmp_path / "out", ["tale tale"], path)


def test_end_of_text_is_part_of_a_tokenizer(tmp_path):
    path = trained("byte-level", tmp_path)
    folders = []
    for end in ("</s>", "[UNK]"):
        shard(tmp_path / end.strip("</>[]"), documents()[:60], path, end_of_text=end)
        folders.append(open_folder(tmp_path / end.strip("</>[]"), "val"))
    a, b = (TokenStream([folder]) for folder in folders)
    name = folders[0].manifest["tokenizer"]
    assert a.tokenizer_identity == f"{name} with </s>"
    assert b.tokenizer_identity == f"{name} with [UNK]"
    with pytest.raises(UserError, match="have several tokenizers"):
        TokenStream(folders)
    # --resume and --init_from; then evaluate.py
    with pytest.raises(UserError, match=r"x takes tokens of .* with </s>, .* with \[UNK\]"):
        train.check_tokenizer(b, "x", a.tokenizer)
    model = SimpleNamespace(config=GPTConfig(block_size=8))
    scorer = SimpleNamespace(model=model, tokenizer=load_tokenizer(a.tokenizer))
    with pytest.raises(UserError, match=r"with \[UNK\], the model takes those of .* with </s>"):
        evaluate.open_validation(evaluate.EvalConfig(data_dir=(folders[1].path,)), scorer, {})


def test_a_vocabulary_of_the_size_of_a_known_one_is_read_as_itself(tmp_path):
    """Also from vocab.json and merges.txt, which old folders have instead of a tokenizer.json."""
    tokens = [*reversed(byte_characters()), "</s>"]  # as many as ByteTokenizer has
    vocab = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 256}))
    tokenizer = load_tokenizer(pretrained_tokenizer(tmp_path, 257))
    assert (tokenizer.eot, tokenizer.end_of_text) == (256, "</s>") and tokenizer.name != "bytes"
    ids = tokenizer.encode(MIXED).tolist()
    assert tokenizer.decode_bytes(ids).decode() == MIXED and ids[0] == 255 - ord("t")
    (tmp_path / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    assert load_tokenizer(pretrained_tokenizer(tmp_path, 257)).encode(MIXED).tolist() == ids
    for name in ("tokenizer.json", "merges.txt", "vocab.json"):
        (tmp_path / name).unlink()
    assert pretrained_tokenizer(tmp_path, 50_257) == "gpt2"
    with pytest.raises(UserError, match="has no tokenizer.json for its 50,000 tokens"):
        pretrained_tokenizer(tmp_path, 50_000)


def test_bytes_are_those_of_the_source_where_a_normalizer_changes_the_text(tmp_path):
    path = trained("NFKC, lower case", tmp_path)
    rows = ["\uff34\uff41\uff4c\uff45 TALE " * 40] * 3  # full width: 3 bytes become 1
    manifest = shard(tmp_path / "out", rows, path, val_fraction=0)
    num_bytes = len("".join(rows).encode())
    assert manifest["bytes"] == {"train": num_bytes, "val": 0}
    stream = TokenStream([open_folder(tmp_path / "out", "train")])
    assert stream.bytes_per_token == num_bytes / len(stream)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"added_tokens": []}, "no end of text .*--end_of_text"),
        ({"model": {"type": "BPE", "vocab": {"a": 65_535}, "merges": []}}, "id 65,535"),
        ({"model": {}}, "no tokenizer that can be used"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path, changes, message):
    save_tokenizer(load_tokenizer("bytes"), tmp_path, block_size=32)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        read_tokenizer(path)
