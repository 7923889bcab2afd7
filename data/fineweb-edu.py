"""Turn text into token shards: FineWeb-Edu from the Hugging Face hub, or files of your own.

    python data/fineweb-edu.py                                 # sample-10BT -> data/edu_fineweb10B
    python data/fineweb-edu.py --input books/ more.parquet --local_dir data/books

Several machines can share the source files, each with its own output folder. train.py reads all of
the folders:

    python data/fineweb-edu.py --worker_index 0 --worker_count 4 --local_dir data/worker0
    python train.py --data_dir data/worker?

If a run is killed at any moment, the same command continues after what the shards hold.
"""

import hashlib
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import numpy as np
from tqdm import tqdm

from data.manifest import Manifest, ResumePoint, Settings
from data.named_tokenizer import TOKENIZER_FILE, TOKENIZERS, ByteTokenizer, Tokenizer
from data.sharder import HELD_OUT_SPANS, MIN_VAL_TOKENS, Document, Sharder, TokenFile
from data.shards import MAX_BIN_TOKENS
from data.source import (
    LongText,
    RowBatch,
    Skipped,
    Source,
    SourcePosition,
    is_full_disk,
    join_reasons,
    list_files,
    pieces_of,
    size_of,
)
from data.tokenizer import FileTokenizer, load_tokenizer, read_tokenizer_spec
from utils.cli import start_script
from utils.errors import UserError
from utils.files import atomic_write, lock_folder, printable
from utils.ranges import BelowOne, Count, Natural

CHUNK = 2**18  # characters of a text that are tokenized at once, or more
MARGIN = 1_000  # characters on each side of a cut; find_cut tokenizes them with and without it
MANY_CHUNKS = 64  # without a place to cut: print a note
# Places to cut a text, the best first: before white space that follows another character, and
# before punctuation that follows a letter or a number (without "_" and the apostrophe of "don't").
PLACES_TO_CUT = (
    re.compile(r"(?<=\S)[ \t\r\n]"),
    re.compile(r"(?<=[^\W_])[!-&(-/:-@\[-^`{-~，。、；：！？]"),
)
# memory to tokenize a byte of a text at once, by tiktoken and by the library `tokenizers`
MEMORY_PER_BYTE_GPT2 = 55
MEMORY_PER_BYTE = 120
PENDING_BYTES = 2**27  # of text per thread, read but not yet written


@dataclass
class ShardOptions:
    """Turn any text into token shards. After a kill, the same command continues where it was."""

    local_dir: Path | None = None
    """Folder for the shards; default: data/edu_fineweb10B, or data/ and the name of the input."""
    dataset: str = "HuggingFaceFW/fineweb-edu"
    """Hugging Face dataset to stream; HuggingFaceFW/fineweb works too."""
    remote_name: str = "sample-10BT"
    """Configuration of the dataset: sample-10BT, sample-100BT, sample-350BT, default, ..."""
    input: tuple[str, ...] = ()
    """Read these files, or folders of .parquet, .jsonl, .txt and .py, instead of the dataset; also
    compressed as .gz, .bz2, .xz or .zst. A folder without these may have .csv, .tsv,
    .json or .md; a file that you name may be any text."""
    text_column: str = "text"
    """Column of parquet, JSON or CSV that holds the text."""
    separator: str | None = None
    """Text between the documents of a text file: a mark like "<|endoftext|>", or a line like "---"
    that has nothing else. With a line break, which is \\n, as in "\\n\\n", any text separates."""
    replace_bad_bytes: bool = False
    """Read U+FFFD for each byte that is not UTF-8, instead of skipping its row, or text file."""
    tokenizer: str = "gpt2"
    """gpt2: 50,257 tokens, by tiktoken; bytes: one token a byte, no download; or the path of a
    tokenizer.json (data/train_tokenizer.py makes one for your text) or of nanoGPT's meta.pkl."""
    end_of_text: str | None = None
    """End-of-text token of the tokenizer.json, if its name is not a usual one."""
    allow_loss: bool = False
    """Accept text that the tokenizer.json deletes or has no token for; prints the lost share."""
    shard_size: Count = 100_000_000
    """Tokens per shard."""
    max_shards: Count | None = None
    """Stop after this many train shards."""
    format: Literal["npy", "bin"] = "npy"
    """npy: numpy.load reads it; bin: llm.c's format."""
    val_fraction: BelowOne = 0.01
    """Share of documents for validation, chosen by a hash of their text. If the hashes choose too
    little text (of one book, for example), a tenth or more of the last texts is held out."""
    num_workers: Count = os.cpu_count() or 1
    """Tokenizer threads; the shards do not depend on their number."""
    worker_index: Natural = 0
    """Index of this machine, from 0 to --worker_count - 1; each needs its own --local_dir."""
    worker_count: Count = 1
    """Number of machines that share the work: machine i of n reads every n-th file, from i on."""


