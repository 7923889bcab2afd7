"""Folders of the workers that shared a source, merged into one that trains.

Full shards are linked under new names where the file system can, else copied; the manifest comes
last, so that a merge killed at any moment and run again ends the same.
"""

import contextlib
import os
import shutil
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from data.sharder import UNENDED, UNSPLIT, locked, writing_to
from data.shards import MANIFEST, DataError, find_shards, read_manifest, write_manifest
from utils.files import atomic_write, check_space, sha256, sync_folder

ALIKE = (
    *("format_version", "tokenizer", "vocab_size", "eot", "source", "files_digest"),
    *("worker_count", "shard_size", "format", "val_fraction"),
)


def read_worker(folder: Path) -> dict:
    """The manifest of a worker's folder; DataError unless its run has ended and no shard is
    missing."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise DataError(
            f"{folder} holds no {MANIFEST} of data/fineweb-edu.py; give others to --merge"
        )
    manifest = {**UNSPLIT, **UNENDED, **manifest}
    if not (manifest["complete"] or manifest["stopped"]):
        raise DataError(f"{folder} is half done; run its command again until it ends, then merge")
    for split in {shard["split"] for shard in manifest["shards"]}:
        find_shards(folder, split)
    return manifest


def revision(manifest: dict) -> str | None:
    """The commit of the hub's dataset that a folder was made from, if it says."""
    source = (manifest.get("state") or {}).get("source") or {}
    return source.get("revision")


def check_together(workers: dict[Path, dict]) -> None:
    """DataError unless the folders, with their manifests, are all workers of one run."""
    (first, manifest), *others = workers.items()
    for folder, other in others:
        for key in ALIKE:
            if other.get(key) != manifest.get(key):
                raise DataError(
                    f"{folder} was made with {key} {other.get(key)}, but {first} with "
                    f"{manifest.get(key)}; only workers of one run can be merged"
                )
    commits = {revision(m) for m in workers.values()} - {None}
    if len(commits) > 1:
        raise DataError(
            f"the folders of --merge are of several commits of the dataset "
            f"({', '.join(sorted(commits))}); shard those of the older again"
        )
    count, seen = manifest["worker_count"], Counter(m["worker_index"] for m in workers.values())
    missing = [str(i) for i in range(count) if not seen[i]]
    if missing:
        raise DataError(
            f"of {count} workers --merge lacks the folders of --worker_index {' '.join(missing)}"
        )
    twice = [str(i) for i in seen if seen[i] > 1]
    if twice:
        raise DataError(f"--merge names several folders of --worker_index {' '.join(twice)}")


def renamed(workers: dict[Path, dict]) -> list[tuple[Path, dict]]:
    """Every shard in worker order: where it is, and its entry in the manifest under a new name."""
    shards, counts = [], Counter()
    for folder, manifest in sorted(workers.items(), key=lambda item: item[1]["worker_index"]):
        for shard in manifest["shards"]:
            split = shard["split"]
            name = f"{split}_{counts[split]:06d}.{manifest['format']}"
            shards.append((folder / shard["file"], {**shard, "file": name}))
            counts[split] += 1
    return shards


def place(source: Path, target: Path, digest: str, full: bool) -> None:
    """Links or copies a shard, whole or not at all; one that is there already must be the same.

    Only full shards are linked: a worker that is continued writes into its short ones.
    """
    if target.exists():
        if not target.samefile(source) and sha256(target) != digest:
            raise DataError(f"{target} is not of these folders; merge into an empty folder")
        return
    if full:
        with contextlib.suppress(OSError):  # another disk, or a file system without links
            os.link(source.resolve(), target)
            return
    target.with_name(target.name + ".tmp").unlink(missing_ok=True)  # half a copy takes room
    check_space(target.parent, source.stat().st_size, f"a copy of {source}")
    with open(source, "rb") as file, atomic_write(target) as copy:
        shutil.copyfileobj(file, copy, 2**20)


def merged_manifest(workers: list[dict], shards: list[dict]) -> dict:
    """What the merged folder is: as a run that was not split would be, but it cannot go on."""
    complete = all(worker["complete"] for worker in workers)
    skipped = sum((Counter(worker["skipped"]) for worker in workers), Counter())
    return {
        **{key: workers[0].get(key) for key in ALIKE},
        **UNSPLIT,
        "merged": len(workers),
        "shards": shards,
        "complete": complete,
        "stopped": not complete,
        "state": None,
        "documents": sum(worker["documents"] for worker in workers),
        "skipped": dict(skipped),
    }


def merge(folders: tuple[Path, ...], out: Path) -> dict:
    """Makes `out` the folder of all workers' shards; gives its manifest. DataError if they are not
    all workers of one run, or if `out` holds something else."""
    if len({folder.resolve() for folder in (*folders, out)}) <= len(folders):
        raise DataError("--merge and --local_dir must each name another folder")
    absent = [str(folder) for folder in folders if not folder.is_dir()]
    if absent:
        raise DataError(f"there is no folder {' '.join(absent)}; give others to --merge")
    with writing_to(out), contextlib.ExitStack() as locks:
        for folder in folders:
            locks.enter_context(locked(folder))
        workers = {folder: read_worker(folder) for folder in folders}
        check_together(workers)
        shards = renamed(workers)
        entries = [entry for _, entry in shards]
        manifest = merged_manifest(list(workers.values()), entries)
        there = {path.name for path in out.iterdir() if path.suffix in (".npy", ".bin")}
        strange = there - {entry["file"] for entry in entries}
        if strange or read_manifest(out) not in (None, manifest):
            raise DataError(f"{out} holds something else already; merge into an empty folder")
        for source, entry in tqdm(shards, unit="shard", disable=None):
            full = entry["tokens"] == manifest["shard_size"]
            place(source, out / entry["file"], entry["sha256"], full)
        sync_folder(out)
        write_manifest(out, manifest)
    return manifest
