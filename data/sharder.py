"""Resumable writing of documents to the shards of a folder, with a manifest of the progress."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.input_files import InputFiles, is_record
from data.shard_writer import ShardWriter
from data.shards import (
    MANIFEST,
    inspect_shard,
    is_count,
    read_manifest,
    shard_paths,
    write_manifest,
)
from utils.errors import UserError
from utils.files import check_space, lock_folder

# defaults for manifests without these
DEFAULTS = {"worker_index": 0, "worker_count": 1, "text_column": "text"}
ORIGIN = ("source", "files_digest")  # settings that tell where the text comes from
# complete: the source has ended; stopped: max_shards are full
IN_PROGRESS = {"complete": False, "stopped": False}
INITIAL_STATE = {"source": None, "documents": 0, "tokens": 0, "open": {}}  # state of a new folder


def describe_difference(found: list[str], source: list[str]) -> str:
    """Return a clause on shards made of `found`, names of inputs or of a dataset, not `source`."""
    lacking, new = ([x for x in a if x not in b] for a, b in ((found, source), (source, found)))
    parts = [
        (len(names), kind, str(names[0]))
        for names, kind in ((lacking, "fewer"), (new, "more"))
        if names
    ]
    listed = ", ".join(f"{count} {kind} ({name:.100})" for count, kind, name in parts)
    return f"of another --input or dataset: this one has {listed or 'another order'}"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raise UserError if another process shards into it."""
    fd = lock_folder(folder, "sharding into")
    try:
        yield
    finally:
        if fd is not None:
            os.close(fd)


@contextlib.contextmanager
def output_folder(folder: Path) -> Iterator[None]:
    """Make and lock a folder; turn disk errors inside the context into UserError."""
    try:
        with locked(folder):
            yield
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{error.filename or folder} is a file; give a folder") from error
    except OSError as error:
        raise UserError(
            f"writing to {folder} failed ({error.strerror}); whole shards are safe: "
            "free disk space or correct this, and run the same command again to continue"
        ) from error


def is_resumable(manifest: dict) -> bool:
    """Return True if a manifest holds a valid position to continue from, as Sharder.save writes."""
    try:
        state = manifest["state"] or INITIAL_STATE
        counts = [manifest["documents"], state["documents"], state["tokens"]]
        counts += manifest["skipped"].values()
        counts += [at[key] for at in state["open"].values() for key in ("index", "tokens")]
        valid = set(state["open"]) <= {"train", "val"} and type(manifest["complete"]) is bool
        valid &= state.get("read") is None or is_record(state["read"])
    except (KeyError, TypeError, AttributeError):
        return False
    return valid and all(map(is_count, counts))


