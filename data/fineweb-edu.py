"""Turn text into token shards: FineWeb-Edu from the Hugging Face hub, or files of your own.

    python data/fineweb-edu.py                                 # sample-10BT -> data/edu_fineweb10B
    python data/fineweb-edu.py --input books/ more.parquet --local_dir data/books

Machines divide the source files, each with its own output folder, and train.py reads all of them:

    python data/fineweb-edu.py --worker_index 0 --worker_count 4 --local_dir data/worker0
    python train.py --data_dir data/worker?

A run that is killed at any moment continues from the last whole shard when it is started again.
"""

import hashlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import numpy as np
from tqdm import tqdm

from data.file_tokenizer import FileTokenizer, read_tokenizer
from data.sharder import PIECES, Document, Sharder
from data.shards import bytes_per_token
from data.source import Skipped, Source, list_files
from data.tokenizer import TOKENIZER, TOKENIZERS, Tokenizer, load_tokenizer
from utils.cli import start_script
from utils.errors import UserError
from utils.files import atomic_write, lock_folder

# options that a folder keeps, in its manifest
SETTINGS = ("text_column", "tokens_column", "shard_size", "format", "val_fraction")
SETTINGS += ("worker_index", "worker_count")
SAMPLES = {"sample-10BT": 10**10, "sample-100BT": 10**11, "sample-350BT": 35 * 10**10}  # tokens


@dataclass
class DataConfig:
    """Turn any text into token shards. Killed and started again, it continues where it was."""

    local_dir: Path | None = None
    """Folder for the shards; default: data/edu_fineweb10B, or data/ and the name of the input."""
    dataset: str = "HuggingFaceFW/fineweb-edu"
    """Hugging Face dataset to stream; HuggingFaceFW/fineweb works too."""
    remote_name: str = "sample-10BT"
    """Configuration of the dataset: sample-10BT, sample-100BT, sample-350BT, default, ..."""
    input: tuple[str, ...] = ()
    """Files, or folders of .parquet, .jsonl, .txt and .py, to read instead, also as .gz, .bz2, .xz,
    .zst; a file may also be .json, .csv, .tsv or other text."""
    text_column: str = "text"
    """Column of parquet, JSON or CSV that holds the text."""
    tokens_column: str | None = None
    """Column of token ids of --tokenizer, instead of text, as in nvidia/Nemotron-ClimbMix."""
    tokenizer: str = "gpt2"
    """gpt2: 50,257 tokens through tiktoken; bytes: one token a byte, no download; or a
    tokenizer.json (data/train_tokenizer.py makes one for your text)."""
    end_of_text: str | None = None
    """Token of the tokenizer.json that precedes every document, if it has no usual name."""
    allow_loss: bool = False
    """Shard also what the tokenizer.json deletes or has no token for; the share is printed."""
    shard_size: int = 100_000_000
    """Tokens per shard."""
    max_shards: int | None = None
    """Stop after this many train shards."""
    format: Literal["npy", "bin"] = "npy"
    """npy: numpy.load reads it; bin: llm.c's format."""
    val_fraction: float = 0.01
    """Share of documents for validation, chosen by a hash of their text."""
    num_workers: int = os.cpu_count() or 1
    """Tokenizer threads; the shards do not depend on it."""
    worker_index: int = 0
    """Index of this machine, from 0 to --worker_count - 1; each needs its own --local_dir."""
    worker_count: int = 1
    """Machines that share the work: machine i reads every n-th source file, beginning with i."""


def tokenize(tokenizer: Tokenizer, val_fraction: float, text: object) -> Document | Skipped:
    """Return the document of a text."""
    if not isinstance(text, str):
        return Skipped("without text")
    if not text.strip():
        return Skipped("empty")
    try:
        content = text.encode()
        tokens = tokenizer.encode(text)
    except ValueError:  # lone surrogates
        return Skipped("not tokenizable")
    document = make_document(tokenizer, val_fraction, content, tokens)
    document.lost = tokenizer.lost_text(text, tokens)
    return document


