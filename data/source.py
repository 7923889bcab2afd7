"""Sources of text: a dataset of the Hugging Face hub, or files, streamed in batches."""

import hashlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from data.shards import DataError

READERS = {".parquet": "parquet", ".jsonl": "json", ".txt": "text", ".py": "text"}
EXCLUDED = re.compile(r"/(\.|site-packages/)")  # hidden files and folders, installed packages
SAMPLES = {"sample-10BT": 10**10, "sample-100BT": 10**11, "sample-350BT": 35 * 10**10}  # tokens
SAMPLED = ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb")
BATCH_CHARS, BATCH_TEXTS = 250_000, 1000  # a batch ends when it reaches one of these
# names of the hub's errors after which a retry is pointless
PERMANENT = re.compile("(Dataset|DataFiles|Repository)NotFound|GatedRepo|OfflineModeIsEnabled")
RETRIES = 6  # after failed downloads, with pauses of 1, 2, 4, ... seconds


def list_files(inputs: tuple[str, ...]) -> list[str]:
    """Return the files and URLs of `inputs` in order, with those inside folders in name order.

    Leaves out what EXCLUDED matches; raises DataError if there is no file.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if "://" in name or path.is_file():
            files.append(name)
        elif path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.suffix in READERS and p.is_file())
            files += [str(p) for p in found if not EXCLUDED.search(f"/{p.relative_to(path)}")]
        else:
            raise DataError(f"--input {name} does not exist")
    if not files:
        raise DataError(f"--input {' '.join(inputs)} holds no {', '.join(READERS)} files")
    return files


@dataclass(frozen=True)
class Source:
    """Files of `inputs`, or configuration `remote_name` of the hub's `dataset` if there are none.

    Worker i of n reads every n-th file, from the i-th on.
    """

    inputs: tuple[str, ...]
    dataset: str
    remote_name: str
    worker_index: int = 0
    worker_count: int = 1

    @property
    def name(self) -> list[str]:
        """Name of the source in the manifest."""
        return list(self.inputs) or [self.dataset, self.remote_name]

    @property
    def known_tokens(self) -> int | None:
        """Number of GPT-2 tokens (bytes are more), None if unknown, as for a worker's share."""
        whole = self.dataset in SAMPLED and not self.inputs and self.worker_count == 1
        return SAMPLES.get(self.remote_name) if whole else None

    def check_share(self, files: int) -> None:
        """Raise DataError if there are too few files for this worker to get one."""
        if self.worker_index >= files:
            raise DataError(
                f"--worker_index {self.worker_index} of --worker_count {self.worker_count} has "
                f"nothing to read: {' '.join(self.name[:3])} is {files} files; lower "
                f"--worker_count to {files} for all workers"
            )

    def files_digest(self) -> str | None:
        """Return a hash of the names and sizes of all files, None for a dataset of the hub.

        Raises DataError if this worker gets none of the files.
        """
        if not self.inputs:
            return None  # the commit of the dataset is saved with the position
        files = list_files(self.inputs)
        self.check_share(len(files))
        sizes = [(f, Path(f).stat().st_size if Path(f).is_file() else None) for f in files]
        return hashlib.sha256(repr(sizes).encode()).hexdigest()

    def newest_commit(self) -> str | None:
        """Return the newest commit of the dataset on the hub, None for local text."""
        if self.inputs or Path(self.dataset).exists():
            return None
        from huggingface_hub import HfApi

        return HfApi().dataset_info(self.dataset).sha

    def open_stream(self, commit: str | None):
        """Return this worker's documents as a streaming dataset with the single column "text"."""
        import datasets  # slow to import, so only after the command line is checked

        datasets.config.STREAMING_READ_MAX_RETRIES = 1  # `batches` retries, with a message
        datasets.disable_progress_bars()
        options = {"split": "train", "streaming": True}
        if not self.inputs:
            name = (self.dataset, self.remote_name)
            stream = datasets.load_dataset(*name, revision=commit, **options)
            self.check_share(stream.num_shards)  # number of files
            share = stream.shard(self.worker_count, self.worker_index, contiguous=False)
            return share.select_columns(["text"])
        whole_files = {"sample_by": "document", "encoding_errors": "replace"}
        share = list_files(self.inputs)[self.worker_index :: self.worker_count]
        parts = []
        for reader, files in groupby(share, lambda f: READERS.get(Path(f).suffix, "text")):
            extra = whole_files if reader == "text" else {}
            part = datasets.load_dataset(reader, data_files=list(files), **options, **extra)
            parts.append(part.select_columns(["text"]))
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)

    def batches(self, state: dict | None) -> Iterator[tuple[dict, list]]:
        """Yield batches of texts, each with the state from which it can be read again.

        Continues from `state` at the same commit of the dataset. Retries failed downloads with
        growing pauses; raises DataError if they keep failing.
        """
        commit, place = (state["revision"], state["place"]) if state else (None, None)
        failures = 0
        while True:
            try:
                commit = commit or self.newest_commit()
                stream = self.open_stream(commit)
                if place is not None:
                    stream.load_state_dict(place)
                place, texts, chars = stream.state_dict(), [], 0
                for row in stream:
                    texts.append(row["text"])
                    chars += len(row["text"] or "")
                    if chars >= BATCH_CHARS or len(texts) == BATCH_TEXTS:
                        yield {"revision": commit, "place": place}, texts
                        place, texts, chars, failures = stream.state_dict(), [], 0, 0
                if texts:
                    yield {"revision": commit, "place": place}, texts
                return
            except DataError:
                raise
            except Exception as error:  # from datasets, its file systems or its parsers
                failures += 1
                self.wait_before_retry(error, failures)

    def wait_before_retry(self, error: Exception, failures: int) -> None:
        """Pause after a failed read; raise DataError if it is permanent or one too many."""
        first_line = str(error).partition("\n")[0]
        reason = f"({type(error).__name__}: {first_line:.200})"
        problem = f"{' '.join(self.name[:3])} cannot be read {reason}"
        remote = not self.inputs or any("://" in name for name in self.inputs)
        permanent = isinstance(error, ValueError | ImportError | MemoryError)
        if not remote or permanent or PERMANENT.match(type(error).__name__):
            raise DataError(problem) from error
        if failures > RETRIES:
            raise DataError(f"{problem}; run the same command again to continue") from error
        pause = 2 ** (failures - 1)
        print(f"read failed {reason}, trying again in {pause} s", file=sys.stderr)
        time.sleep(pause)
