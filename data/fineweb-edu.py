"""Stream text, tokenise it, write token shards: FineWeb-Edu from the hub, or local files.

    python data/fineweb-edu.py                                 # sample-10BT -> data/edu_fineweb10B
    python data/fineweb-edu.py --input books/ more.parquet --local_dir data/books

Machines share the work by files, each with a folder of its own; these are then merged:

    python data/fineweb-edu.py --worker_index 0 --worker_count 4 --local_dir data/worker0
    python data/fineweb-edu.py --merge data/worker? --local_dir data/edu_fineweb10B

Killed at any moment and started again, it goes on from the last whole shard and ends with the same
bytes as if it had never been killed, with any number of threads.
"""

import hashlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # python puts data/ there instead

import numpy as np
from tqdm import tqdm

from config import ConfigError, DataConfig
from data.merge import merge
from data.sharder import Sharder, writing_to
from data.shards import MANIFEST
from data.source import Source
from data.tokenizer import Tokenizer, load_tokenizer
from utils.cli import run

WAITING_CHARS = 50_000_000  # of text read ahead of the writer at the most
PIECE_CHARS = 1_000_000  # of a long document tokenised at a time


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


def tokenised(
    config: DataConfig, source: Source, tokenizer: Tokenizer, state: dict | None
) -> Iterator[tuple]:
    """(source state, results of tokenise) of batch after batch, in order, made by the workers."""
    waiting: deque[tuple[dict, int, Future]] = deque()
    with ThreadPoolExecutor(config.num_workers) as workers:  # tiktoken releases the GIL
        try:
            for before, texts in source.read(state):
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


def shard(config: DataConfig, source: Source, sharder: Sharder, tokenizer: Tokenizer) -> bool:
    """Writes shards until the source ends (True) or max_shards are whole (False)."""
    manifest = sharder.manifest
    state = manifest["state"] or {"source": None, "documents": 0, "tokens": 0}
    skip, done = state["documents"], state["tokens"]
    total = config.max_shards and config.max_shards * config.shard_size
    bar = tqdm(total=total, initial=sharder.tokens, unit="tok", unit_scale=True, disable=None)
    for place, results in tokenised(config, source, tokenizer, state["source"]):
        for n, (split, tokens) in enumerate(results[skip:], skip):
            if tokens is None:
                manifest["skipped"][split] = manifest["skipped"].get(split, 0) + 1
                continue
            manifest["documents"] += done == 0
            bar.update(len(tokens) - done)
            if not sharder.write(split, tokens, done, {"source": place, "documents": n}):
                return False
            done = 0
        skip = 0
    return True


def prepare(config: DataConfig) -> tuple[dict, int]:
    """Shards what the folder lacks; gives its manifest, and how many tokens are new."""
    tokenizer = load_tokenizer(config.tokenizer)
    worker = {"worker_index": config.worker_index, "worker_count": config.worker_count}
    source = Source(config.input, config.dataset, config.remote_name, **worker)
    settings = {
        "format_version": 2,
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eot": tokenizer.eot,
        "source": source.name,
        "files_digest": source.digest(),
        **worker,
        "shard_size": config.shard_size,
        "format": config.format,
        "val_fraction": config.val_fraction,
    }
    with writing_to(config.local_dir):
        sharder = Sharder(config.local_dir, settings, config.max_shards)
        before = sharder.tokens
        if not sharder.done:
            sharder.check_room(source.tokens)
            sharder.reopen()
            before = sharder.tokens
            complete = False if sharder.full else shard(config, source, sharder, tokenizer)
            sharder.end(complete)
    return sharder.manifest, sharder.tokens - before


def main(config: DataConfig) -> None:
    if config.shard_size < 1 or config.num_workers < 1 or (config.max_shards or 1) < 1:
        raise ConfigError("--shard_size, --num_workers and --max_shards must be at least 1")
    if not 0 <= config.val_fraction < 1:
        raise ConfigError(f"--val_fraction {config.val_fraction} must be at least 0 and below 1")
    if not 0 <= config.worker_index < config.worker_count:
        raise ConfigError(
            f"--worker_index {config.worker_index} must be at least 0 and below --worker_count "
            f"{config.worker_count}"
        )
    began = time.time()
    if config.merge:
        manifest = merge(config.merge, config.local_dir)
        new = sum(shard["tokens"] for shard in manifest["shards"])
    else:
        manifest, new = prepare(config)
    seconds = time.time() - began
    skipped = ", ".join(f"{n:,} {why}" for why, n in manifest["skipped"].items()) or "none"
    by_split = {
        s: [x["tokens"] for x in manifest["shards"] if x["split"] == s] for s in ("train", "val")
    }
    counts = ", ".join(f"{sum(n):,} {s} tokens in {len(n)} shards" for s, n in by_split.items())
    print(
        f"{config.local_dir}: {manifest['documents']:,} documents, {counts}; skipped: {skipped}; "
        f"{'complete' if manifest['complete'] else 'stopped at --max_shards'}; "
        f"{new:,} tokens in {seconds:.1f} s ({new / seconds / 1e6:.2f} M/s); see {MANIFEST}"
    )


if __name__ == "__main__":
    run(main, DataConfig)