def read_ids(tokenizer: Tokenizer, val_fraction: float, row: object) -> Document | Skipped:
    """Return the document of a row of token ids. End of text at its ends is not repeated; within,
    it separates documents. Raises UserError if the row holds something else."""
    if row is None:
        return Skipped("without text")
    if not isinstance(row, list) or not all(
        type(i) is int and 0 <= i < tokenizer.vocab_size for i in row
    ):
        raise UserError(
            f"--tokens_column has to hold lists of token ids of {tokenizer.name}, see --tokenizer, "
            f"and not, as here, {row!r:.60}; --text_column names a column of texts"
        )
    ids = row[1:] if row[:1] == [tokenizer.eot] else row
    if ids[-1:] == [tokenizer.eot]:
        ids = ids[:-1]
    content = tokenizer.decode_bytes(ids)
    if not content.strip():
        return Skipped("empty")
    return make_document(tokenizer, val_fraction, content, np.array(ids, np.uint16))


def make_document(
    tokenizer: Tokenizer, val_fraction: float, content: bytes, tokens: np.ndarray
) -> Document:
    """Return the document of a text in UTF-8 and its tokens, in the split that its hash chooses."""
    digest = hashlib.blake2b(content, digest_size=8).digest()
    in_val = int.from_bytes(digest, "big") / 2**64 < val_fraction
    tokens = np.append(np.array([tokenizer.eot], np.uint16), tokens)
    return Document("val" if in_val else "train", tokens, len(content))


def tokenize_batches(
    config: DataConfig, source: Source, tokenizer: Tokenizer, position: dict | None
) -> Iterator[tuple[dict, list[Document | Skipped]]]:
    """Yield position and documents of each batch in order, as a thread pool tokenizes them."""

    read = read_ids if config.tokens_column else tokenize

    def tokenize_batch(rows: list) -> list[Document | Skipped]:
        documents = []
        for row in rows:
            if not isinstance(row, Skipped):
                row = read(tokenizer, config.val_fraction, row)
            documents.append(row)
        return documents

    pending: deque[tuple[dict, Future]] = deque()
    workers = ThreadPoolExecutor(config.num_workers)  # tiktoken releases the GIL
    try:
        for before, texts in source.batches(position):
            pending.append((before, workers.submit(tokenize_batch, texts)))
            if len(pending) > 3 * config.num_workers:
                before, task = pending.popleft()
                yield before, task.result()
        yield from ((before, task.result()) for before, task in pending)
    finally:
        workers.shutdown(cancel_futures=True)


def write_shards(
    config: DataConfig, source: Source, sharder: Sharder, tokenizer: Tokenizer
) -> bool:
    """Write shards; return True at the end of the source, False once max_shards are full."""
    manifest, start = sharder.manifest, sharder.manifest["state"]
    first, written = start["documents"], start["tokens"]  # in the first batch and document
    total = config.max_shards and config.max_shards * config.shard_size
    lag = 0.1 if sys.stderr.isatty() else 60  # seconds between two updates of the bar
    bar = tqdm(total=total, unit="tok", unit_scale=True, delay=lag, mininterval=lag)
    bar.update(sharder.tokens)
    last = None  # the newest document, written once the next one is there
    skipped: Counter[str] = Counter()  # after it: a run that continues at `last` counts them again
    for before, documents in tokenize_batches(config, source, tokenizer, start["source"]):
        for n, document in enumerate(documents[first:], first):
            if isinstance(document, Skipped):
                skipped[document.reason] += 1
                continue
            if document.lost and not config.allow_loss:
                raise UserError(
                    f"{tokenizer.name} loses {len(document.lost):,} characters of a text, as "
                    f"{''.join(dict.fromkeys(document.lost))[:20]!r}; take another --tokenizer, or "
                    "shard what is left by --allow_loss"
                )
            if last and not sharder.write(*last):
                return False
            manifest["skipped"] = Counter(manifest["skipped"]) + skipped
            if written == 0:  # else a run that ended within the document has counted it
                manifest["documents"] += 1
                manifest["lost_bytes"] += len(document.lost.encode())
            skipped.clear()
            bar.update(len(document.tokens) - written)
            last = document, written, {"source": before, "documents": n}
            written = 0
        first = 0
    val_fraction = config.val_fraction if config.worker_count == 1 else 0
    if last and not sharder.write_last(*last, val_fraction):
        return False
    manifest["skipped"] = Counter(manifest["skipped"]) + skipped
    return True


