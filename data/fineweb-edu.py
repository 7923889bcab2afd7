"""Stream text, tokenise it, write token shards: FineWeb-Edu from the hub, or local files.

    python data/fineweb-edu.py                                 # sample-10BT -> data/edu_fineweb10B
    python data/fineweb-edu.py --input books/ more.parquet --local_dir data/books

Killed at any moment and started again, it goes on from the last whole shard and ends with the same
bytes as if it had never been killed, with any number of workers.
"""

import hashlib
import os
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

from config import ConfigError, DataConfig, run
from data.shards import MANIFEST, DataError, ShardWriter, read_manifest, write_manifest
from data.tokenizer import Tokenizer, load_tokenizer

READERS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text", ".py": "text"}
TASK_CHARS = 250_000  # of text that one worker gets at a time
WAITING_CHARS = 50_000_000  # of text read ahead of the writer at the most
PIECE_CHARS = 1_000_000  # of a long document tokenised at a time
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


def open_source(config: DataConfig):
    """The documents as one streaming dataset with a single column "text"."""
    import datasets  # takes a second, so not before the command line is known to be right

    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # read_documents retries, and says so
    datasets.disable_progress_bars()
    if not config.input:
        stream = datasets.load_dataset(
            config.dataset, config.remote_name, split="train", streaming=True
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
    """Batches of texts, each with the state of the source before it; goes on from `state`.

    A failed read from the network is tried again with growing pauses; DataError when it stays so.
    """
    remote = not config.input or any("://" in name for name in config.input)
    failures = 0
    while True:
        try:
            source = open_source(config)
            if state is not None:
                source.load_state_dict(state)
            state = source.state_dict()
            texts, chars = [], 0
            for row in source:
                texts.append(row["text"])
                chars += len(row["text"] or "")
                if chars >= TASK_CHARS or len(texts) == 1000:
                    yield state, texts
                    state, texts, chars, failures = source.state_dict(), [], 0, 0
            if texts:
                yield state, texts
            return
        except DataError:
            raise
        except Exception as error:  # whatever datasets, its file systems and parsers raise
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            what = " ".join(config.input[:3]) or f"{config.dataset} {config.remote_name}"
            final = isinstance(error, ValueError | ImportError | MemoryError)
            if not remote or final or type(error).__name__ == "DatasetNotFoundError":
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
        tokens = np.concatenate([start, *map(tokenizer.encode, pieces(text))])
        share = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") / 2**64
        out.append(("val" if share < val_fraction else "train", tokens))
    return out


class Sharder:
    """The shards being written, and the manifest that says how to go on after them."""

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self.config, self.folder = config, config.local_dir
        settings = {
            "format_version": 1,
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "eot": tokenizer.eot,
            "source": list(config.input) or [config.dataset, config.remote_name],
            "shard_size": config.shard_size,
            "format": config.format,
            "val_fraction": config.val_fraction,
        }
        fresh = {"shards": [], "complete": False, "state": None, "documents": 0, "skipped": {}}
        self.manifest = read_manifest(self.folder)
        if self.manifest is None:
            foreign = [p for p in self.folder.iterdir() if p.suffix in (".npy", ".bin")]
            if foreign:
                raise DataError(
                    f"{self.folder} holds shards of another origin ({foreign[0].name}, "
                    f"no {MANIFEST}); train on them as they are, or give another --local_dir"
                )
            self.manifest = {**settings, **fresh}
            write_manifest(self.folder, self.manifest)
        for key, value in settings.items():
            if self.manifest.get(key) != value:
                raise DataError(
                    f"{self.folder} holds shards made with {key} {self.manifest.get(key)}, not "
                    f"{value}; give another --local_dir or empty that one"
                )
        state = self.manifest["state"] or {}
        self.open = {
            split: ShardWriter(
                self.folder, split, done["index"], f".{config.format}", done["tokens"]
            )
            for split, done in state.get("open", {}).items()
            if not self.done
        }

    @property
    def full(self) -> bool:
        """Nothing is left to read: the source has ended or max_shards are there."""
        allowed = self.config.max_shards
        return self.manifest["complete"] or (allowed is not None and self.train_shards >= allowed)

    @property
    def done(self) -> bool:
        """Nothing is left to do: full, and the short shards it ended with are in their places."""
        unfinished = (self.manifest["state"] or {}).get("open", {})
        names = {f"{s}_{o['index']:06d}.{self.config.format}" for s, o in unfinished.items()}
        listed = {s["file"] for s in self.manifest["shards"]}
        in_place = names <= listed and all((self.folder / name).exists() for name in names)
        return self.manifest["complete"] or (self.full and in_place)

    @property
    def train_shards(self) -> int:
        """Train shards of full size."""
        return sum(
            s["split"] == "train" and s["tokens"] == self.config.shard_size
            for s in self.manifest["shards"]
        )

    @property
    def tokens(self) -> int:
        return sum(w.tokens for w in self.open.values()) + sum(
            s["tokens"] for s in self.manifest["shards"]
        )

    def reopen(self) -> None:
        """Takes back the short shards that an earlier --max_shards ended with."""
        names = {writer.path.name for writer in self.open.values()}
        self.manifest["shards"] = [s for s in self.manifest["shards"] if s["file"] not in names]

    def write(self, split: str, tokens: np.ndarray, start: int, position: dict) -> bool:
        """Adds a document's tokens from `start` on. Whenever a shard is full, saves it with
        `position` and how much of this document is done; False when that was the last allowed."""
        while start < len(tokens):
            if split not in self.open:
                index = sum(s["split"] == split for s in self.manifest["shards"])
                self.open[split] = ShardWriter(self.folder, split, index, f".{self.config.format}")
            writer = self.open[split]
            part = tokens[start : start + self.config.shard_size - writer.tokens]
            writer.append(part)
            start += len(part)
            if writer.tokens == self.config.shard_size:
                self.manifest["shards"].append(self.open.pop(split).finish())
                self.save({**position, "tokens": start})
                if self.full:
                    return False
        return True

    def save(self, position: dict) -> None:
        """Writes the manifest: where the source is, and how far the unfinished shards are."""
        for writer in self.open.values():
            writer.sync()
        unfinished = {s: {"index": w.index, "tokens": w.tokens} for s, w in self.open.items()}
        self.manifest["state"] = {**position, "open": unfinished}
        write_manifest(self.folder, self.manifest)

    def end(self, complete: bool) -> None:
        """Finishes the shards that are not full; the saved state still knows them as open."""
        for split in sorted(self.open):
            self.manifest["shards"].append(self.open.pop(split).finish())
        self.manifest["complete"] = complete
        write_manifest(self.folder, self.manifest)


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
    if config.input:
        list_files(config.input)  # before anything is written
    tokenizer = load_tokenizer(config.tokenizer)
    began = time.time()
    try:
        config.local_dir.mkdir(parents=True, exist_ok=True)
        sharder = Sharder(config, tokenizer)
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
    sys.stdout.flush()
    os._exit(0)  # datasets' reader threads can hold up the interpreter's own exit
