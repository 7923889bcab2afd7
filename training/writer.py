"""Writer of checkpoint files, by one process or by several that each hold rows of the state.

With several processes, none has to hold the whole state. The main process writes a file with gaps
in place of the tensors, and then each process fills in its rows. training/saver.py decides when to
save and under which name. model/formats/checkpoint.py has the format of a file.
"""

import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from model.formats.checkpoint import FORMAT_VERSION, flatten, split_float32, sum_rows
from training.parallel.own_rows import OwnRows
from utils.distributed import ALONE, Process
from utils.errors import writing
from utils.files import atomic_write, replace_file

# {"model": {parameter: OwnRows}, "model_low": {parameter: OwnRows},
# "optimizer": {parameter: {"exp_avg": OwnRows, ...}}}
Sections = dict[str, dict]
# {section: {name by `flatten`: byte offset of the tensor in the file}}
Offsets = dict[str, dict[str, int]]


def save_checkpoint(
    path: Path,
    weights: dict[str, OwnRows],
    optimizer_state: dict[str, dict],
    entries: Mapping[str, object],
    process: Process = ALONE,
) -> None:
    """Write the float32 weights, the optimizer state and `entries` to a file, atomically: `path` is
    always the old file or the whole new one. Every process must call it, with its own rows, and
    needs the same folder if it has any. Raises UserError if writing fails, as on a full disk."""
    # A file has each weight as two tensors: upper and lower half of its float32 bits.
    high: dict[str, OwnRows] = {}  # bfloat16
    low: dict[str, OwnRows] = {}  # int16
    for name, own_rows in weights.items():
        if own_rows.content.dtype is not torch.float32:  # a buffer of integers
            high[name] = own_rows
            continue
        high_content, low_content = split_float32(own_rows.content)
        high[name] = replace(own_rows, content=high_content)
        low[name] = replace(own_rows, content=low_content)
    sections: Sections = {"model": high, "model_low": low, "optimizer": optimizer_state}

    # A checksum is a sum over rows. Each process sums its own rows; no two processes have the same.
    checksums: dict[str, int] = {}
    for section, own_rows_by_name in sections.items():
        total = 0
        for name, own_rows in flatten(own_rows_by_name).items():
            total += sum_rows(name, own_rows.rows.tolist(), own_rows.content)
        checksums[section] = sum(process.merge({process.rank: total}).values())

    plain_entries = {
        # first, because `is_own` of model/formats/checkpoint.py looks for it in the first bytes
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__)},
        **entries,
        "checksums": checksums,
    }
    with writing(path):  # any error becomes a UserError that names the path
        if process.world_size == 1:
            with atomic_write(path) as file:
                # tree_map returns the same nested dicts with a Tensor in place of each OwnRows
                torch.save(plain_entries | tree_map(whole_tensor, sections), file)
        else:
            write_together(path, sections, plain_entries, process)


def whole_tensor(leaf: object) -> object:
    """Return the whole tensor of an OwnRows, and a plain value unchanged. Call it in a process that
    writes alone, and so has all rows."""
    return leaf.content.view(leaf.shape) if isinstance(leaf, OwnRows) else leaf


# several processes


def write_together(path: Path, sections: Sections, plain_entries: dict, process: Process) -> None:
    """Write a checkpoint of several processes atomically. `sections` has the OwnRows of this
    process, `plain_entries` everything beside tensors. Every process must call it."""
    # All processes write into this file. The main process renames it when it is complete.
    temporary = path.with_name(path.name + ".tmp")
    offsets: dict[int, Offsets] = {}  # {0: offsets}, from rank 0; `merge` sends them to all
    try:  # after an error, the main process removes the temporary file, below
        # If one process fails, `together` raises an error on all, so that none waits forever.
        with process.together():
            if process.is_main:
                offsets[0] = lay_out(temporary, sections, plain_entries)
        offsets = process.merge(offsets)
        # Each process writes in a thread, while wait_until repeats short collectives. In a single
        # collective, processes without rows would wait for slow writers, and fail after TIMEOUT.
        with process.together(), ThreadPoolExecutor() as pool:
            future = pool.submit(write_own_rows, temporary, sections, offsets[0])
            process.wait_until(future.done)
            future.result()  # raises the error of write_own_rows, if it failed
        if process.is_main:
            replace_file(temporary, path)
    except Exception:
        if process.is_main:
            # an error of `unlink` would hide the reason of the failure
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


def lay_out(path: Path, sections: Sections, plain_entries: dict) -> Offsets:
    """Write a checkpoint with gaps in place of the tensors, and return where each gap begins. Gaps
    take no disk space until processes fill them."""
    with FakeTensorMode():  # tensors with a shape and a dtype, without memory
        gaps = tree_map(empty_tensor, sections)
    # skip_data: torch.save leaves the bytes of tensors empty
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(plain_entries | gaps, path)

    # In this mode torch.load reads no tensors, but sets _checkpoint_offset: where the tensor begins
    # in the file, in bytes.
    with FakeTensorMode():
        fake_checkpoint = torch.load(path, weights_only=True)
    offsets: Offsets = {}
    for section in sections:
        tensors = flatten(fake_checkpoint[section])
        offsets[section] = {
            name: x.untyped_storage()._checkpoint_offset for name, x in tensors.items()
        }
    return offsets


def empty_tensor(leaf: object) -> object:
    """Return an empty tensor with the shape of the whole one of an OwnRows, and a plain value
    unchanged. Call it in FakeTensorMode."""
    if isinstance(leaf, OwnRows):
        return torch.empty(leaf.shape, dtype=leaf.content.dtype)
    return leaf


def write_own_rows(path: Path, sections: Sections, offsets: Offsets) -> None:
    """Write the rows of this process into a file that lay_out has made, and force them to disk.
    `offsets` is what lay_out returned."""
    # A process has no rows here if others write the same ones. It may lack the folder.
    own_leaves = [leaf for leaf in tree_leaves(sections) if isinstance(leaf, OwnRows)]
    if sum(len(own_rows.rows) for own_rows in own_leaves) == 0:
        return
    # Write-only: otherwise NFS may read a page and write it back over rows of another machine.
    with open(os.open(path, os.O_WRONLY), "wb") as file:
        for section, own_rows_by_name in sections.items():
            for name, own_rows in flatten(own_rows_by_name).items():
                # (r, bytes of a row)
                row_bytes = own_rows.content.contiguous().flatten(1).view(torch.uint8)
                # Write rows with consecutive indices at once: split where an index is skipped.
                breaks = torch.nonzero(own_rows.rows.diff() != 1).flatten() + 1
                consecutive_rows = own_rows.rows.tensor_split(breaks)
                consecutive_bytes = row_bytes.tensor_split(breaks)
                for rows, chunk in zip(consecutive_rows, consecutive_bytes, strict=True):
                    if len(rows) > 0:  # 0 if another process writes this tensor
                        file.seek(offsets[section][name] + int(rows[0]) * chunk.size(1))
                        file.write(chunk.numpy())
        file.flush()
        os.fsync(file.fileno())