def prepare(config: DataConfig) -> tuple[dict, int]:
    """Write the shards that the folder lacks; return its manifest and the number of new tokens."""
    spec = config.tokenizer
    if spec not in TOKENIZERS:
        spec = read_tokenizer(Path(spec), config.end_of_text)
    tokenizer = load_tokenizer(spec)
    sizes = list_files(config.input) if config.input else {}
    hub, worker = (config.dataset, config.remote_name), (config.worker_index, config.worker_count)
    source = Source(list(sizes), *hub, config.tokens_column or config.text_column, *worker)
    settings = {name: getattr(config, name) for name in SETTINGS}
    settings |= {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size}
    if isinstance(tokenizer, FileTokenizer):
        settings["end_of_text"] = tokenizer.end_of_text
    settings |= {"eot": tokenizer.eot, "source": list(config.input or hub), "files": sizes}
    lock = lock_folder(config.local_dir, "sharding into")
    try:
        sharder = Sharder(config.local_dir, settings, config.max_shards)
        if isinstance(tokenizer, FileTokenizer):  # it travels with the shards
            with atomic_write(config.local_dir / TOKENIZER) as file:
                file.write(tokenizer.json.encode())
        manifest = sharder.manifest
        if manifest["complete"] or (manifest["stopped"] and sharder.full):
            return manifest, 0
        whole_sample = not config.input and config.worker_count == 1
        sharder.reopen(SAMPLES.get(config.remote_name) if whole_sample else None)
        before = sharder.tokens
        complete = not sharder.full and write_shards(config, source, sharder, tokenizer)
        if complete and not manifest["documents"]:
            raise UserError(
                f"{settings['source'][0]} holds no text for this worker; skipped: "
                f"{describe_skipped(manifest)}"
            )
        sharder.end(complete)
    finally:
        os.close(lock)
    return manifest, sharder.tokens - before


def describe_skipped(manifest: dict) -> str:
    """Return how many rows were skipped, for each reason."""
    return ", ".join(f"{n:,} {why}" for why, n in manifest["skipped"].items()) or "none"


def describe_validation(manifest: dict) -> str:
    """Return what the validation text is."""
    if manifest.get("held_out"):
        return f"{PIECES} pieces, spread over the last text"
    return "documents chosen by hash"


def main(config: DataConfig) -> None:
    if min(config.shard_size, config.num_workers, config.max_shards or 1) < 1:
        raise UserError("--shard_size, --num_workers and --max_shards must be at least 1")
    if not (0 <= config.val_fraction < 1 and 0 <= config.worker_index < config.worker_count):
        raise UserError("--val_fraction must be in [0, 1), --worker_index in [0, --worker_count)")
    if config.local_dir is None:
        config.local_dir = Path("data/edu_fineweb10B")
        if config.input:
            config.local_dir = Path("data", Path(config.input[0]).name.split(".")[0] or "text")
    began = time.time()
    manifest, new = prepare(config)
    seconds = time.time() - began
    state = "complete" if manifest["complete"] else "stopped at --max_shards"
    print(f"{config.local_dir}: {state}")
    print(f"documents: {manifest['documents']:,}; skipped: {describe_skipped(manifest)}")
    print(f"tokenizer: {manifest['tokenizer']}")
    for split in ("train", "val"):
        sizes = [shard["tokens"] for shard in manifest["shards"] if shard["split"] == split]
        rate = bytes_per_token([manifest], split)
        text = f"; {rate:.2f} bytes per token" if rate else ""
        print(f"{split}: {sum(sizes):,} tokens; shards: {len(sizes)}{text}")
    if manifest.get("lost_bytes"):
        share = manifest["lost_bytes"] / sum(manifest["bytes"].values())
        print(f"lost: {share:.2%} of the bytes, which {manifest['tokenizer']} does not give back")
    print(f"validation: {describe_validation(manifest) if sizes else 'none'}")
    print(f"{new:,} new tokens in {seconds:.1f} s ({new / seconds / 1e6:.2f} M/s)")


if __name__ == "__main__":
    start_script(main, DataConfig)
