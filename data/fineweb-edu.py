"""Stream text, tokenise it, write token shards: FineWeb-Edu from the hub, or local files.

    python data/fineweb-edu.py                                 # sample-10BT -> data/edu_fineweb10B
    python data/fineweb-edu.py --input books/ more.parquet --local_dir data/books

Killed at any moment and started again, it goes on from the last whole shard and ends with the same
bytes as if it had never been killed, with any number of workers.
"""

import hashlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python puts data/ there instead

import numpy as np
from tqdm import tqdm

from cli import run
from config import ConfigError, DataConfig
from data.sharder import Sharder, locked
from data.shards import MANIFEST, DataError
from data.tokenizer import Tokenizer, load_tokenizer

READERS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text", ".py": "text"}
TASK_CHARS = 250_000  # of text that one worker gets at a time
WAITING_CHARS = 50_000_000  # of text read ahead of the writer at the most
PIECE_CHARS = 1_000_000  # of a long document tokenised at a time
FINAL = (  # errors of the hub that trying again does not mend
    "DatasetNotFoundError",
    "DataFilesNotFoundError",
    "RepositoryNotFoundError",
    "GatedRepoError",
    "OfflineModeIsEnabled",
)
RETRIES = 6  # after a failed read from the network, waiting 1, 2, 4, ... seconds


def list_files(inputs: tuple[str, ...]) -> list[str]:
    """Files and URLs of `inputs` in order, folders searched in name order; not hidden files, nor
    the packages installed beside a standard library."""
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            inside = (p.relative_to(path) for p in sorted(path.rglob("*")) if p.suffix in READERS)
            shown = [
                p for p in inside if not any(x[0] == "." or x == "site-packages" for x in p.parts)
            ]
            files += [str(path / p) for p in shown if (path / p).is_file()]
        elif "://" in name or path.is_file():
            files.append(name)
        else:
            raise DataError(f"--input {name} does not exist")
    if not files:
        raise DataError(f"--input {' '.join(inputs)} holds no {', '.join(READERS)} files")
    return files


def digest_of(files: list[str]) -> str:
    """Changes when a file is added, removed, renamed or resized."""
    sizes = [(f, Path(f).stat().st_size if Path(f).is_file() else None) for f in files]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()


def hub_revision(config: DataConfig) -> str | None:
    """The dataset's newest commit on the hub, None for what does not come from there."""
    if config.input or Path(config.dataset).exists():
        return None
    from huggingface_hub import HfApi

    return HfApi().dataset_info(config.dataset).sha


def open_source(config: DataConfig, revision: str | None):
    """The documents as one streaming dataset with a single column "text"."""
    import datasets  # takes a second, so not before the command line is known to be right

    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # read_documents retries, and says so
    datasets.disable_progress_bars()
    if not config.input:
        stream = datasets.load_dataset(
            config.dataset, config.remote_name, split="train", streaming=True, revision=revision
        )
        return stream.select_columns(["text"])
    options = {"text": {"sample_by": "document", "encoding_errors": "replace"}}
    parts = []
    for reader, files in groupby(
        list_files(config.input), lambda f: READERS.get(Path(f).suffix, "text")
    ):
        part = datasets.load_dataset(
            reader, data_files=list(files), split="train", streaming=True, **options.get(reader, {})
        )
        parts.append(part.select_columns(["text"]))
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def read_documents(config: DataConfig, state: dict | None) -> Iterator[tuple[dict, list]]:
    """Batches of texts, each with the state of the source before it; goes on from `state`, at the
    same commit of the dataset.

    A failed read from the network is tried again with growing pauses; DataError when it stays so.
    """
    remote = not config.input or any("://" in name for name in config.input)
    revision, place = (state["revision"], state["place"]) if state else (None, None)
    failures = 0
    while True:
        try:
            revision = revision or hub_revision(config)
            source = open_source(config, revision)
            if place is not None:
                source.load_state_dict(place)
            place, texts, chars = source.state_dict(), [], 0
            for row in source:
                texts.append(row["text"])
                chars += len(row["text"] or "")
                if chars >= TASK_CHARS or len(texts) == 1000:
                    yield {"revision": revision, "place": place}, texts
                    place, texts, chars, failures = source.state_dict(), [], 0, 0
            if texts:
                yield {"revision": revision, "place": place}, texts
            return
        except DataError:
            raise
        except Exception as error:  # whatever datasets, its file systems and parsers raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            what = " ".join(config.input[:3]) or f"{config.dataset} {config.remote_name}"
            final = isinstance(error, ValueError | ImportError | MemoryError)
            if not remote or final or type(error).__name__ in FINAL:
                raise DataError(f"{what} cannot be read ({reason[:300]})") from error
            failures += 1
            if failures > RETRIES:
                raise DataError(
                    f"reading {what} failed {failures} times ({reason[:300]}); whole shards are "
                    "safe: run the same command again to continue"
                ) from error
            print(
                f"read failed ({reason[:120]}), again in {2 ** (failures - 1)} s", file=sys.stderr
            )
            time.sleep(2 ** (failures - 1))


