"""Turn text into token shards: FineWeb-Edu from the Hugging Face hub, or local files.

    python data/fineweb-edu.py                                 # sample-10BT -> data/edu_fineweb10B
    python data/fineweb-edu.py --input books/ more.parquet --local_dir data/books

Machines divide the source files, each with its own output folder; then the folders are merged:

    python data/fineweb-edu.py --worker_index 0 --worker_count 4 --local_dir data/worker0
    python data/fineweb-edu.py --merge data/worker? --local_dir data/edu_fineweb10B

A run that is killed at any moment continues from the last whole shard when it is started again. The
shards do not depend on kills or on the number of threads.
"""

import hashlib
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts data/ there instead

import numpy as np
from tqdm import tqdm

from config import DataConfig
from data.documents import FileError, Place, warn
from data.input_files import InputFiles, digest_of
from data.merge import merge
from data.sharder import Sharder, output_folder
from data.shards import MANIFEST
from data.source import Source
from data.tokenizer import Tokenizer, load_tokenizer
from utils.cli import given_options, run
from utils.errors import UserError

MAX_PENDING_CHARS = 50_000_000  # text that is read but not yet written
SECONDS_PER_LINE = 60  # where there is no terminal for a progress bar
FEW = 1024  # validation tokens that give a rough loss at best
UNUSABLE = ("not valid Unicode", "not tokenizable")  # reasons to skip a text
PIECE_CHARS = 1_000_000  # a longer document is tokenized in pieces


def split_text(text: str) -> Iterator[str]:
    """Yield pieces of a long text whose tokens are those of the whole.

    Cuts before white space that follows something else, where GPT-2's tokenizer always cuts.
    """
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = start + PIECE_CHARS
        while end < len(text) and not (text[end].isspace() and not text[end - 1].isspace()):
            end += 1
        yield text[start:end]
        start = end
    yield text[start:]


def tokenize(
    tokenizer: Tokenizer, val_fraction: float, text: str | None
) -> tuple[str, np.ndarray | None]:
    """Return split and tokens of a text, end of text first, or the reason to skip it and None."""
    if text is None:
        return "without text", None
    if not text.strip():
        return "empty", None
    try:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        parts = [np.array([tokenizer.eot], np.uint16), *map(tokenizer.encode, split_text(text))]
    except UnicodeEncodeError:
        return UNUSABLE[0], None
    except ValueError:  # tiktoken fails on a million spaces in a row
        return UNUSABLE[1], None
    in_val = int.from_bytes(digest, "big") / 2**64 < val_fraction
    return "val" if in_val else "train", np.concatenate(parts)


def tokenize_batches(
    config: DataConfig, source: Source, tokenizer: Tokenizer, state: dict | None
) -> Iterator[tuple[dict, list]]:
    """Yield source state and texts of each batch in order, computed by a thread pool: for a text,
    what `tokenize` returns and its place."""

    def tokenize_batch(texts: list[str | None]) -> list[tuple[str, np.ndarray | None]]:
        return [tokenize(tokenizer, config.val_fraction, text) for text in texts]

    def result(task: Future, origins: list[Place | str]) -> list[tuple]:
        documents = []
        for origin, (reason, tokens) in zip(origins, task.result(), strict=True):
            if reason in UNUSABLE and reason not in named:
                warn(f"{origin}: a text that is {reason} is skipped; further ones are only counted")
                named.add(reason)
            documents.append((reason, tokens, origin))
        return documents

    named: set[str] = set()
    pending: deque[tuple[dict, list[Place | str], int, Future]] = deque()
    workers = ThreadPoolExecutor(config.num_workers)  # tiktoken releases the GIL
    try:
        for before, texts, origins in source.batches(state):
            chars = sum(len(text or "") for text in texts)
            pending.append((before, origins, chars, workers.submit(tokenize_batch, texts)))
            while (
                len(pending) > 3 * config.num_workers
                or sum(chars for _, _, chars, _ in pending) > MAX_PENDING_CHARS
            ):
                before, origins, _, task = pending.popleft()
                yield before, result(task, origins)
        for before, origins, _, task in pending:
            yield before, result(task, origins)
    finally:
        workers.shutdown(cancel_futures=True)


