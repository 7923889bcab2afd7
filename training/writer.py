"""Writer of checkpoint files, by one process or by several that each hold rows of the state.

With several processes, none has to hold the whole state:

    1. The processes add up the CRC-32 of their rows: the checksums of the file.
    2. The main process writes a temporary file with gaps in place of the tensors (lay_out).
    3. Each process writes its rows into the gaps (write_own_rows).
    4. The processes read the file back, and add up the CRC-32 of what they have read. If the sums
       are the checksums, the main process renames the file.

For example the gap of a bfloat16 weight (4, 768) begins at byte 1,024, and a row takes 1,536 bytes.
Process 0 writes its rows 0 and 1 at byte 1,024, process 1 its rows 2 and 3 at byte 4,096.

training/saver.py decides when to save and under which name. model/formats/checkpoint.py has the
format of a file.
"""

import contextlib
import io
import os
import uuid
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from model.formats.checkpoint import (
    FORMAT_VERSION,
    flatten,
    load_checkpoint,
    split_float32,
    sum_part,
    sum_rows,
)
from training.parallel.own_rows import OwnRows
from utils.distributed import ALONE, Process
from utils.errors import UserError, writing
from utils.files import atomic_write, replace_file

# {"model": {"lm_head.weight": OwnRows, ...}, "model_low": {"lm_head.weight": OwnRows, ...},
# "optimizer": {"lm_head.weight": {"exp_avg": OwnRows, ...}, ...}}
# An OwnRows has the shape of the whole tensor, (4, 768), and of the rows that this process writes
# the indices `rows`, [0, 1], and the `content`, (2, 768).
Sections = dict[str, dict]
# where the gap of a tensor begins in the file, in bytes, by section and then by `flatten`'s name:
# {"model": {"lm_head.weight": 1024, ...}, "optimizer": {"lm_head.weight exp_avg": 78464, ...}, ...}
Offsets = dict[str, dict[str, int]]


def save_checkpoint(
    path: Path,
    weights: dict[str, OwnRows],
    optimizer_state: dict[str, dict],
    entries: Mapping[str, object],
    process: Process = ALONE,
) -> None:
    """Write the weights, the optimizer state (both as copy_state returns them) and `entries`, such
    as {"step": 100, "config": {...}, ...}, to a file, atomically: `path` is always the old file or
    the whole new one. ALONE has all rows. Otherwise every process must call it, with its own rows,
    and needs the same folder if it has any. Raises UserError if writing fails, as on a full disk.
    """
    with writing(path):  # any error becomes a UserError that names the path
        # Here and below all raise if one fails: the caller goes on without the file, and a process
        # that fails alone would miss the collectives that follow.
        with process.raise_on_all():
            sections = split_weights(weights, optimizer_state)  # {"model": {name: OwnRows}, ...}
            own_sums = sum_own_rows(sections)  # {"model": 83, ...}
        checksums = sum_over_processes(own_sums, process)  # of all rows of the file
        plain_entries = {
            # first, because is_own_checkpoint looks for it in the first bytes of a file
            "format_version": FORMAT_VERSION,
            "versions": {"torch": str(torch.__version__)},
            **entries,  # "step", "config", "tokenizer", ...
            "checksums": checksums,
        }
        if process.world_size == 1:  # or ALONE, the main process without sharding: it has all rows
            with atomic_write(path) as file:
                # tree_map returns the same nested dicts with a Tensor in place of each OwnRows
                torch.save(plain_entries | tree_map(whole_tensor, sections), file)
        else:
            write_together(path, sections, plain_entries, process)


def split_weights(weights: dict[str, OwnRows], optimizer_state: dict[str, dict]) -> Sections:
    """Return the sections of a file. A float32 weight becomes two tensors: a rounded bfloat16, and
    the int16 remainder that restores the float32 (split_float32)."""
    high: dict[str, OwnRows] = {}  # bfloat16, and the buffers of integers
    low: dict[str, OwnRows] = {}  # int16 remainders
    for name, own_rows in weights.items():
        if own_rows.content.dtype is not torch.float32:  # a buffer of integers
            high[name] = own_rows
            continue
        high_content, low_content = split_float32(own_rows.content)  # bfloat16 and int16
        high[name] = replace(own_rows, content=high_content)
        low[name] = replace(own_rows, content=low_content)
    return {"model": high, "model_low": low, "optimizer": optimizer_state}