def find_cut(tokenizer: Tokenizer, piece: str) -> int | None:
    """Return where a piece of a text can be cut without a change of the ids, or None.

    At PLACES_TO_CUT the expressions of GPT-2 and its successors cut, too, and the tokens of most
    vocabularies end. Tokenize the characters around a place with and without the cut, because some
    tokenizers differ: ".\\n" may be one token. Another place has to precede it within these
    characters, because the ids of a long word may depend on its beginning.
    """
    # each byte is a token, or each character: a vocabulary of characters has no end_ids
    if isinstance(tokenizer, ByteTokenizer) or tokenizer.end_ids == frozenset():
        return len(piece)
    for pattern in PLACES_TO_CUT:  # before white space; before punctuation
        # only places with MARGIN (1,000) characters on both sides, which are compared below
        places = pattern.finditer(piece, MARGIN, len(piece) - MARGIN)
        # the first places are enough: they fail where a tokenizer never cuts at such a place
        for place in islice(places, 8):
            cut = place.start()
            before, after = piece[cut - MARGIN : cut], piece[cut : cut + MARGIN]
            # without another place in it, `before` may lie within one long word
            if not pattern.search(before):
                continue
            # encode would begin `after` with the space that some tokenizers put before a text
            ids_with_cut = [tokenizer.encode(before), tokenizer.encode_continuation(after)]
            if np.array_equal(np.concatenate(ids_with_cut), tokenizer.encode(before + after)):
                return cut
    return None


def print_memory(tokenizer: Tokenizer, text: str | LongText) -> None:
    """Say how much memory a text takes that may have to be tokenized at once."""
    memory_per_byte = MEMORY_PER_BYTE_GPT2  # bytes of memory for each byte of the text
    if isinstance(tokenizer, FileTokenizer):
        memory_per_byte = MEMORY_PER_BYTE
    print(
        f"note: {MANY_CHUNKS * CHUNK:,} characters of a text have no place where {tokenizer.name} "
        "can begin anew, such as the space before a word; without one, the text takes up to "
        f"{size_of(text) * memory_per_byte / 1e9:.1f} GB of memory",
        file=sys.stderr,
    )


def split_text(tokenizer: Tokenizer, text: str | LongText) -> Iterator[str]:
    """Yield chunks of a text whose token ids together are the ids of the whole text: encode the
    first chunk with `encode`, all others with encode_continuation. "The cat sat" may become "The"
    and " cat sat", as GPT-2's tokens are "The", " cat" and " sat".

    The text is read in pieces of CHUNK characters. A chunk ends where a piece can be cut; without
    such a place it goes on.
    """
    chunk_pieces: list[str] = []  # joined, they are the next chunk
    for piece in pieces_of(text, CHUNK):
        # Index in the piece where it can be cut, or None. The last piece, and so the only one of a
        # short text, needs no cut.
        cut = find_cut(tokenizer, piece) if len(piece) == CHUNK else None
        if cut is None:
            chunk_pieces.append(piece)
            if len(chunk_pieces) == MANY_CHUNKS:
                print_memory(tokenizer, text)
            continue
        chunk_pieces.append(piece[:cut])
        yield "".join(chunk_pieces)
        chunk_pieces = [piece[cut:]]
    yield "".join(chunk_pieces)