def write_shards(
    config: DataConfig, source: Source, files: InputFiles, sharder: Sharder, tokenizer: Tokenizer
) -> bool:
    """Write shards; return True at the end of the source, False once max_shards are full.

    Where the hash of the texts has left none for validation, or none to train on, the last one is
    divided: its tail is held out.
    """
    manifest, state = sharder.manifest, sharder.state
    skip, written = state["documents"], state["tokens"]  # in the first batch and document
    total = config.max_shards and config.max_shards * config.shard_size
    bar = tqdm(total=total, initial=sharder.tokens, unit="tok", unit_scale=True, disable=None)
    said = time.monotonic()
    last = None  # the newest document, written once the next one is there
    skipped: Counter[str] = Counter()  # after it: a run that continues at `last` counts them again
    for before, documents in tokenize_batches(config, source, tokenizer, state["source"]):
        for n, (split, tokens, place) in enumerate(documents[skip:], skip):
            if tokens is None:  # `split` is the reason
                skipped[split] += 1
                continue
            if last and not sharder.write(*last):
                return False
            count_skipped(manifest, skipped)
            manifest["documents"] += written == 0
            bar.update(len(tokens) - written)
            if bar.disable and time.monotonic() - said > SECONDS_PER_LINE:  # no terminal
                said = time.monotonic()
                print(f"{manifest['documents']:,} documents, {sharder.tokens:,} tokens", flush=True)
            read = files.record(place) if source.inputs else None
            last = split, tokens, written, {"source": before, "documents": n, "read": read}
            written = 0
        skip = 0
    hold_out = last and config.val_fraction and config.worker_count == 1
    if hold_out and sharder.needs_tail(last[0]):
        written_all = sharder.write_with_tail(*last[1:], config.val_fraction)
    else:
        written_all = last is None or sharder.write(*last)
    if written_all:
        count_skipped(manifest, skipped)
    return written_all


def count_skipped(manifest: dict, skipped: Counter[str]) -> None:
    """Move the counts of skipped documents, by reason, into the manifest."""
    manifest["skipped"] = dict(Counter(manifest["skipped"]) + skipped)
    skipped.clear()


def prepare(config: DataConfig) -> tuple[dict, int]:
    """Write the shards that the folder lacks; return its manifest and the number of new tokens."""
    tokenizer = load_tokenizer(config.tokenizer)
    worker = {"worker_index": config.worker_index, "worker_count": config.worker_count}
    source = Source(config.input, config.dataset, config.remote_name, config.text_column, **worker)
    fingerprints = source.fingerprints()
    files = InputFiles({name: fingerprints[name] for name in source.share(list(fingerprints))})
    settings = {
        "format_version": 2,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "source": source.name,
        "files_digest": digest_of(fingerprints) if fingerprints else None,
        "text_column": config.text_column,
        **worker,
        "shard_size": config.shard_size,
        "format": config.format,
        "val_fraction": config.val_fraction,
    }
    with output_folder(config.local_dir):
        sharder = Sharder(config.local_dir, settings, config.max_shards, files)
        sharder.check_shards()
        if sharder.done:
            return sharder.manifest, 0
        sharder.check_room(source.known_tokens)
        sharder.reopen()
        before = sharder.tokens
        try:
            complete = not sharder.full and write_shards(config, source, files, sharder, tokenizer)
        except FileError as error:
            raise UserError(f"{error}{sharder.file_remedy(error.file)}") from error
        files.check_unchanged(config.local_dir)
        if complete and not sharder.manifest["documents"] and config.worker_count == 1:
            skipped = describe_skipped(sharder.manifest)
            raise UserError(f"{' '.join(source.name[:3])} holds no text; {skipped}")
        sharder.end(complete)
    return sharder.manifest, sharder.tokens - before


