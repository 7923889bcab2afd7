"""tokenizer.json, the format of Hugging Face's tokenizers: reading, using and writing it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Engine

from data.tokenizer import (
    TOKENIZER,
    TOKENIZERS,
    ByteTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    tokenizer_name,
)
from utils.errors import UserError

GPT2_IDS = {"!": 0, "\u0120the": 262, "Hello": 15_496}  # \u0120 stands for a space
ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")  # of text, by name
END_OF_TEXT = ENDS[0]
# of Qwen 3.5: letters keep their marks, as Hindi needs, and every digit is a token
UNICODE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class FileTokenizer(ByteTokenizer):
    """Tokens of a tokenizer.json, of byte-level BPE or with "\u2581" for a space."""

    def __init__(self, spec: str) -> None:
        content = json.loads(spec)
        self.name, self.chat_template = tokenizer_name(spec), content["chat_template"]
        self.json = json.dumps(content[TOKENIZER], ensure_ascii=False)
        self.engine = Engine.from_str(self.json)
        self.engine.no_truncation()
        self.engine.no_padding()
        self.engine.encode_special_tokens = True  # like any other text
        vocab = self.engine.get_vocab()
        self.end_of_text, self.eot = content["eot"], vocab[content["eot"]]
        self.vocab_size = max(vocab.values()) + 1
        added = {token["content"] for token in content[TOKENIZER]["added_tokens"]}
        byte_level = "ByteLevel" in json.dumps(content[TOKENIZER]["decoder"])
        bytes_of = dict(zip(byte_characters(), range(256), strict=True))
        self.bytes = {self.eot: b""}
        for token, i in vocab.items():
            if byte_level and token not in added:
                found = bytes(bytes_of[c] for c in token)
            elif token[:3] == "<0x" and len(token) == 6:  # a byte that is no whole character
                found = bytes([int(token[3:5], 16)])
            else:
                found = token.replace("\u2581", " ").encode()
            self.bytes.setdefault(i, found)

    def encode(self, text: str, special: bool = False) -> np.ndarray:
        """Return token ids, uint16 (n,), with `special` those of special tokens in the text."""
        if self.engine.encode_special_tokens == special:
            self.engine.encode_special_tokens = not special
        (found,) = self.engine.encode_batch_fast([text], add_special_tokens=False)  # frees the GIL
        return np.array(found.ids, np.uint16)

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.bytes.get(i, b"") for i in ids)


def byte_characters() -> str:
    """Return the characters that byte-level BPE writes for the bytes 0 to 255: a printable byte as
    itself, another one as the next character from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return "".join(chr(b if b in printable else 0x100 + others.index(b)) for b in range(256))


def read_tokenizer(
    path: Path, end_of_text: str | int | None = None, chat_template: str | None = None
) -> str:
    """Return the spec of a tokenizer.json, in which end of text is the first of ENDS if it is not
    named; raise UserError if it cannot be used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = content["model"]["vocab"]
        if isinstance(ids, list):  # of a unigram model
            ids = {token: i for i, (token, _) in enumerate(ids)}
        ids |= {token["content"]: token["id"] for token in content["added_tokens"]}
        if GPT2_IDS.items() <= ids.items() and len(ids) == GPT2Tokenizer.vocab_size:
            return "gpt2"
        if len(ids) == 257 and all(ids.get(c) == b for b, c in enumerate(byte_characters())):
            return "bytes"
        if (highest := max(ids.values())) >= 65_535:
            raise ValueError(f"a token has id {highest:,}, and shards hold ids below 65,535")
        ends = [token for token, i in ids.items() if end_of_text in (token, i)]
        ends += [token for token in ENDS if token in ids and end_of_text is None]
        if not ends:
            raise ValueError(f"no end of text {end_of_text or ''}; name it by --end_of_text TOKEN")
        spec = {"eot": ends[0], "chat_template": chat_template, TOKENIZER: content}
        FileTokenizer(text := json.dumps(spec))
    except Exception as error:
        raise UserError(f"{path} is no tokenizer that can be used: {error}") from error
    return text


def pretrained_tokenizer(folder: Path, vocab_size: int) -> str:
    """Return the spec of the tokenizer of a Hugging Face model; raise UserError if it has none."""
    if (path := folder / TOKENIZER).is_file():
        eos = json.loads((folder / "config.json").read_text()).get("eos_token_id")
        template = None
        if (about := folder / "tokenizer_config.json").is_file():
            template = json.loads(about.read_text(encoding="utf-8")).get("chat_template")
        if (jinja := folder / "chat_template.jinja").is_file():
            template = jinja.read_text(encoding="utf-8")
        return read_tokenizer(path, eos[0] if isinstance(eos, list) else eos, template)
    for name, tokens in TOKENIZERS.items():
        if tokens.vocab_size == vocab_size:
            return name
    raise UserError(f"{folder} has no {TOKENIZER} for its {vocab_size:,} tokens")


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
