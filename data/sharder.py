"""Resumable writing of documents to the shards of a folder, with a manifest of the progress."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.shards import header, inspect_shard, read_manifest, shard_paths, write_manifest
from utils.errors import UserError
from utils.files import check_space, sha256, sync_folder

PIECES = 10  # into which the held-out part of a single text is spread


@dataclass
class Document:
    """A text as it is written to the shards of a split."""

    split: str
    tokens: np.ndarray
    """Token ids, uint16 (n,), end of text first."""
    num_bytes: int
    """Size of the text in UTF-8, before a normalizer of the tokenizer changes it."""
    lost: str = ""
    """Characters of the text that the tokens do not give back."""


def hold_out(tokens: np.ndarray, num_held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide a document, end of text first, into train and validation tokens: the end of each of
    PIECES spans is held out, so that both sides hold all of its parts. End of text precedes every
    piece."""
    end_of_text, text = tokens[:1], tokens[1:]
    count = min(PIECES, num_held_out)
    size = num_held_out // count
    train, val = [], []
    for span in np.array_split(text, count):
        train += [end_of_text, span[:-size]]
        val += [end_of_text, span[-size:]]
    return np.concatenate(train), np.concatenate(val)


class ShardWriter:
    """Appends tokens to a temporary file after the first `start`; `finish` makes it the shard."""

    def __init__(self, folder: Path, split: str, index: int, suffix: str, start: int = 0) -> None:
        self.path = folder / f"{split}_{index:06d}{suffix}"
        self.split, self.tokens = split, start
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        if start and not self.temporary.exists():  # ended short, or was killed after the rename
            os.replace(self.path, self.temporary)
        self.file = open(self.temporary, "r+b" if start else "wb")
        self.file.truncate(len(header(suffix, 0)) + 2 * start)
        self.file.seek(0, os.SEEK_END)

    def append(self, tokens: np.ndarray) -> None:
        """Append uint16 tokens (n,)."""
        self.file.write(tokens.astype("<u2", copy=False).tobytes())
        self.tokens += len(tokens)

    def sync(self) -> int:
        """Flush the tokens to disk, so that they survive a crash; return their number."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return self.tokens

    def finish(self) -> dict:
        """Write the header, rename the file to its final name and return its manifest entry."""
        self.file.seek(0)
        self.file.write(header(self.path.suffix, self.tokens))
        self.sync()
        self.file.close()
        digest = sha256(self.temporary)
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)
        return {
            "file": self.path.name,
            "split": self.split,
            "tokens": self.tokens,
            "sha256": digest,
        }


class Sharder:
    """Appends documents to the train and val shards of a folder.

    `settings` are saved in the manifest, shard_size in tokens. Its "state" is where the next run
    continues: a position in the source, documents after it, tokens of the next one, and tokens of
    the shards that are not full. Raises UserError for shards of other settings or another origin.
    """

    def __init__(self, folder: Path, settings: dict, max_shards: int | None) -> None:
        self.folder, self.max_shards = folder, max_shards
        self.size, self.suffix = settings["shard_size"], f".{settings['format']}"
        self.open: dict[str, ShardWriter] = {}  # by split
        manifest = read_manifest(folder)
        advice = "give another --local_dir or empty that one"
        if manifest is None and shard_paths(folder):
            raise UserError(f"{folder} holds shards without a manifest; {advice}")
        if manifest is None or not (manifest["shards"] or manifest["complete"]):
            manifest = {
                **settings,
                "complete": False,
                "stopped": False,
                "documents": 0,
                "skipped": {},
                "bytes": {"train": 0, "val": 0},
                "lost_bytes": 0,
                "shards": [],
                "state": {"source": None, "documents": 0, "tokens": 0, "open": {}},
            }
            write_manifest(folder, manifest)
        self.manifest = manifest
        for key, value in settings.items():
            if manifest.get(key) != value:
                before = f"{manifest.get(key)!r:.99}"
                raise UserError(f"{folder} holds shards of {key} {before}; {advice}")
        for entry in manifest["shards"]:
            inspect_shard(folder / entry["file"])

    @property
    def full(self) -> bool:
        """True once max_shards train shards are full."""
        full = [s["split"] for s in self.manifest["shards"] if s["tokens"] == self.size]
        return self.max_shards is not None and full.count("train") >= self.max_shards

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards, unfinished ones included."""
        unfinished = sum(writer.tokens for writer in self.open.values())
        return unfinished + sum(s["tokens"] for s in self.manifest["shards"])

    def reopen(self, known_tokens: int | None) -> None:
        """Open the unfinished shards after the tokens that were saved; raise UserError if the disk
        lacks room for the rest of `known_tokens` or max_shards."""
        allowed = self.max_shards and self.max_shards * self.size
        total = min((n for n in (known_tokens, allowed) if n is not None), default=0)
        check_space(self.folder, 2 * (total - self.tokens), f"sharding {total:,} tokens")
        shards = [s for s in self.manifest["shards"] if s["tokens"] == self.size]
        self.manifest.update(shards=shards, stopped=False)
        write_manifest(self.folder, self.manifest)
        for split, tokens in self.manifest["state"]["open"].items():
            self.begin(split, tokens)

    def begin(self, split: str, start: int = 0) -> None:
        """Open the shard of a split that is next to get full, after its first `start` tokens."""
        index = sum(s["split"] == split for s in self.manifest["shards"])
        self.open[split] = ShardWriter(self.folder, split, index, self.suffix, start)

    def write(self, document: Document, start: int, position: dict) -> bool:
        """Append a document's tokens from `start` on; return False once the folder is full. When
        a shard gets full, save the manifest with `position` and the tokens written."""
        split, tokens = document.split, document.tokens
        while start < len(tokens):
            if split not in self.open:
                self.begin(split)
            part = tokens[start : start + self.size - self.open[split].tokens]
            self.open[split].append(part)
            end = start + len(part)
            self.count_bytes(document, start, end)
            start = end
            if self.open[split].tokens == self.size:
                self.manifest["shards"].append(self.open.pop(split).finish())
                unfinished = {name: writer.sync() for name, writer in self.open.items()}
                self.manifest["state"] = {**position, "tokens": start, "open": unfinished}
                write_manifest(self.folder, self.manifest)
                if self.full:
                    return False
        return True

    def count_bytes(self, document: Document, start: int, end: int) -> None:
        """Count the bytes of the text that tokens [start, end) of a document stand for: of a text
        that is cut, a share by its tokens, because a normalizer may have changed the text."""
        before, after = (document.num_bytes * i // len(document.tokens) for i in (start, end))
        self.manifest["bytes"][document.split] += after - before

    def write_last(
        self, document: Document, start: int, position: dict, val_fraction: float
    ) -> bool:
        """Append the last document from token `start` on. If a split is empty, hold out pieces of
        it: the larger of a tenth and `val_fraction` (0: nothing) of all tokens, at most half."""
        tokens, manifest = document.tokens, self.manifest
        splits = {document.split, *self.open, *(shard["split"] for shard in manifest["shards"])}
        if val_fraction and splits != {"train", "val"} and "held_out" not in manifest:
            share = int(val_fraction * (self.tokens - start + len(tokens)))
            manifest["held_out"] = min(max(len(tokens) // 10, share), len(tokens) // 2)
        if not manifest.get("held_out"):
            return self.write(document, start, position)
        train, val = hold_out(tokens, manifest["held_out"])
        # The position counts tokens of both, one after the other: a run continues in either.
        both = np.concatenate([train, val])
        num_bytes = document.num_bytes * len(train) // len(both)
        if start < len(train):
            if not self.write(Document("train", train, num_bytes), start, position):
                return False
        document = Document("val", both, document.num_bytes)
        return self.write(document, max(start, len(train)), position)

    def end(self, complete: bool) -> None:
        """Finish the shards that are not full; a later run can still continue them."""
        for split in sorted(self.open):
            self.manifest["shards"].append(self.open.pop(split).finish())
        self.manifest.update(complete=complete, stopped=not complete)
        write_manifest(self.folder, self.manifest)
