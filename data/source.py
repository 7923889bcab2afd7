"""Text to shard, streamed by `datasets`: files and URLs, or a dataset of the Hugging Face hub."""

import io
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from utils.errors import UserError

UTF8 = {"encoding": "utf-8-sig", "encoding_errors": "replace"}  # -sig drops a byte order mark
CSV = {"encoding_errors": "replace", "keep_default_na": False, "na_filter": False}
TEXT = ("text", {"sample_by": "document", **UTF8})  # builder of `datasets` and its options
# builder "json" refuses rows with other fields than the first ones, so we parse the lines
LINES = ("text", {"sample_by": "line", "chunksize": 2**20, **UTF8})
PARQUET = ("parquet", {"batch_size": 1000})
ROWS = {".jsonl": LINES, ".ndjson": LINES, ".json": ("json", {}), ".parquet": PARQUET}
ROWS |= {".csv": ("csv", {"sep": ",", **CSV}), ".tsv": ("csv", {"sep": "\t", **CSV})}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
IN_FOLDERS = (".parquet", ".jsonl", ".txt", ".py")  # read in folders; other files only if named
RETRIES = 6  # after failed downloads, with pauses of 1, 2, 4, ... seconds
# names of the hub's errors after which a retry is pointless
PERMANENT = re.compile("(Dataset|DataFiles|Repository)NotFound|GatedRepo|OfflineModeIsEnabled")


def suffix_of(name: str) -> str:
    """Return the suffix of a file or URL that tells its format, below that of a compression."""
    path = Path(name.partition("?")[0] if "://" in name else name)
    compressed = path.suffix.lower() in COMPRESSIONS
    return (path.with_suffix("") if compressed else path).suffix.lower()


def builder_of(name: str) -> tuple[str, dict]:
    """Return the builder of `datasets` for a file or URL, and its options."""
    found = ROWS.get(suffix_of(name), TEXT)
    return ("json", {}) if found == LINES and "://" in name else found  # "text" opens no URL


def is_binary(path: Path) -> bool:
    """Return whether a file that would be read as UTF-8 text holds something else."""
    if builder_of(path.name) == PARQUET or path.suffix.lower() in COMPRESSIONS:
        return False
    with open(path, "rb") as file:
        return b"\0" in file.read(2**16)


def walk(folder: str) -> list[Path]:
    """Return the files below a folder in name order, but hidden ones and installed packages."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [x for x in folders if not x.startswith(".") and x != "site-packages"]
        found += [Path(parent, x) for x in names if not x.startswith(".")]
    return sorted(found)


def list_files(inputs: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes in bytes of the files of `inputs` by name, -1 for a URL; folders in name
    order. Print what is left out of the folders; raise UserError for an input that is no text."""
    sizes: dict[str, int] = {}
    left_out: Counter[str] = Counter()
    for name in inputs:
        if os.path.isdir(name):
            for path in walk(name):
                if suffix_of(path.name) in IN_FOLDERS and path.is_file() and not is_binary(path):
                    sizes[str(path)] = path.stat().st_size
                else:
                    left_out[path.suffix.lower() or "without a suffix"] += 1
        elif "://" in name and builder_of(name) != TEXT:
            sizes[name] = -1
        elif os.path.isfile(name) and not is_binary(Path(name)):
            sizes[name] = os.path.getsize(name)
        else:
            problem = "is binary, not UTF-8 text" if os.path.isfile(name) else "does not exist"
            raise UserError(f"--input {name} {problem}")
    others = ", ".join(f"{count:,} {suffix}" for suffix, count in left_out.most_common(8))
    if not sizes:
        kinds = ", ".join(IN_FOLDERS)
        raise UserError(f"--input {' '.join(inputs)} holds no {kinds}, but {others or 'nothing'}")
    if others:
        print(f"left out: {others}; name a file to read it", file=sys.stderr)
    return sizes


def set_up_datasets() -> None:
    """Import `datasets`, which is slow, and configure it."""
    os.environ.setdefault("USE_TORCH", "0")  # it would import PyTorch, for nothing here
    import datasets
    from fsspec.compression import register_compression
    from pyarrow import CompressedInputStream

    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # `Source.batches` retries, with a message
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
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