class Sharder:
    """Appends documents to the train and val shards of a folder.

    `settings` are saved in the manifest, among them shard_size (tokens) and format ("npy" or
    "bin"); `files` are those of a local source. Raises UserError if the folder holds shards with
    other settings, of other files or of another origin.
    """

    def __init__(
        self,
        folder: Path,
        settings: dict,
        max_shards: int | None,
        files: InputFiles | None = None,
    ) -> None:
        self.folder, self.max_shards, self.files = folder, max_shards, files
        self.size, self.suffix = settings["shard_size"], f".{settings['format']}"
        self.open: dict[str, ShardWriter] = {}  # by split
        found = read_manifest(folder)
        if found is None and (foreign := shard_paths(folder)):
            raise UserError(
                f"{folder} holds shards of another origin ({foreign[0].name}, no {MANIFEST}); "
                "train on them without sharding, or give another --local_dir"
            )
        if found is None or not (found["shards"] or found.get("complete")):
            fresh = {"shards": [], "state": None, "documents": 0, "skipped": {}, **IN_PROGRESS}
            found = {**settings, **fresh}
            write_manifest(folder, found)
        self.manifest = {**DEFAULTS, **found}
        self.check_manifest(settings)
        self.adopt_files(settings)

    def check_manifest(self, settings: dict) -> None:
        """Raise UserError unless the manifest has these settings and can be continued."""
        other = "give another --local_dir or empty that one"
        for key, value in settings.items():
            found = self.manifest.get(key)
            if found != value and key not in ORIGIN:
                made = f"made with {key} {found!a:.300}, not {value!a:.300}"
                raise UserError(f"{self.folder} holds shards {made}; {other}")
        if not is_resumable(self.manifest):
            raise UserError(f"{self.folder / MANIFEST} is damaged; shard into an empty folder")
        same = all(self.manifest.get(key) == settings.get(key) for key in ORIGIN)
        if not same and not self.has_read_files():
            made = "of files that are not those of --input, or were changed since; restore these"
            if (found := self.manifest.get("source")) != settings["source"]:
                made = describe_difference(found or [], settings["source"])
            raise UserError(f"{self.folder} holds shards {made}; {other}")
        if "merged" in self.manifest and not self.full:
            raise UserError(
                f"{self.folder} was merged from {self.manifest['merged']} workers' folders and "
                "cannot be continued; continue those and merge them into another folder"
            )

    def has_read_files(self) -> bool:
        """Return whether the files of this run are those that the shards are made of: all of them
        once the source has ended, else the ones that were read. Their folder may be another."""
        if self.files is None or not self.files.names:
            return False  # a dataset of the hub is known by its name
        if self.manifest.get("share_digest") == self.files.digest:
            return True
        ended = self.manifest["complete"] or "held_out" in self.manifest
        read, column = self.state.get("read"), self.manifest["text_column"]
        return not ended and read is not None and self.files.begin_with(read, column)

    def adopt_files(self, settings: dict) -> None:
        """Write into the manifest which files this run has, as those not yet read may be others."""
        if self.files is not None and "merged" not in self.manifest:
            origin = {key: settings[key] for key in ORIGIN}
            self.manifest |= {**origin, "share_digest": self.files.digest}
            write_manifest(self.folder, self.manifest)

    def file_remedy(self, file: int) -> str:
        """Return what to do about a file that cannot be read, as the end of a sentence."""
        read = self.state.get("read")
        if read and file == read["file"]:
            return (
                f"; {read['documents']:,} of its documents are in shards already: repair it so "
                "that it begins with these and run the same command again, or shard into an empty "
                "folder"
            )
        # without a file, several workers would divide the others in another way
        remove = "" if self.manifest["worker_count"] > 1 else " or remove"
        return f"; repair{remove} it and run the same command again to continue"

    @property
    def state(self) -> dict:
        """Position in the source and in the unfinished shards when the manifest was last saved."""
        return self.manifest["state"] or INITIAL_STATE

    @property
    def unfinished(self) -> set[str]:
        """File names of the shards that were not full when the manifest was last saved."""
        names = self.state["open"].items()
        return {f"{split}_{at['index']:06d}{self.suffix}" for split, at in names}

    @property
    def full(self) -> bool:
        """True once the source has ended or max_shards train shards are full."""
        if self.manifest["complete"] or self.max_shards is None:
            return self.manifest["complete"]
        shards = [(s["split"], s["tokens"]) for s in self.manifest["shards"]]
        return shards.count(("train", self.size)) >= self.max_shards

    @property
    def done(self) -> bool:
        """True once no tokens are left to write and all shards have their final names."""
        shards = self.manifest["shards"]
        in_place = all((self.folder / shard["file"]).exists() for shard in shards)
        stopped = self.full and self.manifest.get("stopped", False) and in_place
        return self.manifest["complete"] or stopped

    def check_shards(self) -> None:
        """Raise UserError if a finished shard of the manifest is missing or has another size."""
        unfinished = set() if self.done else self.unfinished
        for entry in self.manifest["shards"]:
            path = self.folder / entry["file"]
            if path.name in unfinished:
                continue
            if not path.exists() or inspect_shard(path).tokens != entry["tokens"]:
                raise UserError(
                    f"{path} is missing or not as {MANIFEST} says: copy it again, or remove "
                    f"{self.folder} and run this command again"
                )

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards, unfinished ones included."""
        finished = sum(s["tokens"] for s in self.manifest["shards"])
        return finished + sum(writer.tokens for writer in self.open.values())

    def check_room(self, known_tokens: int | None) -> None:
        """Raise UserError if the disk lacks room for the known rest of the source or max_shards."""
        allowed = self.max_shards and self.max_shards * self.size
        total = min((n for n in (known_tokens, allowed) if n is not None), default=0)
        held = sum(p.stat().st_size for p in self.folder.iterdir() if self.suffix in p.suffixes)
        check_space(self.folder, 2 * total - held, f"sharding {total:,} tokens")

    def reopen(self) -> None:
        """Open the unfinished shards to continue them; delete what was written after the save."""
        shards = [s for s in self.manifest["shards"] if s["file"] not in self.unfinished]
        self.manifest.update(shards=shards, **IN_PROGRESS)
        write_manifest(self.folder, self.manifest)
        for path in self.folder.glob(f"*_??????{self.suffix}.tmp"):
            if path.stem not in self.unfinished:
                path.unlink()
        for split, at in self.state["open"].items():
            writer = ShardWriter(self.folder, split, at["index"], self.suffix, at["tokens"])
            self.open[split] = writer

    def write(self, split: str, tokens: np.ndarray, start: int, position: dict) -> bool:
        """Append a document's tokens from `start` on; return False once the folder is full.

        Whenever a shard gets full, saves the manifest with `position` and the tokens written.
        """
        while start < len(tokens):
            if split not in self.open:
                index = sum(s["split"] == split for s in self.manifest["shards"])
                what = f"a shard ({split}_{index:06d}{self.suffix}) of --shard_size {self.size}"
                check_space(self.folder, 2 * self.size, what)
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

    def needs_tail(self, split: str) -> bool:
        """Return whether a split would have no text with the last one, which is for `split`."""
        written = {split, *self.open, *(shard["split"] for shard in self.manifest["shards"])}
        return "held_out" in self.manifest or written != {"train", "val"}

    def write_with_tail(
        self, tokens: np.ndarray, start: int, position: dict, val_fraction: float
    ) -> bool:
        """Write the last text from token `start` on, its tail for validation: a tenth of it, or
        val_fraction of all tokens if that is more, but at most half. Returns as `write` does."""
        if "held_out" not in self.manifest:
            total = self.tokens - start + len(tokens)
            tail = max(len(tokens) // 10, int(val_fraction * total))
            self.manifest["held_out"] = min(tail, len(tokens) // 2)
        cut = len(tokens) - self.manifest["held_out"]
        if start < cut and not self.write("train", tokens[:cut], start, position):
            return False
        both = np.concatenate([tokens[:cut], tokens[:1], tokens[cut:]])  # end of text before each
        return self.write("val", both, max(start, cut), position)

    def save(self, position: dict) -> None:
        """Write the manifest with the position in the source and in the unfinished shards."""
        for writer in self.open.values():
            writer.sync()
        unfinished = {s: {"index": w.index, "tokens": w.tokens} for s, w in self.open.items()}
        self.manifest["state"] = {**position, "open": unfinished}
        write_manifest(self.folder, self.manifest)

    def end(self, complete: bool) -> None:
        """Finish the shards that are not full; a later run can still continue them."""
        for split in sorted(self.open):
            self.manifest["shards"].append(self.open.pop(split).finish())
        self.manifest.update(complete=complete, stopped=not complete)
        write_manifest(self.folder, self.manifest)
