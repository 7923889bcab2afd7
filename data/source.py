"""Sources of text: a dataset of the Hugging Face hub, or files, streamed in batches."""

import csv
import gzip
import lzma
import os
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data.documents import ROWS, DocumentStream, Place
from data.input_files import fingerprint
from data.text_files import COMPRESSIONS, is_text, suffixes
from utils.errors import UserError

IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # formats that are read in folders, too
EXCLUDED = re.compile(r"/(\.|site-packages/)")  # hidden files and folders, installed packages
SAMPLES = {"sample-10BT": 10**10, "sample-100BT": 10**11, "sample-350BT": 35 * 10**10}  # tokens
SAMPLED = ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb")
BATCH_CHARS, BATCH_TEXTS = 250_000, 1000  # a batch ends when it reaches one of these
# names of the hub's errors after which a retry is pointless
PERMANENT = re.compile("(Dataset|DataFiles|Repository)NotFound|GatedRepo|OfflineModeIsEnabled")
DAMAGED = (csv.Error, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
RETRIES = 6  # after failed downloads, with pauses of 1, 2, 4, ... seconds


def list_files(inputs: tuple[str, ...]) -> tuple[list[str], list[Path]]:
    """Return the files and URLs of `inputs` in order, with those inside folders in name order, and
    the files of the folders that are of other formats. EXCLUDED ones are in neither.

    Raises UserError if there is no file, or for a named file that is of another format.
    """
    files: list[str] = []
    others: list[Path] = []
    for name in inputs:
        path = Path(name)
        if not name:
            raise UserError("--input '' does not exist")
        if "://" in name:
            files.append(name)
        elif path.is_file():
            check_format(name)
            files.append(name)
        elif path.is_dir():
            for p in walk(path):
                known = suffixes(p.name)[0] in IN_FOLDERS and p.is_file()
                files.append(str(p)) if known else others.append(p)
        elif path.exists():
            raise UserError(f"--input {name} is neither a file nor a folder; write it to a file")
        else:
            hint = "; the shell expands patterns where they are not quoted" if "*" in name else ""
            raise UserError(f"--input {name} does not exist{hint}")
    if not files:
        kinds = f"{', '.join(IN_FOLDERS)} files, also as {', '.join(COMPRESSIONS)}"
        held = f"; it holds {count_suffixes(others)}; name files to read them" if others else ""
        raise UserError(f"--input {' '.join(inputs)} holds no {kinds}{held}")
    return drop_repeated(files), others


def walk(folder: Path) -> list[Path]:
    """Return what is below a folder but no folder, in name order; follows links to folders, each
    once, and leaves out EXCLUDED ones. Raises UserError for a folder that cannot be read."""

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"--input {error.filename} cannot be read: {error.strerror}") from error

    found: list[Path] = []
    seen: set[Path] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := Path(parent).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(x for x in folders if not EXCLUDED.search(f"/{x}/"))
        found += [Path(parent, x) for x in names if not EXCLUDED.search(f"/{x}")]
    return sorted(found)


def drop_repeated(files: list[str]) -> list[str]:
    """Return the names without further names of one file, whose text would be read twice."""
    first: dict[object, str] = {}
    for name in files:
        first.setdefault(name if "://" in name else Path(name).resolve(), name)
    return list(first.values())


def check_format(name: str) -> None:
    """Raise UserError for a file that is neither of a known format nor text."""
    kind, compression = suffixes(name)
    if kind == ".parquet" and compression:
        raise UserError(f"--input {name}: decompress it; parquet is compressed inside")
    try:
        known = kind in (".parquet", *ROWS) or is_text(name)
    except Exception as error:  # of a decompressor
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"--input {name} cannot be read ({reason})") from error
    if not known:
        formats = ", ".join((".parquet", *ROWS))
        raise UserError(f"--input {name} is neither text nor {formats}; unpack or convert it first")


def count_suffixes(paths: list[Path]) -> str:
    """Return how many files have which suffix: "3 .jpg, 1 .pdf"."""
    counts = Counter(path.suffix.lower() or "without a suffix" for path in paths)
    most = [f"{count:,} {suffix}" for suffix, count in counts.most_common(8)]
    return ", ".join(most + ["others"] * (len(counts) > 8))