@dataclass
class Source:
    """Texts of `files`, or of configuration `remote_name` of the hub's `dataset` if there are none.

    Worker i of n reads every n-th file, from the i-th on.
    """

    files: list[str]
    dataset: str
    remote_name: str
    text_column: str
    worker_index: int
    worker_count: int

    def groups(self) -> list[list[str]]:
        """Return this worker's files, neighbours of one builder together; [[]] for the hub."""
        mine = self.files[self.worker_index :: self.worker_count]
        return [list(x) for _, x in groupby(mine, builder_of)] if self.files else [[]]

    def open(self, files: list[str], commit: str | None):
        """Return the stream of a group of files, or of the hub's dataset if there are none."""
        import datasets

        builder, options = self.dataset, {"name": self.remote_name, "revision": commit}
        if files:
            builder, options = builder_of(files[0])
            # datasets expands patterns, but the shell has done so
            names = [x if "://" in x else re.sub("([*?[])", r"[\1]", x) for x in files]
            options = {**options, "data_files": names}
        load = partial(datasets.load_dataset, builder, split="train", streaming=True, **options)
        stream = load()
        if not files:
            if self.worker_index >= stream.num_shards:
                raise UserError(f"--worker_count must be at most the {stream.num_shards} files")
            stream = stream.shard(self.worker_count, self.worker_index, contiguous=False)
        if not files or builder_of(files[0]) != TEXT:
            names = stream.column_names or next(iter(stream), {})
            names = parse_line(names.get("text", "")) if builder == "text" else names
            if names and self.text_column not in names:
                raise UserError(
                    f"{files[0] if files else self.dataset} has no column {self.text_column!r} but "
                    f"{', '.join(names):.300}; choose one by --text_column"
                )
        if builder == "parquet":  # other columns may differ between files
            stream = load(columns=[self.text_column])
        elif builder != "text":
            stream = stream.select_columns([self.text_column])
        return stream.with_format("arrow")

    def batches(self, position: dict | None) -> Iterator[tuple[dict, list]]:
        """Yield the position of a batch, from which it can be read again, and its texts; a row
        without text gives something else than a string.

        Continues from `position` at the same commit of the dataset. Retries failed downloads with
        growing pauses; raises UserError if they keep failing, and for a file that is damaged.
        """
        set_up_datasets()
        from huggingface_hub import HfApi

        at = position or {"revision": None, "group": 0, "stream": None}
        failures, files, stream = 0, [], None
        while True:
            try:
                if not self.files and at["revision"] is None:
                    at = {**at, "revision": HfApi().dataset_info(self.dataset).sha}
                for files in self.groups()[at["group"] :]:
                    stream = self.open(files, at["revision"])
                    if at["stream"]:
                        stream.load_state_dict(at["stream"])
                    kind = builder_of(files[0]) if files else None
                    for table in stream.iter(1 if kind == TEXT else 100):
                        texts = table.column(0).to_pylist()
                        if kind == LINES:
                            rows = [parse_line(line) for line in texts if line.strip()]
                            texts = [row.get(self.text_column) for row in rows]
                        yield at, texts
                        at, failures = {**at, "stream": stream.state_dict()}, 0
                    at, stream = {**at, "group": at["group"] + 1, "stream": None}, None
                return
            except UserError:
                raise
            except Exception as error:  # from datasets, its file systems or its parsers
                failures += 1
                self.wait_before_retry(error, failures, files, stream)

    def wait_before_retry(self, error: Exception, failures: int, files: list[str], stream) -> None:
        """Pause after a failed read; raise UserError if it is permanent or one too many."""
        reason = f"({type(error).__name__}: {str(error).partition(chr(10))[0]:.200})"
        state = stream.state_dict() if files and stream else {"shard_idx": 0}
        while "shard_idx" not in state:  # index of the file that is read now
            state = state["examples_iterable"]
        name = (files or [self.dataset])[min(state["shard_idx"], len(files or [0]) - 1)]
        permanent = isinstance(error, ValueError | ImportError | MemoryError) or (
            os.path.exists(name) or PERMANENT.match(type(error).__name__)
        )
        if permanent or failures > RETRIES:
            again = "" if permanent else "; run the same command again to continue"
            raise UserError(f"{name} is damaged or cannot be read {reason}{again}") from error
        print(f"read failed {reason}, trying again in {2 ** (failures - 1)} s", file=sys.stderr)
        time.sleep(2 ** (failures - 1))
