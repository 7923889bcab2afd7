"""Tokenizers: ids and bytes as the libraries that made them give, and what is refused."""

import json
import re
import shutil
import sys
from functools import cache
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import documents, train_options, user_error
from test_fineweb_edu import fineweb_edu, shard
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

import evaluate
from data.export_tokenizer import save_tokenizer, to_backend
from data.sharder import hold_out
from data.shards import TokenStream, open_folder
from data.tokenizer import (
    CHAT_TEMPLATE,
    byte_characters,
    load_tokenizer,
    pretrained_tokenizer_spec,
    read_tokenizer_spec,
)
from evaluation.benchmarks import BENCHMARKS
from evaluation.scoring import pack_items
from evaluation.tasks import Item
from finetuning.examples import TextEncoder, encode_completion, encode_messages
from model.config import GPTConfig
from recipes import Recipe
from sample import SampleOptions, Writer
from training.summary import agreed_model_config
from utils.errors import UserError

train_tokenizer = import_module("data.train_tokenizer")
TEXTS = {
    "german": "Die Würde des Menschen ist unantastbar. Größe, 1.234 Äpfel!",
    "chinese": "天地玄黃，宇宙洪荒。日月盈昃，辰宿列張。",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में",
    "code": "def f(x):\n\treturn x**2  # <|endoftext|> in text is text 🐍\n\n\n",
}
# with a ligature and an accent, which NFKC writes as two letters and joins to its letter, and with
# the mark of a space in some vocabularies, which is no loss
MIXED = "tale\t天地 e 🐍 Bü ﬁ e\u0301 \u2581x"


