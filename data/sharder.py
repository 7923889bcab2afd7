"""The shards of a run being written, and the manifest that says how to go on after them."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.shards import MANIFEST, DataError, ShardWriter, read_manifest, write_manifest
from utils.files import check_space

UNSPLIT = {"worker_index": 0, "worker_count": 1}  # in manifests that do not say
UNENDED = {"complete": False, "stopped": False}  # by the end of the source, by --max_shards


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps a second process from sharding into the folder, where its file system has locks."""
    if os.name != "posix":
        yield
        return
    import fcntl

    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is sharding into {folder}") from error
        except OSError:  # some network file systems have none
            pass
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it; what goes wrong with the disk becomes a DataError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be a folder: {error.strerror}") from error
    try:
        with locked(folder):
            yield
    except OSError as error:
        raise DataError(
            f"writing to {folder} failed ({error.strerror}); whole shards are safe: "
            "make room and run the same command again to continue"
        ) from error


def can_go_on(manifest: dict) -> bool:
    """Whether a manifest says where to go on, as Sharder.save writes it."""
    try:
        state = manifest["state"] or {"documents": 0, "tokens": 0, "open": {}}
        numbers = [manifest["documents"], state["documents"], state["tokens"]]
        numbers += [*manifest["skipped"].values()]
        numbers += [done[key] for done in state["open"].values() for key in ("index", "tokens")]
        splits = set(state["open"]) <= {"train", "val"}
    except (KeyError, TypeError, AttributeError):
        return False
    whole = all(type(n) is int and 0 <= n < 2**63 for n in numbers)
    return whole and splits and type(manifest.get("complete")) is bool


class Sharder:
    """Appends documents to the shards of a folder, train and val.

    `settings` go into the manifest: among them shard_size (tokens) and format ("npy" or "bin").
    Raises DataError if the folder holds shards made with other settings.
    """

    def __init__(self, folder: Path, settings: dict, max_shards: int | None) -> None:
        self.folder, self.max_shards = folder, max_shards
        self.size, self.suffix = settings["shard_size"], f".{settings['format']}"
        fresh = {"shards": [], "state": None, "documents": 0, "skipped": {}, **UNENDED}
        found = read_manifest(self.folder)
        if found is None:
            foreign = [p for p in self.folder.iterdir() if p.suffix in (".npy", ".bin")]
            if foreign:
                raise DataError(
                    f"{self.folder} holds shards of another origin ({foreign[0].name}, "
                    f"no {MANIFEST}); train on them as they are, or give another --local_dir"
                )
        if found is None or not (found["shards"] or found.get("complete")):  # nothing is there yet
            found = {**settings, **fresh}
            write_manifest(self.folder, found)
        self.manifest = {**UNSPLIT, **found}
        for key, value in settings.items():
            if key == "files_digest" and self.manifest.get(key) != value:
                raise DataError(
                    f"the files of --input are not those that {self.folder} was begun with (added, "
                    "removed, renamed or resized); give another --local_dir or empty that one"
                )
            if self.manifest.get(key) != value:
                raise DataError(
                    f"{self.folder} holds shards made with {key} {self.manifest.get(key)!a:.300}, "
                    f"not {value!a:.300}; give another --local_dir or empty that one"
                )
        if not can_go_on(self.manifest):
            raise DataError(f"{self.folder / MANIFEST} is damaged; shard into an empty folder")
        if "merged" in self.manifest and not self.full:
            raise DataError(
                f"{self.folder} was merged from {self.manifest['merged']} workers' folders and "
                "cannot go on; continue those and merge them into another folder"
            )
        self.open: dict[str, ShardWriter] = {}

    @property
    def full(self) -> bool:
        """Nothing is left to read: the source has ended or max_shards are there."""
        allowed = self.max_shards
        return self.manifest["complete"] or (allowed is not None and self.train_shards >= allowed)

    @property
    def done(self) -> bool:
        """Nothing is left to do: full, and the short shards it ended with are in their places."""
        names = self.unfinished
        listed = {s["file"] for s in self.manifest["shards"]}
        in_place = names <= listed and all((self.folder / name).exists() for name in names)
        ended = self.manifest.get("stopped") and in_place
        return self.manifest["complete"] or bool(self.full and ended)

    @property
    def unfinished(self) -> set[str]:
        """Names of the shards that were not full when the manifest was last saved."""
        shards = (self.manifest["state"] or {}).get("open", {}).items()
        return {f"{split}_{shard['index']:06d}{self.suffix}" for split, shard in shards}

    @property
    def train_shards(self) -> int:
        """Train shards of full size."""
        return sum(
            s["split"] == "train" and s["tokens"] == self.size for s in self.manifest["shards"]
        )

    @property
    def tokens(self) -> int:
        return sum(w.tokens for w in self.open.values()) + sum(
            s["tokens"] for s in self.manifest["shards"]
        )

    def check_room(self, tokens: int | None) -> None:
        """DataError if the disk lacks room for what is still to come, as far as that is known: of
        `tokens` in the source, or of max_shards, what the folder does not hold yet."""
        allowed = self.max_shards and self.max_shards * self.size
        total = min((n for n in (tokens, allowed) if n is not None), default=0)
        held = sum(p.stat().st_size for p in self.folder.iterdir() if self.suffix in p.suffixes)
        check_space(self.folder, 2 * total - held, f"sharding {total:,} tokens")

    def reopen(self) -> None:
        """Goes on with the shards that are not full, also if an earlier --max_shards ended with
        them; what a killed run had begun after these is gone."""
        shards = [s for s in self.manifest["shards"] if s["file"] not in self.unfinished]
        self.manifest.update(shards=shards, **UNENDED)
        write_manifest(self.folder, self.manifest)
        for path in self.folder.glob(f"*_??????{self.suffix}.tmp"):
            if path.stem not in self.unfinished:
                path.unlink()
        state = self.manifest["state"] or {}
        for split, at in state.get("open", {}).items():
            self.open[split] = ShardWriter(
                self.folder, split, at["index"], self.suffix, at["tokens"]
            )

    def write(self, split: str, tokens: np.ndarray, start: int, position: dict) -> bool:
        """Adds a document's tokens from `start` on. Whenever a shard is full, saves it with
        `position` and how much of this document is done; False when that was the last allowed."""
        while start < len(tokens):
            if split not in self.open:
                index = sum(s["split"] == split for s in self.manifest["shards"])
                check_space(self.folder, 2 * self.size, f"shard {split}_{index:06d}{self.suffix}")
                self.open[split] = ShardWriter(self.folder, split, index, self.suffix)
            writer = self.open[split]
            part = tokens[start : start + self.size - writer.tokens]
            writer.append(part)
            start += len(part)
            if writer.tokens == self.size:
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
        self.manifest.update(complete=complete, stopped=not complete)
        write_manifest(self.folder, self.manifest)
