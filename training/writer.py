"""Writer of checkpoint files: one process alone, or several that hold rows of the state.

No process has to hold the whole state: of several, the main process writes the file with gaps in
the place of the tensors, and then each fills in the rows that it holds. When to save, and under
which names, is training/saver.py's; the format of a file stands in model/formats/checkpoint.py.
"""

import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from model.formats.checkpoint import FORMAT_VERSION, flatten, split_float32, sum_rows
from training.parallel.own_rows import OwnRows
from utils.distributed import ALONE, Process
from utils.errors import writing
from utils.files import atomic_write, replace_file


def save_checkpoint(
    path: Path,
    weights: dict[str, OwnRows],
    optimizer_state: dict[str, dict[str, OwnRows]],
    entries: Mapping[str, object],
    process: Process = ALONE,
) -> None:
    """Write a file atomically, from what each process has of the float32 weights and the optimizer
    state: `path` is the old file or the whole new one. Every process must call it; those that have
    rows need the same folder. Raises UserError if it cannot be written, as on a full disk."""
    high: dict[str, OwnRows] = {}  # bfloat16
    low: dict[str, OwnRows] = {}  # int16
    for name, own_rows in weights.items():
        high_content, low_content = split_float32(own_rows.content)
        high[name] = replace(own_rows, content=high_content)
        low[name] = replace(own_rows, content=low_content)
    sections: dict[str, dict] = {"model": high, "model_low": low, "optimizer": optimizer_state}

    # A checksum is a sum over rows: each process adds up its own, and each row is in the OwnRows of
    # one process only.
    checksums: dict[str, int] = {}
    for section, own_rows_by_name in sections.items():
        total = 0
        for name, own_rows in flatten(own_rows_by_name).items():
            total += sum_rows(name, own_rows.rows.tolist(), own_rows.content)
        checksums[section] = sum(process.merge({process.rank: total}).values())

    content = {
        # the first key: `is_own` of model/formats/checkpoint.py looks for it there
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__)},
        **entries,
        "checksums": checksums,
    }
    with writing(path):  # any error becomes a UserError that names the path
        if process.world_size == 1:
            with atomic_write(path) as file:
                # tree_map returns the same nested dicts, with a Tensor in place of each OwnRows
                torch.save(content | tree_map(whole_tensor, sections), file)
        else:
            write_together(path, sections, content, process)


def whole_tensor(own_rows: OwnRows) -> Tensor:
    """Return the tensor whose rows this process has all."""
    return own_rows.content.view(own_rows.shape)


# several processes


def write_together(path: Path, sections: dict[str, dict], content: dict, process: Process) -> None:
    """Write a checkpoint atomically, of which each process has some rows. `sections` has the
    OwnRows of this process, `content` everything beside tensors. Every process must call it."""
    # all of them write into this file; it is renamed when it is complete
    temporary = path.with_name(path.name + ".tmp")
    # The main process puts the offsets of the tensors under its rank, 0, for `merge` to send.
    offsets: dict[int, dict[str, dict[str, int]]] = {}
    try:
        # `together` raises an error of one process on all, so that none waits for the others
        with process.together():
            if process.is_main:
                offsets[0] = lay_out(temporary, sections, content)
        offsets = process.merge(offsets)
        # In a thread, while all processes call short collectives: in a single one, those without
        # rows would wait for the others, and fail after TIMEOUT.
        with process.together(), ThreadPoolExecutor() as pool:
            written = pool.submit(write_own_rows, temporary, sections, offsets[0])
            process.wait_until(written.done)
            written.result()  # raises the error of write_own_rows
        if process.is_main:
            replace_file(temporary, path)
    except Exception:
        if process.is_main:
            # an error of `unlink` would hide why the save failed
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


def lay_out(path: Path, sections: dict[str, dict], content: dict) -> dict[str, dict[str, int]]:
    """Write a checkpoint whose tensors are gaps, which take no disk space until they are filled.
    Return where they begin in the file, in bytes, by section and name."""
    with FakeTensorMode():  # tensors with a shape and a dtype, without memory
        gaps = tree_map(empty_tensor, sections)
    # skip_data: torch.save leaves empty space in place of a tensor's bytes
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content | gaps, path)

    # In this mode torch.load reads no tensors and sets _checkpoint_offset: where they begin in the
    # file, in bytes.
    with FakeTensorMode():
        layout = torch.load(path, weights_only=True)
    offsets: dict[str, dict[str, int]] = {}
    for section in sections:
        tensors = flatten(layout[section])
        offsets[section] = {
            name: x.untyped_storage()._checkpoint_offset for name, x in tensors.items()
        }
    return offsets


def empty_tensor(own_rows: OwnRows) -> Tensor:
    """Return a tensor with room for all rows of a tensor; call it in FakeTensorMode."""
    return torch.empty(own_rows.shape, dtype=own_rows.content.dtype)


def write_own_rows(
    path: Path, sections: dict[str, dict], offsets: dict[str, dict[str, int]]
) -> None:
    """Write the rows of this process into a file of lay_out, which returned the offsets, and force
    them to disk."""
    # A process whose rows another one writes has none here, and may lack the folder.
    if sum(len(own_rows.rows) for own_rows in tree_leaves(sections)) == 0:
        return
    # Write-only, or NFS may read a page and write it back over rows of another machine.
    with open(os.open(path, os.O_WRONLY), "wb") as file:
        for section, own_rows_by_name in sections.items():
            for name, own_rows in flatten(own_rows_by_name).items():
                row_bytes = own_rows.content.contiguous().view(torch.uint8)  # (r, bytes of a row)
                # Rows with consecutive indices are written at once: split where one is skipped.
                breaks = torch.nonzero(own_rows.rows.diff() != 1).flatten() + 1
                consecutive_rows = own_rows.rows.tensor_split(breaks)
                consecutive_bytes = row_bytes.tensor_split(breaks)
                for rows, content in zip(consecutive_rows, consecutive_bytes, strict=True):
                    if len(rows) > 0:  # empty if another process writes this tensor
                        file.seek(offsets[section][name] + int(rows[0]) * content.size(1))
                        file.write(content.numpy())
        file.flush()
        os.fsync(file.fileno())