def assert_restores_texts(tokenizer):
    """Any text comes back, and special tokens in it are text."""
    for text in (*TEXTS.values(), "\x00"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and tokenizer.eot not in ids
        assert tokenizer.decode_bytes([tokenizer.eot, *ids.tolist()]).decode() == text


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_any_text_is_restored_and_an_exported_tokenizer_is_read_as_itself(tmp_path, name):
    try:
        tokenizer = load_tokenizer(name)
        save_tokenizer(tokenizer, tmp_path, block_size=1024)
    except UserError as error:
        pytest.skip(str(error))
    assert_restores_texts(tokenizer)
    assert read_tokenizer_spec(tmp_path / "tokenizer.json") == name
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # whose tokenizers are others
    assert pretrained_tokenizer_spec(tmp_path, tokenizer.vocab_size) == name
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, I'm a language model,", " naïve  café\n\n\t— 中文 🙂 x=1;", "don't 12345"):
        ids = theirs.encode(text)
        assert ids == tokenizer.encode(text).tolist() and theirs.decode(ids) == text
    assert (theirs.eos_token_id, len(theirs)) == (tokenizer.eot, tokenizer.vocab_size)
    assert theirs.model_max_length == 1024


@pytest.mark.parametrize("split", ["unicode", "gpt2"])
def test_an_own_tokenizer_is_the_same_each_time_restores_texts_and_saves_tokens(tmp_path, split):
    (tmp_path / "all.txt").write_text("\n".join([*TEXTS.values()] * 100), encoding="utf-8")
    paths = tmp_path / "tokenizer.json", tmp_path / "again.json"
    for path in paths:
        config = train_tokenizer.TokenizerOptions((str(tmp_path / "all.txt"),), path, 600, split)
        train_tokenizer.main(config)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    tokenizer = load_tokenizer(read_tokenizer_spec(paths[0]))
    assert tokenizer.eot == tokenizer.vocab_size - 1 < 600
    assert_restores_texts(tokenizer)
    for text in TEXTS.values():
        assert len(text.encode()) > 1.3 * len(tokenizer.encode(text))


@pytest.mark.parametrize(
    "vocab_size, said",
    [
        (300, "300 tokens\n"),
        (9_000, r"\d+ tokens, not --vocab_size 9,000: the text has no more pairs"),
        (256, "257 tokens, not --vocab_size 256: the 256 bytes and end of text are all"),
    ],
)
def test_a_vocabulary_of_another_size_than_the_flag_names_it(tmp_path, capsys, vocab_size, said):
    (tmp_path / "a.txt").write_text(TEXTS["german"] * 9, encoding="utf-8")
    path = tmp_path / "tokenizer.json"
    options = train_tokenizer.TokenizerOptions((str(tmp_path / "a.txt"),), path, vocab_size)
    train_tokenizer.main(options)
    assert re.search(f"tokenizer.json: {said}", capsys.readouterr().out)


EVERY_BYTE = [f"<0x{byte:02X}>" for byte in range(256)]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
WORDS = pre_tokenizers.Whitespace()
MARKS = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
FOLD = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
# model, pre-tokenizer, normalizer; no decoder, which is not asked
KINDS = {
    "words": (models.BPE(), WORDS, None),
    "llama": (models.BPE(byte_fallback=True), None, normalizers.Sequence(MARKS)),
    "byte-level": (models.BPE(), BYTE_LEVEL, None),
    "NFKC, lower case": (models.BPE(), BYTE_LEVEL, FOLD),
}


@cache
def train(kind):
    """Train a tokenizer of KINDS on English; return its tokenizer.json."""
    model, pre_tokenizer, normalizer = KINDS[kind]
    backend = Backend(model)
    if pre_tokenizer:
        backend.pre_tokenizer = pre_tokenizer
    backend.normalizer = normalizer
    trainer = backend.model.get_trainer()
    trainer.special_tokens = ["</s>", "[UNK]", *EVERY_BYTE]
    trainer.vocab_size, trainer.show_progress = 700, False
    if pre_tokenizer is BYTE_LEVEL:
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(documents()[:50], trainer)
    return backend.to_str()


def write_trained(kind, folder):
    """Write a tokenizer of KINDS to a folder; return the path of its tokenizer.json."""
    path = folder / "tokenizer.json"
    path.write_text(train(kind), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "name, decoded, lost",
    [
        ("words", "taleeBe", "\t       天地🐍üﬁ\u0301x"),
        ("llama", " tale\t天地 e 🐍 Bü ﬁ e\u0301  x", ""),
        ("byte-level", MIXED, ""),
        ("NFKC, lower case", "tale\t天地 e 🐍 bü fi é \u2581x", ""),
    ],
)
def test_text_is_lost_only_where_that_is_asked_for(tmp_path, capsys, name, decoded, lost):
    path = write_trained(name, tmp_path)
    tokenizer = load_tokenizer(read_tokenizer_spec(path))
    ids = tokenizer.encode(MIXED)
    assert tokenizer.decode_bytes(ids.tolist()).decode() == decoded
    assert sorted(tokenizer.lost_text(MIXED, ids)) == sorted(lost)
    files = [tmp_path / "a.txt"], tmp_path / "out"
    files[0][0].write_text(MIXED)
    if lost:
        with user_error(f"loses {len(lost)} characters of a text, such as "):
            shard(*files, tokenizer=str(path))
    manifest = shard(*files, tokenizer=str(path), allow_loss=bool(lost))
    # bytes are those of the source, also where a normalizer changes the text
    num_bytes = sum(manifest.bytes.values())
    assert num_bytes == len(MIXED.encode())
    share = f"lost: {len(lost.encode()) / num_bytes:.2%} of the bytes"
    assert (share in capsys.readouterr().out) == bool(lost)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "before, after",
    [
        ([], ["</s>"]),
        (["</s>"], []),
        (["<0x41>"], ["</s>"]),
        (["<0x41>", "</s>"], []),
    ],
)
def test_what_a_tokenizer_writes_before_a_text_stands_there_for_all_and_in_exports(
    tmp_path, kind, before, after
):
    """End of text where it writes nothing; what it writes behind a text, nobody writes."""
    folder, backend, text = tmp_path, Backend.from_str(train(kind)), "one of the"
    special = [(token, backend.token_to_id(token)) for token in {*before, *after}]
    single = [*before, "$A", *after]
    template = processors.TemplateProcessing(single=single, special_tokens=special)
    backend.post_processor = template
    path = folder / "tokenizer.json"
    backend.save(str(path))
    tokenizer = load_tokenizer(read_tokenizer_spec(path))
    bos = [backend.token_to_id(token) for token in before]
    start, ids = bos or [tokenizer.eot], tokenizer.encode(text).tolist()
    document = fineweb_edu.tokenize(tokenizer, 0, text, folder)
    tokens = document.read(0, document.num_tokens).tolist()
    writer = Writer(SimpleNamespace(config=GPTConfig()), tokenizer, SampleOptions())
    question = TextEncoder(tokenizer, False, 99).question({"prompt": text}, 1, has_answer=False)
    for prompt in (tokens, writer.prompt_ids(text, []), question.prompt_ids):
        assert prompt == [*start, *ids]
    whole = encode_completion("", text, tokenizer, chat=False)  # a completion without a prompt
    assert whole.tokens.tolist() == [*start, *ids, tokenizer.eot]
    divided = hold_out(document, 1)
    divided_tokens = divided.read(0, divided.num_tokens).tolist()
    assert divided_tokens == [*start, *ids[:-1], *start, ids[-1]]
    assert tokenizer.decode_bytes(start) == b"" and tokenizer.end_ids == {tokenizer.eot, start[0]}

    save_tokenizer(tokenizer, folder, 8, CHAT_TEMPLATE)
    if kind == "words":  # without spaces
        with user_error("loses characters of a text, such as '.* '"):
            pretrained_tokenizer_spec(folder, 700)
        return
    again = load_tokenizer(pretrained_tokenizer_spec(folder, 700))
    assert again.identity == tokenizer.identity and again.is_of_chat_model
    assert again.chat_template is None  # as the project writes it by itself
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs(text).input_ids == [*bos, *ids]
    assert (theirs.bos_token_id, theirs.eos_token) == (start[0], "</s>")
    if kind == "byte-level" and len(start) == 1:  # the others write the space of a turn otherwise
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]
        rendered = theirs.apply_chat_template(chat)["input_ids"]
        assert rendered == encode_messages(chat, tokenizer).tokens.tolist()