def tokenize(
    tokenizer: Tokenizer, val_fraction: float, text: str | LongText, folder: Path
) -> Document:
    """Return the document of a text, for train or for validation. The tokens of a long text are
    kept on disk, in `folder`.

    A hash of the text chooses the split. Unlike a random number or every n-th document, the hash
    does not depend on the order of the source, on workers or on where a run continues, and no copy
    of a validation document gets into train.
    """
    text_hash = hashlib.blake2b(digest_size=8)
    token_file = TokenFile(folder)
    lost_counts: Counter[str] = Counter()
    encode = tokenizer.encode_document  # for the first chunk: start_ids, then the text
    for chunk in split_text(tokenizer, text):
        text_hash.update(chunk.encode())
        ids = encode(chunk)  # uint32 (n,)
        token_file.append(ids)
        # characters that decoding the ids does not restore; "" for gpt2 and bytes
        lost_counts.update(tokenizer.lost_text(chunk, ids))
        encode = tokenizer.encode_continuation
    num_tokens = token_file.num_tokens
    # 64 bits of the hash as a number in [0, 1)
    is_val = int.from_bytes(text_hash.digest(), "big") / 2**64 < val_fraction
    return Document(
        token_file=token_file,
        ranges=[range(num_tokens)],  # Sharder.divide_last may cut the last text into several
        num_start_ids=len(tokenizer.start_ids),  # 1 for gpt2; hold_out repeats these ids
        num_train=0 if is_val else num_tokens,  # all tokens are in one split
        num_bytes=size_of(text),
        lost_counts=lost_counts,
    )


def tokenize_and_clear(
    row_batch: RowBatch,
    resume_point: ResumePoint,
    tokenizer: Tokenizer,
    val_fraction: float,
    folder: Path,
) -> list[Document]:
    """Return the documents of a batch from row `first_row` of the resume point on, and clear
    `row_batch.rows`. The shards already hold earlier rows, and as many tokens of the first document
    as the resume point has. The tokens of a long text are kept on disk, in `folder`."""
    documents: list[Document] = []
    for row, text in enumerate(row_batch.rows):
        # a Skipped row is only counted
        if row < resume_point.first_row or isinstance(text, Skipped):
            continue
        document = tokenize(tokenizer, val_fraction, text, folder)
        # for save_resume_point: a later run continues at this row of this batch
        document.position = row_batch.position
        document.row = row
        documents.append(document)
    # In place, because read_documents still holds the batch: texts take memory, or disk.
    row_batch.rows.clear()
    if documents:
        # resume_point.tokens is 0 except for the first batch; Sharder.write skips these tokens
        documents[0].num_written = resume_point.tokens
    return documents


def read_documents(
    options: ShardOptions, source: Source, tokenizer: Tokenizer, sharder: Sharder
) -> Iterator[Document]:
    """Yield the documents of the source in order, tokenized by threads, from the manifest's state
    on, which is ResumePoint(), the beginning of the source, in a new manifest."""
    # documents of each batch, in the order of the source, and the bytes of its texts
    pending: deque[tuple[Future[list[Document]], int]] = deque()
    pending_bytes = 0  # sum over `pending`
    # threads, not processes: tokenizers release the interpreter lock, and nothing is copied
    workers = ThreadPoolExecutor(options.num_workers)
    try:
        resume_point = sharder.manifest.state  # of an earlier run, or ResumePoint()
        # resume_point.source is a SourcePosition as JSON; None: from the beginning
        for row_batch in source.batches(resume_point.source):
            # size of the texts of the batch in UTF-8
            num_bytes = sum(size_of(row) for row in row_batch.rows if not isinstance(row, Skipped))
            documents_future = workers.submit(
                tokenize_and_clear,
                row_batch,
                resume_point,
                tokenizer,
                options.val_fraction,
                sharder.folder,
            )
            pending.append((documents_future, num_bytes))
            pending_bytes += num_bytes
            resume_point = ResumePoint()  # the shards hold nothing of later batches
            # Three batches per thread keep all threads busy. PENDING_BYTES (128 MiB of text per
            # thread) limits memory, and the room on disk of long texts and of their tokens.
            while len(pending) > 3 * options.num_workers or (
                len(pending) > 1 and pending_bytes > options.num_workers * PENDING_BYTES
            ):
                oldest_future, oldest_bytes = pending.popleft()
                pending_bytes -= oldest_bytes
                yield from oldest_future.result()  # waits until its batch is tokenized
        while pending:
            oldest_future, _ = pending.popleft()
            yield from oldest_future.result()  # the Documents of a batch
    finally:
        # also if max_shards or an error ends the run: drop the batches that still wait
        workers.shutdown(cancel_futures=True)


