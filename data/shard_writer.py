"""ShardWriter: writes a shard that appears under its name only when it is whole."""

import os
from pathlib import Path

import numpy as np

from data.shards import header
from utils.errors import UserError
from utils.files import sha256, sync_folder


class ShardWriter:
    """Appends tokens to a temporary file, which `finish` renames to the shard.

    With `start`, continues an unfinished shard of an earlier run after its first `start` tokens.
    """

    def __init__(self, folder: Path, split: str, index: int, suffix: str, start: int = 0) -> None:
        self.path = folder / f"{split}_{index:06d}{suffix}"
        self.split, self.index, self.tokens = split, index, start
        self.temporary = self.path.with_name(self.path.name + ".tmp")
        if start and not self.temporary.exists():  # ended short, or was killed after the rename
            if not self.path.exists():
                raise UserError(f"unfinished {self.path} is missing; shard into an empty folder")
            os.replace(self.path, self.temporary)
        size = len(header(suffix, 0)) + 2 * start
        if start and self.temporary.stat().st_size < size:
            raise UserError(f"{self.temporary} has lost tokens; shard into an empty folder")
        self.file = open(self.temporary, "r+b" if start else "wb")
        self.file.truncate(size)
        self.file.seek(size)

    def append(self, tokens: np.ndarray) -> None:
        """Append uint16 tokens (n,)."""
        self.file.write(tokens.astype("<u2", copy=False).tobytes())
        self.tokens += len(tokens)

    def sync(self) -> None:
        """Flush the appended tokens to disk, so that they survive a crash."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def finish(self) -> dict:
        """Write the header, rename the file to its final name and return its manifest entry."""
        self.file.seek(0)
        self.file.write(header(self.path.suffix, self.tokens))
        self.sync()
        self.file.close()
        entry = {"file": self.path.name, "split": self.split, "tokens": self.tokens}
        entry["sha256"] = sha256(self.temporary)
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)
        return entry
