"""tokenizer.json, the format of Hugging Face's tokenizers: reading, using and writing it."""

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from jinja2 import Template  # of torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from data.tokenizer import (
    TOKENIZER,
    TOKENIZERS,
    ByteTokenizer,
    Tokenizer,
    tokenizer_name,
)
from utils.errors import UserError

MERGES = "merges.txt"  # and
VOCABULARY = "vocab.json"  # are what GPT-2 had before tokenizer.json
OTHER_FORMATS = ("vocab.txt", "tokenizer.model", "spiece.model")
GPT2_CRC = 579_868_012  # CRC-32 of GPT-2's tokens in the order of their ids, a line each
PROBE = "Hello world, 12 naïve cats; 天地 🐍"  # decoded by a tokenizer.json and by this project
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")  # of text, by name
END_OF_TEXT = ENDS[0]
PREFIXING = ("normalizer", "pre_tokenizer")  # parts that may put a space before a text
# of the chats of this project, in which a role is capitalized and end of text precedes each turn
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ eos_token + message['role'] | capitalize + ': ' "
    "+ message['content'] }}{% endfor %}{{ eos_token }}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
SPACE = "\u2581"  # in tokens of SentencePiece
# of Qwen 3.5: letters keep their marks, as Hindi needs, and every digit is a token
UNICODE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class FileTokenizer(ByteTokenizer):
    """Tokens of a tokenizer.json, of byte-level BPE or with SPACE for a space."""

    end_ids: frozenset[int] = frozenset()  # set by the constructor

    def __init__(self, spec: str) -> None:
        content = json.loads(spec)
        self.name, self.chat_template = tokenizer_name(spec), content["chat_template"]
        self.end_of_text = content["eot"]
        self.json = json.dumps(content[TOKENIZER], ensure_ascii=False)
        self.engine = make_engine(content[TOKENIZER])
        changed = {k: without_prefix(content[TOKENIZER].get(k)) for k in PREFIXING}
        self.continuing_engine = make_engine(content[TOKENIZER] | changed)
        vocab = self.engine.get_vocab()
        self.eot = vocab[self.end_of_text]
        self.end_ids = frozenset([self.eot, *content.get("end_ids", [])])
        self.template_tokens = dict.fromkeys(("bos_token", "eos_token"), self.end_of_text)
        self.template_tokens |= content.get("template_tokens", {})
        self.vocab_size = max(vocab.values()) + 1
        added = {token["content"] for token in content[TOKENIZER]["added_tokens"]}
        self.added_ids = {vocab[token] for token in added}
        # a decoder may be missing; what writes bytes as characters tells it, too
        parts = [content[TOKENIZER].get(x) for x in ("normalizer", "pre_tokenizer", "decoder")]
        byte_level = "ByteLevel" in json.dumps(parts)
        bytes_of = dict(zip(byte_characters(), range(256), strict=True))
        self.bytes = {self.eot: b""}
        for token, i in vocab.items():
            if byte_level and token not in added:
                found = bytes(bytes_of[c] for c in token)
            elif token[:3] == "<0x" and len(token) == 6:  # a byte that is no whole character
                found = bytes([int(token[3:5], 16)])
            else:
                found = token.replace(SPACE, " ").encode()
            self.bytes.setdefault(i, found)

    @property
    def identity(self) -> str:
        if self.name in TOKENIZERS:  # as data.tokenizer.tokenizer_identity
            return self.name
        return f"{self.name} with {self.end_of_text}"

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Return token ids, uint16 (n,), with `special` those of special tokens in the text."""
        return encode_by(self.engine, text, special)

    def encode_continuation(self, text: str, special: bool = False) -> np.ndarray:
        return encode_by(self.continuing_engine, text, special)

    @cached_property
    def template(self) -> Template:
        """The chat template, compiled."""
        jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        return jinja.from_string(self.chat_template)

    def render(self, messages: list[dict[str, str]], open_turn: bool = False) -> str:
        """Return a dialog by the chat template; `open_turn` begins an answer after it."""
        options = {"messages": messages, "add_generation_prompt": open_turn}
        return self.template.render(**options, **self.template_tokens)

    def turn_end(self) -> int | None:
        """Return the id of the token that the chat template writes after an answer, if it writes
        one, as <|im_end|>: the first that is not of the vocabulary of plain text."""
        answer = "An answer."
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
        try:
            text = self.render(messages)
        except Exception:  # a template for other dialogs: encoding one says what is wrong
            return None
        closing = text.rpartition(answer)[2]
        for token in self.encode(closing, special=True).tolist():
            if token in self.added_ids:
                return token
        return None

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.bytes.get(i, b"") for i in ids)

    def lost_text(self, text: str, ids: np.ndarray) -> str:
        decoded = self.decode_bytes(ids.tolist()).decode(errors="replace")
        if decoded in (text, f" {text}"):  # many put a space before the first word
            return ""
        # A normalizer that lower-cases or composes characters means to. What lacks after it, was
        # dropped by a pre-tokenizer (white space), or has no token.
        if self.engine.normalizer is not None:
            text = self.engine.normalizer.normalize_str(text)
        text = text.replace(SPACE, " ")
        return "".join((Counter(text) - Counter(decoded)).elements())


def make_engine(content: dict) -> Engine:
    """Return the tokenizer of a tokenizer.json, which neither cuts nor pads a text."""
    engine = Engine.from_str(json.dumps(content, ensure_ascii=False))
    engine.no_truncation()
    engine.no_padding()
    engine.encode_special_tokens = True  # like any other text
    return engine


def encode_by(engine: Engine, text: str, special: bool) -> np.ndarray:
    """Return token ids, uint16 (n,), with `special` those of special tokens in the text."""
    if engine.encode_special_tokens == special:
        engine.encode_special_tokens = not special
    (encoding,) = engine.encode_batch_fast([text], add_special_tokens=False)  # frees the GIL
    return np.array(encoding.ids, np.uint16)


def without_prefix(part: dict | None) -> dict | None:
    """Return a normalizer or pre-tokenizer of a tokenizer.json without what puts a space, or the
    mark that stands for it, before each text."""
    if part is None:
        return None
    if part["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changed = dict(part)
    if "add_prefix_space" in part:
        changed["add_prefix_space"] = False
    if "prepend_scheme" in part:
        changed["prepend_scheme"] = "never"
    for name in ("normalizers", "pretokenizers"):  # of a Sequence
        if name in part:
            changed[name] = [without_prefix(x) for x in part[name]]
    return changed


def byte_characters() -> str:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255: a printable byte as
    itself, another one as the next character from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return "".join(chr(b if b in printable else 0x100 + others.index(b)) for b in range(256))


def read_tokenizer(
    path: Path,
    end_of_text: str | int | None = None,
    chat_template: str | None = None,
    end_ids: Sequence[int] = (),
    template_tokens: dict[str, str] | None = None,
) -> str:
    """Return the spec of a tokenizer.json; raise UserError if it cannot be used.

    End of text is the first of ENDS if it is not named. What ends a generated text is that token,
    those of `end_ids`, and the one that the chat template writes after an answer. The template gets
    `template_tokens`, its bos_token and eos_token, each end of text if it is not given.
    """
    try:
        if path.name == VOCABULARY:
            content = from_vocabulary(path)
        else:
            content = json.loads(path.read_text(encoding="utf-8"))
        ids = content["model"]["vocab"]
        if isinstance(ids, list):  # of a unigram model
            ids = {token: i for i, (token, _) in enumerate(ids)}
        ids |= {token["content"]: token["id"] for token in content["added_tokens"]}
        if isinstance(end_of_text, int) and end_of_text not in ids.values():
            end_of_text = None  # 50,256 is the default of transformers for any vocabulary
        if (highest := max(ids.values())) >= 65_535:
            raise ValueError(f"a token has id {highest:,}, and shards hold ids below 65,535")
        ends = [token for token, i in ids.items() if end_of_text in (token, i)]
        ends += [token for token in ENDS if token in ids and end_of_text is None]
        if not ends:
            raise ValueError(f"no end of text {end_of_text or ''}; name it by --end_of_text TOKEN")
        name = name_of_content(content, ids)
        if name and ids[ends[0]] != TOKENIZERS[name].eot:
            name = None
        is_plain = set(end_ids) <= {ids[ends[0]]} and chat_template in (None, CHAT_TEMPLATE)
        if name and is_plain:
            return name
        spec = {"eot": ends[0], "end_ids": list(end_ids), "chat_template": chat_template}
        spec |= {"template_tokens": template_tokens or {}, TOKENIZER: content}
        if name:
            spec["name"] = name
        tokenizer = FileTokenizer(json.dumps(spec))
        check_decoder(tokenizer)
        turn_end = tokenizer.turn_end()
        if turn_end is not None:
            spec["end_ids"].append(turn_end)
    except Exception as error:
        raise UserError(f"{path} is no tokenizer that can be used: {error}") from error
    return json.dumps(spec)


def from_vocabulary(path: Path) -> dict:
    """Return the content of a tokenizer.json for vocab.json, and merges.txt beside it."""
    engine = byte_level(models.BPE.from_file(str(path), str(path.with_name(MERGES))))
    ends = [token for token in ENDS if engine.token_to_id(token) is not None]
    engine.add_special_tokens(ends)  # which text does not contain
    return json.loads(engine.to_str())


def name_of_content(content: dict, ids: dict[str, int]) -> str | None:
    """Return the key of TOKENIZERS whose tokens a tokenizer.json has and whose way it cuts text,
    None if there is no such key: other languages have 50,257 tokens, too."""
    cut = content.get("pre_tokenizer") or {}
    plain = content.get("normalizer") is None and cut.get("type") == "ByteLevel"
    if not plain or cut["add_prefix_space"] or not cut.get("use_regex", True):
        return None
    tokens = sorted(ids, key=ids.get)
    if zlib.crc32("\n".join(tokens).encode()) == GPT2_CRC:
        return "gpt2"
    if len(tokens) == 257 and tokens[:256] == list(byte_characters()):
        return "bytes"
    return None


def check_decoder(tokenizer: FileTokenizer) -> None:
    """Raise ValueError if the decoder of a tokenizer.json writes another text than decode_bytes
    does, as those do that mark the middle or the end of a word."""
    ids = tokenizer.encode(PROBE).tolist()
    ours = tokenizer.decode_bytes(ids).decode(errors="replace").strip()
    theirs = tokenizer.engine.decode(ids, skip_special_tokens=False).replace(SPACE, " ").strip()
    if tokenizer.engine.decoder is not None and ours != theirs:
        raise ValueError(f"its decoder is not supported: it writes {theirs!r}, not {ours!r}")


def check_spaces(path: Path, spec: str) -> None:
    """Raise UserError for a tokenizer that drops the spaces between words: text of the model would
    have none. Sharding refuses it as one that loses text, unless that is allowed."""
    if spec not in TOKENIZERS:
        tokenizer = FileTokenizer(spec)
        if " " in tokenizer.lost_text("a a", tokenizer.encode("a a")):
            raise UserError(f"{path} drops the spaces of a text, so its model cannot write any")


def pretrained_tokenizer(folder: Path, vocab_size: int) -> str:
    """Return the spec of the tokenizer of a Hugging Face model; raise UserError if it has none.
    Every eos_token_id ends a text; the first one of config.json is end of text."""
    path = folder / TOKENIZER
    if not path.is_file() and (folder / MERGES).is_file():
        path = folder / VOCABULARY
    if path.is_file():
        end_ids = []
        for name in ("config.json", "generation_config.json"):
            eos = read_json(folder / name).get("eos_token_id")
            if eos is not None:
                end_ids += eos if isinstance(eos, list) else [eos]
        config = read_json(folder / "tokenizer_config.json")
        tokens = {}
        for name in ("bos_token", "eos_token"):
            token = config.get(name)
            if token is not None:
                tokens[name] = token["content"] if isinstance(token, dict) else token
        template = config.get("chat_template")
        if isinstance(template, list):  # several templates with names
            template = {x["name"]: x["template"] for x in template}.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        first = end_ids[0] if end_ids else None
        spec = read_tokenizer(path, first, template, end_ids, tokens)
        check_spaces(path, spec)
        return spec
    # models of one size are GPT-2's as a rule, where nothing tells otherwise
    has_another = any((folder / name).exists() for name in OTHER_FORMATS)
    for name, tokens in TOKENIZERS.items():
        if tokens.vocab_size == vocab_size and not has_another:
            return name
    raise UserError(f"{folder} has no {TOKENIZER} for its {vocab_size:,} tokens")


def read_json(path: Path) -> dict:
    """Return the content of a JSON file, {} if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def byte_level(model: models.BPE, split: str = "gpt2") -> Engine:
    """Return byte-level BPE that merges nothing across the pieces of a `split`, gpt2 or unicode."""
    engine = Engine(model)
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "gpt2")
    engine.pre_tokenizer = bytes_alone
    if split == "unicode":
        pieces = pre_tokenizers.Split(Regex(UNICODE), "isolated")
        engine.pre_tokenizer = pre_tokenizers.Sequence([pieces, bytes_alone])
    engine.decoder = decoders.ByteLevel()
    return engine


def to_engine(tokenizer: Tokenizer) -> Engine:
    """Return GPT-2's tokenizer or that of bytes in Hugging Face's format."""
    ranks = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.eot)}
    names = {token: "".join(byte_characters()[b] for b in token) for token in ranks}
    merges = [(names[left], names[right]) for left, right in byte_pair_merges(ranks)]
    engine = byte_level(models.BPE({names[token]: i for token, i in ranks.items()}, merges))
    engine.add_special_tokens([END_OF_TEXT])
    return engine


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, block_size: int, chat_template: str | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json for transformers' AutoTokenizer."""
    own = isinstance(tokenizer, FileTokenizer)
    end = tokenizer.end_of_text if own else END_OF_TEXT
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": block_size}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    config |= tokenizer.template_tokens if own else {}
    config |= {"chat_template": chat_template} if chat_template else {}
    content = tokenizer.json if own else to_engine(tokenizer).to_str()
    (folder / TOKENIZER).write_text(content, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def byte_pair_merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the two parts that each token is merged from, for ids of tokens in ascending order."""
    for token, rank in ranks.items():
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:  # apply the merges of lower rank
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = min(range(len(pairs)), key=pairs.__getitem__)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]