def write_shards(
    options: ShardOptions, source: Source, sharder: Sharder, tokenizer: Tokenizer
) -> bool:
    """Write shards. Return True if the source was read to its end, False if max_shards are full."""
    # yields a Document for each text that earlier runs have not written, or only in part, in the
    # order of the source; threads tokenize ahead
    documents = read_documents(options, source, tokenizer, sharder)
    # seconds between updates of the bar; each update of a log file is a line of its own
    bar_seconds = 0.1 if sys.stderr.isatty() else 60
    bar = tqdm(
        initial=sum(sharder.tokens_by_split.values()),  # tokens of earlier runs
        unit="tok",
        unit_scale=True,  # 1.2M, not 1200000
        delay=bar_seconds,  # a short run shows no bar
        mininterval=bar_seconds,
    )
    # hold_back may join the last documents into one, and hold out a part of it for validation.
    for document in sharder.hold_back(documents):
        # Counter({"\t": 12}) for a tokenizer.json whose pre-tokenizer drops white space
        lost_counts = document.lost_counts
        if lost_counts and not options.allow_loss:
            raise UserError(
                f"{tokenizer.name} loses {lost_counts.total():,} characters of a text, such as "
                f"{''.join(lost_counts)[:20]!r}; take another --tokenizer, or accept the loss "
                "by --allow_loss"
            )
        # num_written: tokens of the first document that an earlier run wrote, counted in `initial`
        bar.update(document.num_tokens - document.num_written)
        if not sharder.write(document):  # max_shards are full, and the resume point is saved
            return False
    # Into manifest.json. len(names), the number of this worker's files, is the index past the last
    # one: a later run finds nothing left to read.
    sharder.save_resume_point(SourcePosition(len(source.names)))
    # the shards must hold every byte of text that this run and earlier runs have read
    num_bytes = sum(counts.bytes for counts in source.counts_by_file.values())
    assert num_bytes == sum(sharder.manifest.text_bytes_by_split.values()), "text was lost"
    return True


def open_tokenizer(options: ShardOptions) -> Tokenizer:
    """Return the tokenizer of --tokenizer, a name or the path of a file. Raise UserError if it is
    neither."""
    if options.tokenizer in TOKENIZERS:  # "gpt2" or "bytes"
        return load_tokenizer(options.tokenizer)
    path = Path(options.tokenizer)  # a tokenizer.json of any name, or meta.pkl
    if not path.is_file():
        raise UserError(
            f"--tokenizer {path} is neither {' nor '.join(TOKENIZERS)}, nor a file: "
            "data/train_tokenizer.py makes a tokenizer.json for your text"
        )
    # the spec is "gpt2" or "bytes" too if the file defines that tokenizer
    return load_tokenizer(read_tokenizer_spec(path, options.end_of_text))


def make_settings(
    options: ShardOptions, tokenizer: Tokenizer, bytes_by_file: dict[str, int]
) -> Settings:
    """Return the settings on which the tokens depend: Sharder refuses a folder with shards of
    other settings."""
    settings = Settings(
        tokenizer=tokenizer.name,  # "gpt2", "bytes" or "tokenizer-8f3a01c2"
        vocab_size=tokenizer.vocab_size,
        eot=tokenizer.eot,
        shard_size=options.shard_size,
        format=options.format,
        val_fraction=options.val_fraction,
        dataset=options.dataset,
        remote_name=options.remote_name,
        text_column=options.text_column,
        separator=options.separator,
        replace_bad_bytes=options.replace_bad_bytes,
        worker_index=options.worker_index,
        worker_count=options.worker_count,
        files=list(bytes_by_file),
        sizes=list(bytes_by_file.values()),
    )
    if isinstance(tokenizer, FileTokenizer):  # the names "gpt2" and "bytes" tell their end of text
        settings.end_of_text = tokenizer.end_of_text  # "</s>"; read by find_tokenizer_spec
    return settings


