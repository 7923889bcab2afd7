"""A tokenizer's files, as transformers' AutoTokenizer reads them."""

import json
from collections.abc import Iterator
from pathlib import Path

from data.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, block_size: int, chat_template: str | None = None
) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json for transformers' AutoTokenizer."""
    ranks = {tokenizer.decode_bytes([i]): i for i in range(tokenizer.eot)}
    # GPT-2's files write a printable byte as itself, another one as the next character from U+0100
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    characters = {b: 0x100 + i for i, b in enumerate(others)}
    names = {token: token.decode("latin-1").translate(characters) for token in ranks}
    vocab = {names[token]: rank for token, rank in ranks.items()} | {END_OF_TEXT: tokenizer.eot}
    merges = "".join(f"{names[left]} {names[right]}\n" for left, right in byte_pair_merges(ranks))
    config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    config |= {"chat_template": chat_template} if chat_template else {}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
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
