"""Train a tokenizer on your text: byte-level BPE, as a tokenizer.json for --tokenizer.

    python data/train_tokenizer.py --input books/ --vocab_size 16384 --out data/books/tokenizer.json
    python data/fineweb-edu.py --input books/ --tokenizer data/books/tokenizer.json

A hash chooses the text to train on, and the text held out to count bytes per token, beside GPT-2's.
The same text gives the same tokenizer.
"""

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

from tokenizers import models, pre_tokenizers, trainers

from data.export_tokenizer import END_OF_TEXT, byte_level
from data.file_tokenizer import read_tokenizer
from data.source import Source, list_files
from data.tokenizer import load_tokenizer
from utils.cli import start_script
from utils.errors import UserError
from utils.files import atomic_write

PIECE = 2_000  # characters of a text that are sampled, or held out, together
HELD_OUT = 0.02  # share of the pieces that are held out
MOST_HELD_OUT = 2_000  # pieces


@dataclass
class TokenizerConfig:
    """Train a tokenizer on your text."""

    input: tuple[str, ...]
    """Files or folders, as data/fineweb-edu.py takes them."""
    out: Path
    """The tokenizer.json to write."""
    vocab_size: int = 16_384
    """Tokens, end of text included; at most 65,535."""
    split: Literal["unicode", "gpt2"] = "unicode"
    """Pieces that no token crosses. gpt2: words and numbers as in GPT-2; unicode: words with their
    marks in any script, and single digits."""
    sample_mb: int = 50
    """Text to train on, in MB."""
    text_column: str = "text"
    """Column of parquet, JSON or CSV that holds the text."""


def read_pieces(source: Source, share: float, held_out: list[str]) -> Iterator[str]:
    """Yield a share of the pieces of the texts, to train on; put others into `held_out`."""
    for _, rows in source.batches():
        for text in rows:
            if not isinstance(text, str):
                continue
            for start in range(0, len(text), PIECE):
                piece = text[start : start + PIECE]
                # uniform in [0, 1), the same for equal pieces, so that none is on both sides
                draw = zlib.crc32(piece.encode(errors="replace")) / 2**32
                if draw > 1 - HELD_OUT and len(held_out) < MOST_HELD_OUT:
                    held_out.append(piece)
                elif draw < share:
                    yield piece


def print_rate(spec: str, pieces: list[str]) -> None:
    """Print how many bytes a token of a tokenizer stands for."""
    try:
        tokenizer = load_tokenizer(spec)
    except UserError as error:  # GPT-2's cannot be downloaded
        print(error)
        return
    num_tokens = sum(len(tokenizer.encode(piece)) for piece in pieces)
    num_bytes = sum(len(piece.encode(errors="replace")) for piece in pieces)
    rate = num_bytes / num_tokens
    print(f"{rate:.2f} bytes per token of {tokenizer.name} in {num_bytes:,} bytes held out")


def main(config: TokenizerConfig) -> None:
    if not 257 <= config.vocab_size < 65_536:
        raise UserError(f"--vocab_size {config.vocab_size} must be 257 to 65,535")
    sizes = list_files(config.input)
    source = Source(list(sizes), column=config.text_column)
    # by the sizes of the files: compressed ones give more text than --sample_mb
    share = config.sample_mb * 1e6 / max(1, sum(sizes.values()))
    held_out: list[str] = []
    engine = byte_level(models.BPE(), config.split)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - 1,  # end of text is added below
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, also unseen ones
        show_progress=False,
    )
    engine.train_from_iterator(read_pieces(source, share, held_out), trainer)
    engine.add_special_tokens([END_OF_TEXT])  # the last id, as in GPT-2
    config.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(config.out) as file:
        file.write(engine.to_str().encode())
    print(f"{config.out}: {engine.get_vocab_size():,} tokens")
    if held_out:
        print_rate(read_tokenizer(config.out), held_out)
        print_rate("gpt2", held_out)


if __name__ == "__main__":
    start_script(main, TokenizerConfig)
