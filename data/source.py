"""Text to shard, streamed by `datasets`: files, or a dataset of the Hugging Face hub."""

import glob
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from utils.errors import UserError

UTF8 = {"encoding": "utf-8-sig", "encoding_errors": "replace"}  # -sig drops a byte order mark
CSV = {"encoding_errors": "replace", "keep_default_na": False, "na_filter": False}
TEXT = ("text", {"sample_by": "document", **UTF8})  # builder of `datasets` and its options
# builder "json" refuses rows with other fields than the first ones, so we parse the lines
LINES = ("text", {"sample_by": "line", "chunksize": 2**20, **UTF8})
ROWS = {".jsonl": LINES, ".ndjson": LINES, ".json": ("json", {}), ".csv": ("csv", CSV)}
ROWS |= {".tsv": ("csv", {"sep": "\t", **CSV}), ".parquet": ("parquet", {"batch_size": 1000})}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # read in folders; other files only if named


def suffix_of(name: str) -> str:
    """Return the suffix of a file that tells its format, below that of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def builder_of(name: str) -> tuple[str, dict]:
    """Return the builder of `datasets` for a file, and its options."""
    return ROWS.get(suffix_of(name), TEXT)


def is_plain(name: str) -> bool:
    """Return whether a file is read as one text, without decompression."""
    return builder_of(name) == TEXT and Path(name).suffix.lower() not in COMPRESSIONS


def is_binary(path: Path) -> bool:
    """Return whether a file that would be read as one text holds something else, as UTF-16 does."""
    with open(path, "rb") as file:
        return is_plain(path.name) and b"\0" in file.read(2**16)


def walk(folder: str) -> list[Path]:
    """Return the files below a folder in name order, but hidden ones and installed packages."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [x for x in folders if not x.startswith(".") and x != "site-packages"]
        found += [Path(parent, x) for x in names if not x.startswith(".")]
    return sorted(found)


def list_files(inputs: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in bytes of the files of `inputs` by name, folders in name order. Prints
    what is left out of the folders; raises UserError for an input that is no text."""
    sizes, left_out = {}, Counter()
    for name in inputs:
        if os.path.isdir(name):
            for path in walk(name):
                if suffix_of(path.name) in IN_FOLDERS and path.is_file() and not is_binary(path):
                    sizes[str(path)] = path.stat().st_size
                else:
                    left_out[path.suffix.lower() or "without a suffix"] += 1
        elif is_binary(Path(name)):
            raise UserError(f"--input {name} is binary, not UTF-8 text")
        else:
            sizes[name] = os.path.getsize(name)
    others = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.most_common(8))
    if not sizes:
        raise UserError(f"{' '.join(inputs)} holds none of {IN_FOLDERS}, but {others or 'nothing'}")
    if others:
        print(f"left out: {others}; name a file to read it", file=sys.stderr)
    return sizes


def set_up_datasets() -> None:
    """Import `datasets`, which is slow, and configure it."""
    os.environ.setdefault("USE_TORCH", "0")  # it would import PyTorch, for nothing here
    import datasets
    from fsspec.compression import register_compression
    from pyarrow import CompressedInputStream

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a request to the hub, also for local files
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors reach the caller anyway
    # fsspec needs a package for zstd, and reads only the first frame of a file by some of them
    zstd = lambda file, **_: io.BufferedReader(CompressedInputStream(file, "zstd"))  # noqa: E731
    register_compression("zstd", zstd, "zst", force=True)


def parse_line(line: str) -> dict:
    """Return the object in a line of JSON, {} if there is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


@dataclass
class Source:
    """Texts of files, or of configuration `remote_name` of the hub's dataset if there are none;
    worker i of n reads every n-th file, from the i-th on."""

    files: list[str]
    dataset: str
    remote_name: str
    text_column: str
    worker_index: int
    worker_count: int

    def groups(self) -> list[list[str]]:
        """Return this worker's files by stream: plain texts that follow each other, or one file."""
        mine = self.files[self.worker_index :: self.worker_count]
        return [list(x) for _, x in groupby(mine, lambda name: is_plain(name) or name)]

    def open(self, files: list[str], commit: str | None):
        """Return the stream of a group of files, or of the hub's dataset if there are none."""
        import datasets

        builder, options = self.dataset, {"name": self.remote_name, "revision": commit}
        if files:
            builder, options = builder_of(files[0])
            options = {**options, "data_files": [glob.escape(name) for name in files]}
        stream = datasets.load_dataset(builder, split="train", streaming=True, **options)
        if not files:
            if self.worker_index >= stream.num_shards:
                raise UserError(f"--worker_count must be at most the {stream.num_shards} files")
            stream = stream.shard(self.worker_count, self.worker_index, contiguous=False)
        return stream.with_format("arrow")

    def texts(self, rows: list[dict], files: list[str], is_first: bool) -> list:
        """Return the texts in rows of the files; raise UserError if they have no text_column."""
        builder = builder_of(files[0]) if files else None
        if builder == TEXT:
            return [row["text"] for row in rows]
        if builder == LINES:
            rows = [parse_line(row["text"]) for row in rows if row["text"].strip()]
        if is_first and rows and rows[0] and self.text_column not in rows[0]:
            where, names = files[0] if files else self.dataset, ", ".join(rows[0])
            raise UserError(f"{where} has no --text_column {self.text_column!r}, but {names:.300}")
        return [row.get(self.text_column) for row in rows]

    def batches(self, position: dict | None) -> Iterator[tuple[dict, list]]:
        """Yield the position of a batch, to continue from, and its texts, of which those that are
        no strings stand for rows without text. Raises UserError for a file that cannot be read;
        `datasets` itself retries downloads for some minutes."""
        set_up_datasets()
        from huggingface_hub import HfApi

        at = position or {"revision": None, "group": 0, "stream": None}
        groups = self.groups() if self.files else [[]]
        files: list[str] = []
        try:
            if not self.files and at["revision"] is None:
                at = {**at, "revision": HfApi().dataset_info(self.dataset).sha}
            for files in groups[at["group"] :]:
                stream = self.open(files, at["revision"])
                if at["stream"]:
                    stream.load_state_dict(at["stream"])
                for table in stream.iter(1 if files and is_plain(files[0]) else 100):
                    texts = self.texts(table.to_pylist(), files, at["stream"] is None)
                    yield at, texts
                    at = {**at, "stream": stream.state_dict()}
                at = {**at, "group": at["group"] + 1, "stream": None}
        except UserError:
            raise
        except Exception as error:  # from datasets, its file systems or its parsers
            name = f"{' '.join(files) or self.dataset:.300}"
            reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]:.200})"
            raise UserError(f"{name} is damaged or cannot be read {reason}") from error