def continue_sharding(options: ShardOptions, folder: Path) -> tuple[Manifest, int]:
    """Write the shards that the folder lacks; return its manifest and the number of new tokens."""
    # {"books/a.txt": 12_345, ...} for ("books/", "more.parquet"), other workers' files included; {}
    # to read the dataset
    bytes_by_file = list_files(options.input) if options.input else {}
    tokenizer = open_tokenizer(options)
    settings = make_settings(options, tokenizer, bytes_by_file)
    source = Source(settings, folder)  # keeps long texts in the folder
    # Two processes would overwrite each other's shards. lock_folder returns a file descriptor, or
    # raises UserError, "another process is sharding into FOLDER: ...".
    lock = lock_folder(folder, "sharding into")
    try:
        sharder = Sharder(folder, settings, source, options.max_shards)  # refuses other settings
        if isinstance(tokenizer, FileTokenizer):  # open_folder reads the file with the shards
            with atomic_write(folder / TOKENIZER_FILE) as file:
                file.write(tokenizer.tokenizer_json.encode())
        # the manifest of an earlier run, or a new manifest; the sharder updates it in place
        manifest = sharder.manifest
        source.counts_by_file.update(manifest.ledger)  # rows that earlier runs have sharded
        # ShardFolder.name recognizes FineWeb-Edu by it
        manifest.source = list(options.input) or [options.dataset, options.remote_name]
        if manifest.complete:  # the source is read to its end
            return manifest, 0
        sharder.reopen()  # cuts open shards to the manifest's state; UserError if one was replaced
        num_tokens_before = sum(sharder.tokens_by_split.values())
        is_complete = False  # whether the source is read to its end
        if not sharder.is_full:  # else an earlier run has written --max_shards already
            is_complete = write_shards(options, source, sharder, tokenizer)
        sharder.end(is_complete)  # finishes the shards that are not full
    finally:
        os.close(lock)
    return manifest, sum(sharder.tokens_by_split.values()) - num_tokens_before


def print_summary(manifest: Manifest) -> None:
    """Print what a folder of shards holds: documents, skipped rows by reason, tokens and shards of
    each split, bytes of source text per token."""
    print(f"documents: {manifest.documents:,}; skipped: {join_reasons(manifest.skipped)}")
    print(f"tokenizer: {manifest.tokenizer}")
    for split in ("train", "val"):
        shards = [entry for entry in manifest.shards if entry.split == split]
        num_tokens = sum(entry.tokens for entry in shards)
        line = f"{split}: {num_tokens:,} tokens; shards: {len(shards)}"
        if num_tokens:
            line += f"; {manifest.text_bytes_by_split[split] / num_tokens:.2f} bytes per token"
        print(line)
        # Too short for one sequence of GPT-2. The folders of other workers may hold more.
        if 0 < num_tokens < MIN_VAL_TOKENS and manifest.worker_count == 1:
            print(
                f"note: {split} has {num_tokens:,} tokens, and GPT-2's context takes "
                f"{MIN_VAL_TOKENS:,}: shard more text, or train.py needs --block_size below "
                f"{num_tokens}"
            )
    if manifest.lost_bytes:
        share = manifest.lost_bytes / sum(manifest.text_bytes_by_split.values())
        print(f"lost: {share:.2%} of the bytes, which {manifest.tokenizer} cannot restore")
    if manifest.held_out:  # hashes gave a split too little text, or none
        print(
            f"validation: the ends of {HELD_OUT_SPANS} spans of the last text, or the last texts "
            "if they are short"
        )


def main(options: ShardOptions) -> None:
    if options.worker_index >= options.worker_count:
        raise UserError(f"--worker_index {options.worker_index} must be below --worker_count")
    if options.format == "bin" and options.shard_size > MAX_BIN_TOKENS:
        raise UserError(f"--shard_size of --format bin must be at most {MAX_BIN_TOKENS:,}")
    folder_name = "edu_fineweb10B"  # in data/; the default --data_dir of train.py
    if options.input:
        # "books" for books.jsonl.gz; "." has no name
        folder_name = Path(options.input[0]).name.split(".")[0] or "text"
    folder = options.local_dir or Path("data", folder_name)
    start_seconds = time.time()
    advice = "the same command continues after the last full shard"
    try:
        manifest, num_new = continue_sharding(options, folder)  # num_new counts tokens
    except KeyboardInterrupt:
        print(advice, file=sys.stderr)
        raise
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise UserError(f"{folder}: {error.strerror}; make room there, then {advice}") from error
    seconds = time.time() - start_seconds
    print(f"{printable(folder)}: {'complete' if manifest.complete else 'stopped at --max_shards'}")
    print_summary(manifest)
    if num_new:
        print(f"{num_new:,} new tokens in {seconds:.1f} s ({num_new / seconds / 1e6:.2f} M/s)")
    else:
        print("nothing to do: all shards are there already")


if __name__ == "__main__":
    start_script(main, ShardOptions)
