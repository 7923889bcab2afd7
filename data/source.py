"""Where text comes from: a dataset of the Hugging Face hub, or files, read as a stream."""

import hashlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from data.shards import DataError

READERS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text", ".py": "text"}
SAMPLES = {"sample-10BT": 10**10, "sample-100BT": 10**11, "sample-350BT": 35 * 10**10}  # tokens
SAMPLED = ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb")
BATCH_CHARS = 250_000  # of text that is handed on at a time
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


@dataclass(frozen=True)
class Source:
    """The files of `inputs`; without any, configuration `remote_name` of the hub's `dataset`. Of
    those files worker i of n takes every n-th, from the i-th on."""

    inputs: tuple[str, ...]
    dataset: str
    remote_name: str
    worker_index: int = 0
    worker_count: int = 1

    @property
    def name(self) -> list[str]:
        """What the manifest calls it."""
        return list(self.inputs) or [self.dataset, self.remote_name]

    @property
    def tokens(self) -> int | None:
        """GPT-2 tokens in all of it, where its name tells; the bytes are more. None for a worker's
        share, as files differ in size."""
        whole = self.dataset in SAMPLED and not self.inputs and self.worker_count == 1
        return SAMPLES.get(self.remote_name) if whole else None

    def files(self) -> list[str]:
        """The files of `inputs`, of all workers; DataError if this worker would get none."""
        files = list_files(self.inputs)
        self.check_share(len(files))
        return files

    def check_share(self, files: int) -> None:
        """DataError if there are too few files for this worker to get one."""
        if self.worker_index >= files:
            raise DataError(
                f"--worker_index {self.worker_index} of --worker_count {self.worker_count} has "
                f"nothing to read: {' '.join(self.name[:3])} is {files} files; lower "
                f"--worker_count to {files} for all workers"
            )

    def digest(self) -> str | None:
        """digest_of all files; None for the hub, whose commit is kept with the place in it."""
        return digest_of(self.files()) if self.inputs else None

    def newest(self) -> str | None:
        """The dataset's newest commit on the hub, None for what does not come from there."""
        if self.inputs or Path(self.dataset).exists():
            return None
        from huggingface_hub import HfApi

        return HfApi().dataset_info(self.dataset).sha

    def open(self, revision: str | None):
        """This worker's documents as one streaming dataset with a single column "text"."""
        import datasets  # takes a second, so not before the command line is known to be right

        datasets.config.STREAMING_READ_MAX_RETRIES = 1  # `read` retries, and says so
        datasets.disable_progress_bars()
        if not self.inputs:
            stream = datasets.load_dataset(
                self.dataset, self.remote_name, split="train", streaming=True, revision=revision
            )
            self.check_share(stream.num_shards)  # as datasets calls files
            share = stream.shard(self.worker_count, self.worker_index, contiguous=False)
            return share.select_columns(["text"])
        options = {"text": {"sample_by": "document", "encoding_errors": "replace"}}
        share = self.files()[self.worker_index :: self.worker_count]
        parts = []
        for reader, files in groupby(share, lambda f: READERS.get(Path(f).suffix, "text")):
            part = datasets.load_dataset(
                reader,
                data_files=list(files),
                split="train",
                streaming=True,
                **options.get(reader, {}),
            )
            parts.append(part.select_columns(["text"]))
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

    def read(self, state: dict | None) -> Iterator[tuple[dict, list]]:
        """Batches of texts, each with the state of the source before it; goes on from `state`, at
        the same commit of the dataset.

        A failed read from the network is tried again with growing pauses; DataError when it stays
        so.
        """
        revision, place = (state["revision"], state["place"]) if state else (None, None)
        failures = 0
        while True:
            try:
                revision = revision or self.newest()
                stream = self.open(revision)
                if place is not None:
                    stream.load_state_dict(place)
                place, texts, chars = stream.state_dict(), [], 0
                for row in stream:
                    texts.append(row["text"])
                    chars += len(row["text"] or "")
                    if chars >= BATCH_CHARS or len(texts) == 1000:
                        yield {"revision": revision, "place": place}, texts
                        place, texts, chars, failures = stream.state_dict(), [], 0, 0
                if texts:
                    yield {"revision": revision, "place": place}, texts
                return
            except DataError:
                raise
            except Exception as error:  # whatever datasets, its file systems and parsers raise
                failures += 1
                self.wait(error, failures)

    def wait(self, error: Exception, failures: int) -> None:
        """Pauses before another try; DataError where that does not mend it, or too many failed."""
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        what = " ".join(self.name[:3])
        remote = not self.inputs or any("://" in name for name in self.inputs)
        final = isinstance(error, ValueError | ImportError | MemoryError)
        if not remote or final or type(error).__name__ in FINAL:
            raise DataError(f"{what} cannot be read ({reason[:300]})") from error
        if failures > RETRIES:
            raise DataError(
                f"reading {what} failed {failures} times ({reason[:300]}); whole shards are "
                "safe: run the same command again to continue"
            ) from error
        pause = 2 ** (failures - 1)
        print(f"read failed ({reason[:120]}), again in {pause} s", file=sys.stderr)
        time.sleep(pause)