@pytest.mark.parametrize(
    "marks, before, context, choices, row",
    [
        (MARKS, "", "a", (" a",), ([4], [[4]])),  # encoded together, with one mark each
        ([], "!", "ca", ("bc",), ([0, 3, 1], [[3]])),  # a token spans both
        ([], "!", "ca", ("b", "c"), ([0, 3], [[5], [1, 3]])),  # and nothing comes after it
        ([], "!", "", ("c",), ([0], [[3]])),
    ],
)
def test_a_continuation_has_the_tokens_after_its_context_as_in_the_harness(
    tmp_path, marks, before, context, choices, row
):
    tokens = ["!", "a", "\u2581", "c", "\u2581a", "ab", "</s>"]
    vocab = {token: i for i, token in enumerate([*tokens, "b"])}
    backend = Backend(models.BPE(vocab, [("\u2581", "a"), ("a", "b")]))
    backend.normalizer = normalizers.Sequence(marks)
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A"], special_tokens=[("!", 0)]
    )
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(read_tokenizer_spec(tmp_path / "t.json"))
    encode = BENCHMARKS["hellaswag"].continuations
    (packed,) = pack_items([encode(Item(context, choices), tokenizer, 32)], share_rows=True)
    assert (packed.context_ids, packed.choices) == row
    with pytest.raises(ValueError, match="has 0 tokens"):  # before anything is scored
        encode(Item("", ("",)), tokenizer, 32)


def test_end_of_text_is_part_of_a_tokenizer_and_another_one_is_refused(tmp_path, corpus):
    path = write_trained("byte-level", tmp_path)
    folders = []
    for name, end_of_text in (("a", "</s>"), ("b", "[UNK]")):
        shard(corpus, tmp_path / name, tokenizer=str(path), end_of_text=end_of_text)
        folders.append(open_folder(tmp_path / name, "val"))
    identities = [TokenStream([folder]).tokenizer_identity for folder in folders]
    file_name = folders[0].manifest.tokenizer
    assert identities == [f"{file_name} with </s>", f"{file_name} with [UNK]"]
    with user_error("have several tokenizers"):
        TokenStream(folders)
    tokenizer = load_tokenizer(folders[0].tokenizer_spec)
    config = evaluate.EvalOptions(data_dir=(tmp_path / "b",))
    with user_error(r"with \[UNK\], the model takes those of .* with </s>"):
        evaluate.open_validation(config, 1024, tokenizer)
    with user_error(r"x takes tokens of .* with </s>, .* with \[UNK\]"):
        start = SimpleNamespace(model_config=GPTConfig(), tokenizer_spec=folders[0].tokenizer_spec)
        agreed_model_config(train_options(init_from="x"), Recipe(), TokenStream(folders[1:]), start)
    shutil.copy(write_trained("NFKC, lower case", tmp_path), tmp_path / "a")
    with user_error(f"not the tokenizer of these .*, which have {file_name}"):
        open_folder(tmp_path / "a", "val")