def describe_skipped(manifest: dict) -> str:
    """Return how many documents were skipped for which reason."""
    counts = ", ".join(f"{n:,} {why}" for why, n in manifest["skipped"].items())
    return f"skipped: {counts or 'none'}"


def describe_validation(manifest: dict) -> str:
    """Return how the validation tokens were chosen."""
    if not any(shard["split"] == "val" for shard in manifest["shards"]):
        return "none"
    if "held_out" in manifest:
        return "the tail of the last text, as the hash of the texts left a split without any"
    return f"{manifest['val_fraction']:g} of the documents, by hash"


def main(config: DataConfig) -> None:
    limits = (config.shard_size, config.num_workers, config.max_shards)
    if any(limit is not None and limit < 1 for limit in limits):
        raise UserError("--shard_size, --num_workers and --max_shards must be at least 1")
    if not 0 <= config.val_fraction < 1:
        raise UserError(f"--val_fraction {config.val_fraction} must be at least 0 and below 1")
    if not 0 <= config.worker_index < config.worker_count:
        raise UserError("--worker_index must be at least 0 and below --worker_count")
    began = time.time()
    if config.merge:
        if other := given_options(sys.argv[1:]) - {"merge", "local_dir"}:
            raise UserError(
                f"--merge keeps shards as they are: leave out --{min(other)}; it takes --local_dir"
            )
        manifest = merge(config.merge, config.local_dir)
        new = sum(shard["tokens"] for shard in manifest["shards"])
    else:
        manifest, new = prepare(config)
    report(config.local_dir, manifest, new, time.time() - began)


def report(folder: Path, manifest: dict, new: int, seconds: float) -> None:
    """Print what a folder holds after `new` tokens were written to it."""
    tokens, counts = {}, []
    for split in ("train", "val"):
        sizes = [shard["tokens"] for shard in manifest["shards"] if shard["split"] == split]
        tokens[split] = sum(sizes)
        counts.append(f"{sum(sizes):,} {split} tokens in {len(sizes)} shards")
    print(
        f"{folder}: {manifest['documents']:,} documents, {', '.join(counts)}; "
        f"validation: {describe_validation(manifest)}; {describe_skipped(manifest)}; "
        f"{'complete' if manifest['complete'] else 'stopped at --max_shards'}; "
        f"{new:,} tokens in {seconds:.1f} s ({new / seconds / 1e6:.2f} M/s)"
        f"{'' if new else ', as the shards were there already'}; see {MANIFEST}"
    )
    warn_of_split(manifest, tokens["train"], tokens["val"])
    if not tokens["val"] and (manifest["worker_count"] == 1 or not manifest["val_fraction"]):
        warn(f"there are no validation shards, which train.py needs: {validation_remedy(manifest)}")


def validation_remedy(manifest: dict) -> str:
    """Return what gives a folder without validation shards some."""
    if manifest["complete"] or "merged" in manifest or not manifest["val_fraction"]:
        return f"shard again with --val_fraction above {manifest['val_fraction']:g}"
    return "run the same command without --max_shards"


def warn_of_split(manifest: dict, train: int, val: int) -> None:
    """Warn if few documents have given a split far fewer or more tokens than were asked for."""
    val_fraction, share = manifest["val_fraction"], val / max(1, train + val)
    if val and val_fraction and val < FEW:
        fraction = FEW / (train + val)
        if "held_out" not in manifest:
            fraction = max(fraction, val_fraction * FEW / val)
        elif manifest["documents"] > 1:
            fraction = 1.0  # half of a short last text is all that can be held out
        fraction = math.ceil(100 * fraction) / 100
        give = f"give --val_fraction {fraction} or more, or " if fraction < 0.5 else ""
        warn(f"only {val:,} validation tokens: {give}name a longer text last in --input")
    elif share > max(0.2, 2 * val_fraction):
        warn(
            f"{share:.0%} of the tokens are for validation, because the documents are few: give "
            f"another --val_fraction than {val_fraction:g}, or more and shorter files"
        )


if __name__ == "__main__":
    run(main, DataConfig)
