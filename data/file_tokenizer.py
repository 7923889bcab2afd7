"""tokenizer.json, the format of Hugging Face's tokenizers: reading, using and writing it."""

import json
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
    tokenizer_identity,
    tokenizer_name,
)
from utils.errors import UserError

MERGES = "merges.txt"  # and
VOCABULARY = "vocab.json"  # are what GPT-2 had before tokenizer.json
# a text that tells tokenizers apart, and its ids by GPT-2's; the ligature is for normalizers
PROBE = "Hello naïve  \ufb01 天🐍"
GPT2_IDS = [15496, 41492, 220, 27332, 105, 223, 36469, 102, 8582, 238, 235]
PROBE_IDS = {"gpt2": GPT2_IDS, "bytes": [*PROBE.encode()]}
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")  # of text, by name
END_OF_TEXT = ENDS[0]
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

    def __init__(self, spec: str) -> None:
        content = json.loads(spec)
        self.name, self.identity = tokenizer_name(spec), tokenizer_identity(spec)
        self.chat_template = content["chat_template"]
        self.end_of_text = content["eot"]
        self.json = json.dumps(content[TOKENIZER], ensure_ascii=False)
        self.engine = make_engine(self.json)
        vocab = self.engine.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self.eot = vocab[self.end_of_text]
        self.end_ids = frozenset([self.eot, *content.get("end_ids", [])])
        self.template_tokens = dict.fromkeys(("bos_token", "eos_token"), self.end_of_text)
        self.template_tokens |= content.get("template_tokens", {})
        added = {token["content"] for token in content[TOKENIZER]["added_tokens"]}
        self.added_ids = {vocab[token] for token in added}
        # a decoder may be missing; what writes bytes as characters tells it, too
        stages = [content[TOKENIZER].get(x) for x in ("normalizer", "pre_tokenizer", "decoder")]
        byte_level = "ByteLevel" in json.dumps(stages)
        bytes_of = dict(zip(byte_characters(), range(256), strict=True))
        self.bytes = {self.eot: b""}
        for token, i in vocab.items():
            if byte_level and token not in added:
                token_bytes = bytes(bytes_of[c] for c in token)
            elif token[:3] == "<0x" and len(token) == 6:  # a byte that is no whole character
                token_bytes = bytes([int(token[3:5], 16)])
            else:
                token_bytes = token.replace(SPACE, " ").encode()
            self.bytes.setdefault(i, token_bytes)

    @cached_property
    def continuing_engine(self) -> Engine:
        """The tokenizer without what puts a space, or a mark that stands for one, before texts."""
        return make_engine(json.dumps(json.loads(self.json, object_hook=without_prefix)))

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


def make_engine(tokenizer_json: str) -> Engine:
    """Return the tokenizer of a tokenizer.json, which neither cuts nor pads a text."""
    engine = Engine.from_str(tokenizer_json)
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


def without_prefix(part: dict) -> dict:
    """Return an object of a tokenizer.json without the option to put something before each text."""
    if part.get("type") == "Prepend":
        part["prepend"] = ""
    if part.get("type") in ("ByteLevel", "Metaspace"):
        part["add_prefix_space"] = False
    if part.get("type") == "Metaspace":
        part["prepend_scheme"] = "never"
    return part


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
            model = models.BPE.from_file(str(path), str(path.with_name(MERGES)))
            content = json.loads(byte_level(model).to_str())
        else:
            content = json.loads(path.read_text(encoding="utf-8"))
        ids = make_engine(json.dumps(content)).get_vocab()
        highest = max(ids.values())
        if highest >= 65_535:
            raise ValueError(f"a token has id {highest:,}, and shards hold ids below 65,535")
        if isinstance(end_of_text, int) and end_of_text not in ids.values():
            end_of_text = None  # 50,256 is the default of transformers for any vocabulary
        ends = [token for token, i in ids.items() if end_of_text in (token, i)]
        ends += [token for token in ENDS if token in ids and end_of_text is None]
        if not ends:
            raise ValueError(f"no end of text {end_of_text or ''}; name it by --end_of_text TOKEN")
        spec = {
            "eot": ends[0],
            "end_ids": list(end_ids),
            "chat_template": chat_template,
            "template_tokens": template_tokens or {},
            TOKENIZER: content,
        }
        tokenizer = FileTokenizer(json.dumps(spec))
        name = known_name(tokenizer)
        is_plain = tokenizer.end_ids == {tokenizer.eot} and chat_template in (None, CHAT_TEMPLATE)
        if name and is_plain:
            return name
        if name:
            spec["name"] = name
        turn_end = tokenizer.turn_end()
        if turn_end is not None:
            spec["end_ids"].append(turn_end)
    except Exception as error:
        raise UserError(f"{path} is no tokenizer that can be used: {error}") from error
    return json.dumps(spec)


def known_name(tokenizer: Tokenizer) -> str | None:
    """Return the key of TOKENIZERS whose ids a tokenizer gives, None if there is no such key: other
    languages have 50,257 tokens, too."""
    ids = tokenizer.encode(PROBE).tolist()
    for name, known in TOKENIZERS.items():
        same_size = (tokenizer.vocab_size, tokenizer.eot) == (known.vocab_size, known.eot)
        if same_size and ids == PROBE_IDS[name]:
            return name
    return None


def check_spaces(path: Path, spec: str) -> None:
    """Raise UserError for a tokenizer that drops the spaces between words: text of the model would
    have none. Sharding refuses it as one that loses text, unless that is allowed."""
    if spec in TOKENIZERS:
        return
    tokenizer = FileTokenizer(spec)
    if " " in tokenizer.lost_text("a a", tokenizer.encode("a a")):
        raise UserError(f"{path} drops the spaces of a text, so its model cannot write any")


def pretrained_tokenizer(folder: Path, vocab_size: int) -> str:
    """Return the spec of the tokenizer of a Hugging Face model; raise UserError if it has none.
    Every eos_token_id ends a text; the first one of config.json is end of text."""
    path = folder / TOKENIZER
    if not path.is_file() and (folder / MERGES).is_file():
        path = folder / VOCABULARY
    if not path.is_file():
        for name, tokenizer in TOKENIZERS.items():
            if tokenizer.vocab_size == vocab_size:
                return name
        raise UserError(f"{folder} has no {TOKENIZER} for its {vocab_size:,} tokens")
    end_ids = []
    for name in ("config.json", "generation_config.json"):
        eos = read_json(folder / name).get("eos_token_id")
        if eos is not None:
            end_ids += eos if isinstance(eos, list) else [eos]
    config = read_json(folder / "tokenizer_config.json")
    template_tokens = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        if token is not None:
            template_tokens[name] = token["content"] if isinstance(token, dict) else token
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates with names
        template = {x["name"]: x["template"] for x in template}.get("default")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    end_of_text = end_ids[0] if end_ids else None
    spec = read_tokenizer(path, end_of_text, template, end_ids, template_tokens)
    check_spaces(path, spec)
    return spec


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
    characters = byte_characters()
    names = {token: "".join(characters[b] for b in token) for token in ranks}
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