def test_a_vocabulary_of_the_size_of_a_known_one_is_read_as_itself(tmp_path):
    """Also from vocab.json and merges.txt, which old folders have instead of a tokenizer.json."""
    tokens = [*reversed(byte_characters()), "</s>"]  # as many as ByteTokenizer has
    vocab = {token: i for i, token in enumerate(tokens)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    config = {"model_type": "gpt2", "eos_token_id": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(pretrained_tokenizer_spec(tmp_path, 257))
    assert (tokenizer.eot, tokenizer.end_of_text) == (256, "</s>") and tokenizer.name != "bytes"
    assert tokenizer.encode("t").tolist() == [255 - ord("t")]
    for name in ("merges.txt", "vocab.json"):
        (tmp_path / name).unlink()
    # without any file, the size tells
    assert pretrained_tokenizer_spec(tmp_path, 50_257) == "gpt2"
    with user_error("has no tokenizer.json for its 50,000 tokens"):
        pretrained_tokenizer_spec(tmp_path, 50_000)


DEFINITION = json.loads(to_backend(load_tokenizer("bytes")).to_str())
MODEL, ADDED_TOKENS = DEFINITION["model"], DEFINITION["added_tokens"]
VOCAB = MODEL["vocab"]
MERGED = {token.replace("z", "ab"): i for token, i in VOCAB.items()}
CRLF = {"type": "Replace", "pattern": {"String": "\r\n"}, "content": "\n"}
DIGITS = {"type": "Digits", "individual_digits": True}
PREFIX = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
BEFORE = {"type": "BertProcessing", "sep": ["a", 97], "cls": ["<|endoftext|>", 256]}
EMOJI = ADDED_TOKENS[0] | {"id": 257, "content": "🙂", "special": False}
CHANGES_OF_IDS = [
    {"normalizer": {"type": "NFC"}},
    {"normalizer": CRLF},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, PREFIX]}},
    {"post_processor": BEFORE},
    {"added_tokens": [*ADDED_TOKENS, EMOJI]},
    {"model": MODEL | {"vocab": MERGED, "merges": [["a", "b"]]}},
]
OTHER_CHANGES = {
    "model": MODEL
    | {"vocab": VOCAB | {"<|endoftext|>": 256}, "dropout": 0.0, "continuing_subword_prefix": ""},
    "added_tokens": [ADDED_TOKENS[0] | {"normalized": True}],
    "padding": None,
    "post_processor": PREFIX,
}


def write_definition(definition, path):
    path.write_text(json.dumps(definition))
    return path


def test_ids_above_16_bits_pass_from_shards_to_training_and_fine_tuning(tmp_path, corpus):
    vocab = {token: 70_000 + i for token, i in VOCAB.items()}
    model = MODEL | {"vocab": {**vocab, "<|endoftext|>": 70_256}}
    path = write_definition(DEFINITION | {"model": model}, tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(read_tokenizer_spec(path))
    for max_shards in (1, None):  # the second run continues a shard
        manifest = shard(corpus, tmp_path / "out", tokenizer=str(path), max_shards=max_shards)
    assert manifest.vocab_size == 70_257
    stream = TokenStream([open_folder(tmp_path / "out", "train")])
    characters = [chr(token - 70_000) for token in stream.read(0, len(stream))]
    texts = "".join(characters).split("\u0100")
    assert texts == ["", *(text for text in documents() if text in texts)]
    example = encode_completion("a", "b", tokenizer, chat=False)
    assert example.tokens.tolist() == [70_256, 70_097, 70_098, 70_256]


@pytest.mark.parametrize("other", [{}, OTHER_CHANGES])
@pytest.mark.parametrize("real", [{}, *CHANGES_OF_IDS])
def test_only_the_whole_definition_gives_a_tokenizer_its_name(tmp_path, real, other):
    """And the ids are those of the library and of transformers."""
    path = write_definition(DEFINITION | other | real, tmp_path / "tokenizer.json")
    spec = read_tokenizer_spec(path)
    assert (spec == "bytes") == (not real)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(spec)
    assert load_tokenizer(pretrained_tokenizer_spec(tmp_path, 258)).identity == tokenizer.identity
    text = "e\u0301 12\r\nab 🙂"
    ids = tokenizer.encode(text).tolist()
    assert ids == AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False).input_ids
    assert ids == Backend.from_file(str(path)).encode(text, add_special_tokens=False).ids