@dataclass(frozen=True)
class Source:
    """Files of `inputs`, or configuration `remote_name` of the hub's `dataset` if there are none.

    Worker i of n reads every n-th file, from the i-th on.
    """

    inputs: tuple[str, ...]
    dataset: str
    remote_name: str
    text_column: str = "text"
    worker_index: int = 0
    worker_count: int = 1

    @property
    def name(self) -> list[str]:
        """Name of the source in the manifest."""
        return list(self.inputs) or [self.dataset, self.remote_name]

    @property
    def known_tokens(self) -> int | None:
        """Number of GPT-2 tokens (bytes give more), None if unknown, as for a worker's share."""
        whole = self.dataset in SAMPLED and not self.inputs and self.worker_count == 1
        return SAMPLES.get(self.remote_name) if whole else None

    def check_share(self, files: int) -> None:
        """Raise UserError if there are too few files for this worker to get one."""
        if self.worker_index >= files:
            raise UserError(
                f"--worker_index {self.worker_index} of --worker_count {self.worker_count} has "
                f"nothing to read: {' '.join(self.name[:3])} is {files} files; lower "
                f"--worker_count to {files} for all workers"
            )

    def fingerprints(self) -> dict[str, tuple[int, int] | None]:
        """Return the fingerprints of the files and URLs of all workers, none for a dataset of the
        hub, and tell which files are left out. Raises UserError if this worker gets none."""
        if not self.inputs:
            return {}
        files, others = list_files(self.inputs)
        if others:
            print(f"left out: {count_suffixes(others)}; name a file to read it", file=sys.stderr)
        self.check_share(len(files))
        return {name: fingerprint(name) for name in files}

    def share(self, files: list[str]) -> list[str]:
        """Return this worker's part of all files."""
        return files[self.worker_index :: self.worker_count]

    def newest_commit(self) -> str | None:
        """Return the newest commit of the dataset on the hub, None for local text."""
        if self.inputs or Path(self.dataset).exists():
            return None
        from huggingface_hub import HfApi

        return HfApi().dataset_info(self.dataset).sha

    def open_stream(self, commit: str | None):
        """Return this worker's documents: rows of a streaming dataset, or texts of files."""
        if self.inputs:
            return DocumentStream(self.share(list_files(self.inputs)[0]), self.text_column)
        import datasets  # slow to import, so only after the command line is checked

        datasets.config.STREAMING_READ_MAX_RETRIES = 1  # `batches` retries, with a message
        datasets.disable_progress_bars()
        name, options = (self.dataset, self.remote_name), {"split": "train", "streaming": True}
        stream = datasets.load_dataset(*name, revision=commit, **options)
        self.check_share(stream.num_shards)  # number of files
        share = stream.shard(self.worker_count, self.worker_index, contiguous=False)
        return share.select_columns([self.text_column])

    def batches(
        self, state: dict | None
    ) -> Iterator[tuple[dict, list[str | None], list[Place | str]]]:
        """Yield batches: the state before it, from which it can be read again; its texts, None for
        a row without text; and the place of each text, of the hub only for messages.

        Continues from `state` at the same commit of the dataset. Retries failed downloads with
        growing pauses; raises UserError if they keep failing.
        """
        commit, place = (state["revision"], state["place"]) if state else (None, None)
        failures = 0
        while True:
            try:
                commit = commit or self.newest_commit()
                stream = self.open_stream(commit)
                if place is not None:
                    stream.load_state_dict(place)
                place, texts, origins, chars = stream.state_dict(), [], [], 0
                for row in stream:
                    text = row if self.inputs else row[self.text_column]
                    origins.append(stream.place if self.inputs else " ".join(self.name))
                    texts.append(text if isinstance(text, str) else None)
                    chars += len(texts[-1] or "")
                    if chars >= BATCH_CHARS or len(texts) == BATCH_TEXTS:
                        yield {"revision": commit, "place": place}, texts, origins
                        place, texts, origins, chars = stream.state_dict(), [], [], 0
                        failures = 0
                if texts:
                    yield {"revision": commit, "place": place}, texts, origins
                return
            except UserError:
                raise
            except Exception as error:  # from datasets, its file systems or its parsers
                failures += 1
                self.wait_before_retry(error, failures)

    def wait_before_retry(self, error: Exception, failures: int) -> None:
        """Pause after a failed read; raise UserError if it is permanent or one too many."""
        first_line = str(error).partition("\n")[0]
        reason = f"({type(error).__name__}: {first_line:.200})"
        problem = f"{' '.join(self.name[:3])} cannot be read {reason}"
        remote = not self.inputs or any("://" in name for name in self.inputs)
        permanent = isinstance(error, (ValueError, ImportError, MemoryError, *DAMAGED))
        if not remote or permanent or PERMANENT.match(type(error).__name__):
            raise UserError(problem) from error
        if failures > RETRIES:
            raise UserError(f"{problem}; run the same command again to continue") from error
        pause = 2 ** (failures - 1)
        print(f"read failed {reason}, trying again in {pause} s", file=sys.stderr)
        time.sleep(pause)