def pieces(text: str) -> Iterator[str]:
    """A long document cut where GPT-2's tokenizer cuts too, before white space that follows
    something else, so that the tokens of the pieces are those of the whole."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = start + PIECE_CHARS
        while end < len(text) and not (text[end].isspace() and not text[end - 1].isspace()):
            end += 1
        yield text[start:end]
        start = end
    yield text[start:]


def tokenise(tokenizer: Tokenizer, val_fraction: float, texts: list) -> list:
    """For each text its split and tokens, end of text first; or why it is left out, and None."""
    out = []
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            out.append(("empty", None))
            continue
        try:
            raw = text.encode()
        except UnicodeEncodeError:
            out.append(("not valid Unicode", None))
            continue
        start = np.array([tokenizer.eot], np.uint16)
        try:
            tokens = np.concatenate([start, *map(tokenizer.encode, pieces(text))])
        except ValueError:  # tiktoken gives up on a million spaces in a row
            out.append(("not tokenisable", None))
            continue
        share = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") / 2**64
        out.append(("val" if share < val_fraction else "train", tokens))
    return out


def tokenised(config: DataConfig, tokenizer: Tokenizer, state: dict | None) -> Iterator[tuple]:
    """(source state, results of tokenise) of batch after batch, in order, made by the workers."""
    waiting: deque[tuple[dict, int, Future]] = deque()
    with ThreadPoolExecutor(config.num_workers) as workers:  # tiktoken releases the GIL
        try:
            for before, texts in read_documents(config, state):
                task = workers.submit(tokenise, tokenizer, config.val_fraction, texts)
                waiting.append((before, sum(len(text or "") for text in texts), task))
                while (
                    len(waiting) > 3 * config.num_workers
                    or sum(chars for _, chars, _ in waiting) > WAITING_CHARS
                ):
                    before, _, task = waiting.popleft()
                    yield before, task.result()
            for before, _, task in waiting:
                yield before, task.result()
        finally:
            workers.shutdown(cancel_futures=True)


def shard(config: DataConfig, sharder: Sharder, tokenizer: Tokenizer) -> bool:
    """Writes shards until the source ends (True) or max_shards are whole (False)."""
    manifest = sharder.manifest
    state = manifest["state"] or {"source": None, "documents": 0, "tokens": 0}
    skip, done = state["documents"], state["tokens"]
    total = config.max_shards and config.max_shards * config.shard_size
    bar = tqdm(total=total, initial=sharder.tokens, unit="tok", unit_scale=True, disable=None)
    for source, results in tokenised(config, tokenizer, state["source"]):
        for n, (split, tokens) in enumerate(results[skip:], skip):
            if tokens is None:
                manifest["skipped"][split] = manifest["skipped"].get(split, 0) + 1
                continue
            manifest["documents"] += done == 0
            bar.update(len(tokens) - done)
            if not sharder.write(split, tokens, done, {"source": source, "documents": n}):
                return False
            done = 0
        skip = 0
    return True


def main(config: DataConfig) -> None:
    if config.shard_size < 1 or config.num_workers < 1 or (config.max_shards or 1) < 1:
        raise ConfigError("--shard_size, --num_workers and --max_shards must be at least 1")
    if not 0 <= config.val_fraction < 1:
        raise ConfigError(f"--val_fraction {config.val_fraction} must be at least 0 and below 1")
    tokenizer = load_tokenizer(config.tokenizer)
    settings = {
        "format_version": 2,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "source": list(config.input) or [config.dataset, config.remote_name],
        "files_digest": digest_of(list_files(config.input)) if config.input else None,
        "shard_size": config.shard_size,
        "format": config.format,
        "val_fraction": config.val_fraction,
    }
    began = time.time()
    try:
        config.local_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{config.local_dir} cannot be a folder: {error.strerror}") from error
    try:
        with locked(config.local_dir):
            sharder = Sharder(config.local_dir, settings, config.max_shards)
            before = sharder.tokens
            if not sharder.done:
                sharder.reopen()
                before = sharder.tokens
                complete = False if sharder.full else shard(config, sharder, tokenizer)
                sharder.end(complete)
    except OSError as error:
        raise DataError(
            f"writing to {config.local_dir} failed ({error.strerror}); whole shards are safe: "
            "make room and run the same command again to continue"
        ) from error
    manifest, seconds = sharder.manifest, time.time() - began
    skipped = ", ".join(f"{n:,} {why}" for why, n in manifest["skipped"].items()) or "none"
    by_split = {
        s: [x["tokens"] for x in manifest["shards"] if x["split"] == s] for s in ("train", "val")
    }
    counts = ", ".join(f"{sum(n):,} {s} tokens in {len(n)} shards" for s, n in by_split.items())
    print(
        f"{config.local_dir}: {manifest['documents']:,} documents, {counts}; skipped: {skipped}; "
        f"{'complete' if manifest['complete'] else 'stopped at --max_shards'}; "
        f"{sharder.tokens - before:,} tokens in {seconds:.1f} s "
        f"({(sharder.tokens - before) / seconds / 1e6:.2f} M/s); see {MANIFEST}"
    )


if __name__ == "__main__":
    run(main, DataConfig)
