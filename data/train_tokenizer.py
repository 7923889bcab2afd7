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

from data.export_tokenizer import make_byte_level_backend
from data.manifest import SourceSettings
from data.named_tokenizer import END_OF_TEXT
from data.source import Skipped, Source, list_files, pieces_of
from utils.cli import start_script
from utils.errors import writing
from utils.ranges import Count

PASSAGE = 2_000  # characters, about a page: read_passages samples whole passages


@dataclass
class TokenizerOptions:
    """Train a tokenizer on your text."""

    input: tuple[str, ...]
    """Files or folders of text, in the formats of data/fineweb-edu.py."""
    out: Path
    """The tokenizer.json to write."""
    vocab_size: Count = 16_384
    """Number of tokens, with the 256 bytes and end of text; with more than 65,536, shards take 4
    bytes a token instead of 2."""
    split: Literal["unicode", "gpt2"] = "unicode"
    """How to cut a text into pieces that no token crosses. gpt2: words and numbers as in GPT-2;
    unicode: words with their marks in any script, and single digits."""
    sample_mb: Count = 50
    """Amount of text to train on, in MB."""
    text_column: str = "text"
    """Column of parquet, JSON or CSV that holds the text."""
    separator: str | None = None
    """Text between the documents of a text file, as in data/fineweb-edu.py."""
    replace_bad_bytes: bool = False
    """Read U+FFFD for each byte that is not UTF-8, instead of skipping its row, or text file."""


def read_passages(source: Source, share: float) -> Iterator[str]:
    """Yield a share of the passages of all texts, 1 or above for all. A hash chooses the passages,
    so that the same source always gives the same passages."""
    for row_batch in source.batches():
        for text in row_batch.rows:
            if isinstance(text, Skipped):
                continue
            # sample passages, not texts, because the source may be one long book
            for passage in pieces_of(text, PASSAGE):
                # CRC-32 as a number in [0, 1)
                if zlib.crc32(passage.encode()) / 2**32 < share:
                    yield passage


def main(options: TokenizerOptions) -> None:
    bytes_by_file = list_files(options.input)  # {"books/a.txt": 12_345, ...}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = SourceSettings(
        files=list(bytes_by_file),
        sizes=list(bytes_by_file.values()),
        text_column=options.text_column,
        separator=options.separator,
        replace_bad_bytes=options.replace_bad_bytes,
    )
    source = Source(settings, options.out.parent)  # keeps long texts in that folder
    # an untrained tokenizer: no tokens and no merges, only the rule that cuts a text into pieces
    backend = make_byte_level_backend(models.BPE(), options.split)  # "unicode" or "gpt2"
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - 1,  # end of text is added below
        # all 256 bytes, even if they do not occur in the text
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Share of the text to train on; above 1 if the files are smaller than --sample_mb. The sizes
    # are sizes on disk, so that compressed files give more text. max: pipes have size 0.
    share = options.sample_mb * 1e6 / max(1, sum(bytes_by_file.values()))
    backend.train_from_iterator(read_passages(source, share), trainer)
    backend.add_special_tokens([END_OF_TEXT])  # the last id, as in GPT-2
    with writing(options.out):  # UserError if it fails
        options.out.write_text(backend.to_str(), encoding="utf-8")
    num_tokens = backend.get_vocab_size()
    reason = ""
    if num_tokens < options.vocab_size:
        reason = f", not --vocab_size {options.vocab_size:,}: the text has no more pairs to merge"
    elif num_tokens > options.vocab_size:
        reason = f", not --vocab_size {options.vocab_size:,}: the 256 bytes and end of text are all"
    print(f"{options.out}: {num_tokens:,} tokens{reason}")


if __name__ == "__main__":
    start_script(main, TokenizerOptions)
