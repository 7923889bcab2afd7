"""Merging of the folders of several workers into one folder of shards.

Full shards are linked under new names if the file system supports it, else copied. Until all are
there, the manifest says that the folder is unfinished. A merge that is killed can be run again.
"""

import contextlib
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from data.sharder import DEFAULTS, IN_PROGRESS, locked, output_folder
from data.shards import MANIFEST, find_shards, read_manifest, shard_paths, write_manifest
from utils.errors import UserError
from utils.files import link_or_copy, sha256, sync_folder

COMMON_KEYS = (  # equal in the manifests of all workers of a run
    *("format_version", "tokenizer", "vocab_size", "eot", "source", "files_digest"),
    *("worker_count", "shard_size", "format", "val_fraction", "text_column"),
)


def worker_manifest(folder: Path) -> dict:
    """Return the manifest of a folder; raise UserError if a shard is missing or it is not ended."""
    manifest = {**DEFAULTS, **IN_PROGRESS, **read_manifest(folder)}
    if not (manifest["complete"] or manifest["stopped"]):
        raise UserError(f"{folder} is unfinished; run its command again until it ends, then merge")
    for split in {shard["split"] for shard in manifest["shards"]}:
        find_shards(folder, split)
    return manifest


def check_same_run(workers: dict[Path, dict]) -> None:
    """Raise UserError unless the folders and their manifests are all workers of one run."""
    (first, manifest), *others = workers.items()
    for folder, other in others:
        for key in COMMON_KEYS:
            if other.get(key) != manifest.get(key):
                again = "; run each worker's command again" if key == "files_digest" else ""
                raise UserError(
                    f"{folder} was made with {key} {other.get(key)}, but {first} with "
                    f"{manifest.get(key)}; only workers of one run can be merged{again}"
                )
    sources = [(m.get("state") or {}).get("source") or {} for m in workers.values()]
    commits = {source.get("revision") for source in sources} - {None}  # None: not of the hub
    if len(commits) > 1:
        raise UserError(
            f"the folders of --merge come from several commits of the dataset "
            f"({', '.join(sorted(commits))}); shard the older ones again"
        )
    found = sorted(m["worker_index"] for m in workers.values())
    if found != list(range(manifest["worker_count"])):
        raise UserError(
            f"--merge names folders of --worker_index {' '.join(map(str, found))}; name one folder "
            f"for each of the {manifest['worker_count']} workers"
        )


def renumber_shards(workers: dict[Path, dict]) -> list[tuple[Path, dict]]:
    """Return path and renamed manifest entry of every shard, in the order of the workers."""
    shards, counts = [], Counter()
    for folder, manifest in sorted(workers.items(), key=lambda item: item[1]["worker_index"]):
        for shard in manifest["shards"]:
            split = shard["split"]
            name = f"{split}_{counts[split]:06d}.{manifest['format']}"
            shards.append((folder / shard["file"], {**shard, "file": name}))
            counts[split] += 1
    return shards


def merge_shard(source: Path, target: Path, digest: str, full: bool) -> None:
    """Link or copy a shard; raise UserError if it is damaged or another file has its name.

    A shard that is not full is copied: continuing its worker would write into a linked one.
    """
    if sha256(source) != digest:
        raise UserError(f"{source} is damaged: it does not have its checksum; shard it again")
    if not target.exists():
        link_or_copy(source, target, full)
    elif not target.samefile(source) and sha256(target) != digest:
        raise UserError(f"{target} is not from these folders; merge into an empty folder")


def merged_manifest(workers: list[dict], shards: list[dict]) -> dict:
    """Return the manifest of a run by a single worker that cannot be continued."""
    complete = all(worker["complete"] for worker in workers)
    manifest = {key: workers[0].get(key) for key in COMMON_KEYS} | DEFAULTS
    manifest |= {"merged": len(workers), "shards": shards}
    manifest |= {"complete": complete, "stopped": not complete, "state": None}
    skipped = sum((Counter(worker["skipped"]) for worker in workers), Counter())
    documents = sum(worker["documents"] for worker in workers)
    return {**manifest, "documents": documents, "skipped": dict(skipped)}


def merge(folders: tuple[Path, ...], out: Path) -> dict:
    """Merge the shards of all workers into the folder `out`, and return its manifest.

    Raises UserError if they are not all workers of one run, or if `out` holds other shards.
    """
    if repeated := [folder for folder in folders if folders.count(folder) > 1]:
        raise UserError(f"--merge names {repeated[0]} twice")
    if len({folder.resolve() for folder in (*folders, out)}) <= len(folders):
        raise UserError("--merge and --local_dir must name different folders")
    for folder in folders:
        if read_manifest(folder) is None:
            raise UserError(f"{folder} holds no {MANIFEST} of data/fineweb-edu.py; correct --merge")
    with output_folder(out), contextlib.ExitStack() as locks:
        for folder in folders:
            locks.enter_context(locked(folder))
        workers = {folder: worker_manifest(folder) for folder in folders}
        check_same_run(workers)
        shards = renumber_shards(workers)
        manifest = merged_manifest(list(workers.values()), [entry for _, entry in shards])
        unfinished = manifest | IN_PROGRESS
        found, held = read_manifest(out), {path.name for path in shard_paths(out)}
        own = {entry["file"] for _, entry in shards} if found else set()
        if held - own or found not in (None, unfinished, manifest):
            raise UserError(f"{out} holds other shards already; merge into an empty folder")
        if found is None:
            write_manifest(out, unfinished)
        for source, entry in tqdm(shards, unit="shard", disable=None):
            full = entry["tokens"] == manifest["shard_size"]
            merge_shard(source, out / entry["file"], entry["sha256"], full)
        sync_folder(out)
        write_manifest(out, manifest)
    return manifest