def test_a_token_of_the_file_ends_a_text(tmp_path):
    path = write_definition(DEFINITION, tmp_path / "tokenizer.json")
    # with another end of text it is another tokenizer
    assert load_tokenizer(read_tokenizer_spec(path, "!")).identity.endswith(" with !")
    write_definition(DEFINITION | {"added_tokens": []}, path)
    with user_error("has no token that ends a text"):
        read_tokenizer_spec(path)
    with user_error(r"has no token that ends a text \(<stop>\)"):
        read_tokenizer_spec(path, "<stop>")


def test_a_folder_says_what_transformers_says_of_it(tmp_path):
    """Ids of added_tokens.json alone, a template in a file of its own; and end of text, whatever
    word has the number in config.json."""
    save_tokenizer(load_tokenizer("bytes"), tmp_path, 8)
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 257, "<|im_end|>": 258}')
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(pretrained_tokenizer_spec(tmp_path, 259))
    assert (tokenizer.vocab_size, tokenizer.turn_end) == (259, 258)
    assert tokenizer.is_of_chat_model and tokenizer.end_ids == {256, 258}
    # the model has rows for 257 ids: the other tokens are not its own
    assert load_tokenizer(pretrained_tokenizer_spec(tmp_path, 257)).vocab_size == 257

    (tmp_path / "words").mkdir()
    write_trained("byte-level", tmp_path / "words")
    (tmp_path / "words/config.json").write_text('{"model_type": "gpt2", "eos_token_id": 600}')
    tokenizer = load_tokenizer(pretrained_tokenizer_spec(tmp_path / "words", 700))
    assert tokenizer.end_of_text == "</s>" and tokenizer.end_ids == {0}


def test_transformers_is_not_imported_where_a_folder_says_nothing_more(tmp_path, monkeypatch):
    save_tokenizer(load_tokenizer("bytes"), tmp_path, 8)
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import raises
    assert pretrained_tokenizer_spec(tmp_path, 257) == "bytes"
    for name in ("chat_template.jinja", "added_tokens.json", "generation_config.json"):
        path = tmp_path / name
        path.write_text('{"eos_token_id": 0}')
        with pytest.raises(ImportError):
            pretrained_tokenizer_spec(tmp_path, 257)
        path.unlink()


def test_a_tokenizer_that_no_tokenizer_json_can_hold_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    with user_error("is not a folder with a tokenizer .*ByT5Tokenizer has no attribute"):
        pretrained_tokenizer_spec(tmp_path, 384)


def test_dropout_is_left_out_with_a_note(tmp_path, caplog):
    model = MODEL | {"vocab": MERGED, "merges": [["a", "b"]], "dropout": 0.5}
    path = write_definition(DEFINITION | {"model": model}, tmp_path / "tokenizer.json")
    specs = read_tokenizer_spec(path), pretrained_tokenizer_spec(tmp_path, 257)
    assert "note: the tokenizer's dropout would" in caplog.text
    for spec in specs:
        assert set(load_tokenizer(spec).encode("ab" * 99)) == {MERGED["ab"]}


@pytest.mark.parametrize("token", ["天", "<0xZZ>", "a b"])
def test_a_token_that_no_text_has_is_read_as_the_library_reads_it(tmp_path, token):
    vocab = {character: i for i, character in enumerate(byte_characters())}
    backend = Backend(models.BPE({**vocab, "</s>": 256, token: 257}, []))
    backend.pre_tokenizer, backend.decoder = BYTE_LEVEL, decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(read_tokenizer_spec(tmp_path / "tokenizer.json"))
    assert tokenizer.decode_bytes([257]).decode() == backend.decode([257]) == token


@pytest.mark.parametrize(
    "content, problem",
    [
        (DEFINITION | {"model": MODEL | {"vocab": {}}}, "x.model is not a tokenizer that"),
        ({"a": 0, "b": 1}, "x.model is damaged or not a tokenizer that"),
    ],
)
def test_only_a_file_that_the_library_does_not_read_is_called_damaged(tmp_path, content, problem):
    path = write_definition(content, tmp_path / "x.model")
    with user_error(problem):
        read_tokenizer_spec(path)


def test_a_file_that_transformers_reads_otherwise_is_named(tmp_path, caplog):
    """Its class for GPT-2 puts GPT-2's pre-tokenizer in the place of another one."""
    write_definition(DEFINITION | {"pre_tokenizer": PREFIX}, tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert pretrained_tokenizer_spec(tmp_path, 257) == "bytes"
    assert "transformers gives a text other ids than" in caplog.text
