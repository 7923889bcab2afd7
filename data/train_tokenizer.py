"""Train a tokenizer on your text: byte-level BPE, as a tokenizer.json for --tokenizer.

    python data/train_tokenizer.py --input books/ --vocab_size 16384 --out data/books/tokenizer.json
    python data/fineweb-edu.py --input books/ --tokenizer data/books/tokenizer.json

The same text gives the same tokenizer. data/fineweb-edu.py prints its bytes per token.
"""

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

from tokenizers import models, pre_tokenizers, trainers

from data.export_tokenizer import byte_level
from data.named_tokenizer import END_OF_TEXT
from data.source import Skipped, Source, list_files
from utils.cli import start_script
from utils.ranges import Count

PASSAGE = 2_000  # characters that are sampled together, about a page


@dataclass
class TokenizerOptions:
    """Train a tokenizer on your text."""

    input: tuple[str, ...]
    """Files or folders, as data/fineweb-edu.py takes them."""
    out: Path
    """The tokenizer.json to write."""
    vocab_size: Count = 16_384
    """Tokens, at least the 256 bytes and end of text; shards of more than 65,536 have 4 bytes a
    token."""
    split: Literal["unicode", "gpt2"] = "unicode"
    """Pieces that no token crosses. gpt2: words and numbers as in GPT-2; unicode: words with their
    marks in any script, and single digits."""
    sample_mb: Count = 50
    """Text to train on, in MB."""
    text_column: str = "text"
    """Column of parquet, JSON or CSV that holds the text."""


def read_passages(source: Source, share: float) -> Iterator[str]:
    """Yield a share (0 to 1, or above for all) of the passages of all texts, chosen by a hash:
    always the same ones."""
    for row_batch in source.batches():
        for text in row_batch.rows:
            if isinstance(text, Skipped):
                continue
            # passages, not texts, so that a source of one long book can be sampled, too
            for start in range(0, len(text), PASSAGE):
                passage = text[start : start + PASSAGE]
                # CRC-32 as a number in [0, 1)
                if zlib.crc32(passage.encode()) / 2**32 < share:
                    yield passage


def main(options: TokenizerOptions) -> None:
    sizes = list_files(options.input)  # bytes of each file, by its name
    source = Source(sizes, column=options.text_column)
    # Above 1 if all text is less than --sample_mb. The sizes are those of the files, so that
    # compressed ones give more text.
    share = options.sample_mb * 1e6 / max(1, sum(sizes.values()))
    # an untrained tokenizer: no tokens, no merges, but the rule that cuts a text into the pieces
    # that no token crosses
    backend = byte_level(models.BPE(), options.split)
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - 1,  # end of text is added below
        # all 256 bytes, whether they occur in the text or not
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(read_passages(source, share), trainer)
    backend.add_special_tokens([END_OF_TEXT])  # the last id, as in GPT-2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(backend.to_str(), encoding="utf-8")
    # fewer than --vocab_size if the text has no more pairs to merge
    print(f"{options.out}: {backend.get_vocab_size():,} tokens")


if __name__ == "__main__":
    start_script(main, TokenizerOptions)