def sum_own_rows(sections: Sections) -> dict[str, int]:
    """Return the part of the checksum of each section that is of the rows of this process. No two
    processes have the same rows."""
    own_sums: dict[str, int] = {}
    for section, own_rows_by_name in sections.items():
        own_sums[section] = 0
        # {"lm_head.weight exp_avg": OwnRows, ...} of the section "optimizer"
        for name, own_rows in flatten(own_rows_by_name).items():
            # the sum of the CRC-32 of each row, with its index and the name of the tensor: `rows`
            # are [0, 1], `content` is (2, 768)
            own_sums[section] += sum_rows(name, own_rows.rows.tolist(), own_rows.content)
    return own_sums


def sum_over_processes(own_sums: dict[str, int], process: Process) -> dict[str, int]:
    """Return the checksum of each section: a checksum is a sum over rows, so the sums of all
    processes add up to it. Every process must call it."""
    # {0: {"model": 83, ...}, 1: {"model": 17, ...}} gives {"model": 100, ...}
    sums_by_rank = process.merge({process.rank: own_sums})
    return {section: sum(sums[section] for sums in sums_by_rank.values()) for section in own_sums}


def whole_tensor(leaf: object) -> object:
    """Return the whole tensor of an OwnRows, and a plain value unchanged. Call it in a process that
    writes alone, and so has all rows."""
    # `view`, because an OwnRows has a vector (768,) as one row (1, 768)
    return leaf.content.view(leaf.shape) if isinstance(leaf, OwnRows) else leaf


# several processes


def write_together(path: Path, sections: Sections, plain_entries: dict, process: Process) -> None:
    """Write a checkpoint of several processes atomically, in the steps of this file's docstring.
    `sections` has the OwnRows of this process, `plain_entries` everything but tensors, with the
    checksums. Every process must call it."""
    # {0: ("model_last.pt.3f9c....tmp", offsets)}: of rank 0; `merge` sends it to all
    layout: dict[int, tuple[str, Offsets]] = {}
    try:
        with process.raise_on_all():
            if process.is_main:
                layout[0] = lay_out(path, sections, plain_entries)  # writes the file, with gaps
        temporary_name, offsets = process.merge(layout)[0]  # offsets: where each gap begins
        # All processes write into this file. The main process renames it when it is complete.
        temporary = path.with_name(temporary_name)
        # a write may take longer than a collective waits
        with process.raise_on_all(), process.without_timeout():
            write_own_rows(temporary, sections, offsets)  # into the gaps
        # Read it back before it replaces a good file: a network file system may have lost rows.
        if read_checksums(temporary, sections, process) != plain_entries["checksums"]:
            raise UserError("the file has other content than the processes have written")
        # last, so that an error on the main process alone changes nothing for the others
        if process.is_main:
            replace_file(temporary, path)
    except Exception:
        if process.is_main:
            # an error of `unlink` would hide the reason of the failure
            with contextlib.suppress(OSError):
                remove_temporary_files(path)
        raise


def remove_temporary_files(path: Path) -> None:
    """Remove what failed or killed saves of the file `path` have left in its folder."""
    for temporary in path.parent.glob(f"{path.name}.*.tmp"):
        temporary.unlink()


def empty_tensor(leaf: object) -> object:
    """Return an empty tensor with the shape of the whole one of an OwnRows, and a plain value
    unchanged. Call it in FakeTensorMode."""
    if isinstance(leaf, OwnRows):
        return torch.empty(leaf.shape, dtype=leaf.content.dtype)
    return leaf


def lay_out(path: Path, sections: Sections, plain_entries: dict) -> tuple[str, Offsets]:
    """Write a checkpoint with gaps in place of the tensors beside `path`. Return the name of the
    file, and where each gap begins. Gaps take no disk space until processes fill them."""
    remove_temporary_files(path)
    # A new name for each file: under the name of an earlier one, which was renamed, another machine
    # may still find the file of before, and write into a good checkpoint (NFS).
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with FakeTensorMode():  # tensors with a shape and a dtype, without memory
        fake_sections = tree_map(empty_tensor, sections)  # OwnRows -> fake tensor, whole shape
    # skip_data: torch.save leaves the bytes of tensors empty
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(plain_entries | fake_sections, temporary)

    # In this mode torch.load reads no tensors, but sets _checkpoint_offset: where the tensor begins
    # in the file, in bytes.
    with FakeTensorMode():
        fake_checkpoint = torch.load(temporary, weights_only=True)
    # {"optimizer": {"lm_head.weight exp_avg": 78464, ...}, ...}: where each gap begins, in bytes
    offsets: Offsets = {}
    for section in sections:
        fake_tensors = flatten(fake_checkpoint[section])  # without plain values, such as a counter
        offsets[section] = {
            name: x.untyped_storage()._checkpoint_offset for name, x in fake_tensors.items()
        }
    forget_pages(temporary)
    return temporary.name, offsets


def forget_pages(path: Path) -> None:
    """Write what this machine caches of a file to the disk and drop it from the cache. NFS could
    write a cached page, with gaps, over rows that another machine has written since."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # 0, 0: the whole file


def write_own_rows(path: Path, sections: Sections, offsets: Offsets) -> None:
    """Write the rows of this process into a file that lay_out has made, and force them to disk.
    `offsets` is what lay_out returned."""
    # A process has no rows here if others write the same ones. It may lack the folder.
    if count_own_rows(sections) == 0:
        return
    # Write-only: otherwise NFS may read a page and write it back over rows of another machine.
    with open(os.open(path, os.O_WRONLY), "wb") as file:
        for section, own_rows_by_name in sections.items():
            for name, own_rows in flatten(own_rows_by_name).items():
                write_rows(file, offsets[section][name], own_rows)
        file.flush()
        os.fsync(file.fileno())


def write_rows(file: io.BufferedWriter, offset: int, own_rows: OwnRows) -> None:
    """Write the rows of one tensor into its gap, which begins at the byte `offset` of the file."""
    # uint8 (r, bytes of a row); `content` is on the CPU, and a vector (1, n) is one row
    row_bytes = own_rows.content.contiguous().flatten(1).view(torch.uint8)
    # Write rows with consecutive indices at once: split where an index is skipped. The rows 0, 1,
    # 4, 5 break at [2], into 0, 1 and 4, 5.
    breaks = torch.nonzero(own_rows.rows.diff() != 1).flatten() + 1
    row_chunks = own_rows.rows.tensor_split(breaks)
    byte_chunks = row_bytes.tensor_split(breaks)
    for rows, chunk in zip(row_chunks, byte_chunks, strict=True):
        if len(rows) > 0:  # 0 if another process writes this tensor
            file.seek(offset + int(rows[0]) * chunk.size(1))  # skips the rows before rows[0]
            file.write(chunk.numpy().data)


def count_own_rows(sections: Sections) -> int:
    """Return the number of rows that this process writes."""
    leaves = tree_leaves(sections)  # OwnRows, and plain values such as a counter
    return sum(len(leaf.rows) for leaf in leaves if isinstance(leaf, OwnRows))


def read_checksums(path: Path, sections: Sections, process: Process) -> dict[str, int]:
    """Return the checksum of each section of a file that write_own_rows has filled, computed from
    what the file holds now. `sections` has the OwnRows of this process. Every process must call it.
    The processes that have written rows read equally many. Others may lack the folder."""
    rows_by_rank = process.merge({process.rank: count_own_rows(sections)})  # {0: 120, 1: 0}
    writers = [rank for rank, num_rows in rows_by_rank.items() if num_rows > 0]
    own_sums = {"model": 0, "model_low": 0, "optimizer": 0}  # of the rows that this process reads
    with process.raise_on_all(), process.without_timeout():
        if process.rank in writers:
            # as a Mapping, because mypy wants literal keys for a TypedDict
            checkpoint: Mapping[str, Any] = load_checkpoint(path)  # maps the file, reads no tensor
            index = writers.index(process.rank)  # of 4 writers, 1 reads the second quarter
            for section in own_sums:
                own_sums[section] = sum_part(flatten(checkpoint[section]), index, len(writers))
    return sum_over_processes(own_sums, process)
