"""Writer of checkpoint files: one process alone, or several that hold parts of the state.

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
from training.parallel.own_rows import Piece
from utils.distributed import ALONE, Process
from utils.errors import writing
from utils.files import atomic_write, replace_file


def save_checkpoint(
    path: Path,
    weights: dict[str, Piece],
    moments: dict[str, dict[str, Piece]],
    entries: Mapping[str, object],
    process: Process = ALONE,
) -> None:
    """Write a file atomically, from what each process has of the float32 weights and the optimizer
    state: `path` is the old file or the whole new one. Every process must call it; those that have
    rows need the same folder. Raises UserError if it cannot be written, as on a full disk."""
    high: dict[str, Piece] = {}  # bfloat16
    low: dict[str, Piece] = {}  # int16
    for name, piece in weights.items():
        high_values, low_values = split_float32(piece.values)
        high[name] = replace(piece, values=high_values)
        low[name] = replace(piece, values=low_values)
    parts: dict[str, dict] = {"model": high, "model_low": low, "optimizer": moments}

    # A checksum is a sum over rows: each process adds up its own, and each row is in the Piece of
    # one process only.
    checksums: dict[str, int] = {}
    for part, pieces in parts.items():
        total = 0
        for name, piece in flatten(pieces).items():
            total += sum_rows(name, piece.rows.tolist(), piece.values)
        checksums[part] = sum(process.merge({process.rank: total}).values())

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
                # tree_map returns the same nested dicts, with a Tensor in place of each Piece
                torch.save(content | tree_map(whole_tensor, parts), file)
        else:
            write_together(path, parts, content, process)


def whole_tensor(piece: Piece) -> Tensor:
    """Return the tensor of a piece that has all of its rows."""
    return piece.values.view(piece.shape)


# several processes


def write_together(path: Path, parts: dict[str, dict], content: dict, process: Process) -> None:
    """Write a checkpoint atomically, of which each process has some rows. `parts` has the Pieces of
    this process, `content` everything beside tensors. Every process must call it."""
    # all of them write into this file; it is renamed when it is complete
    temporary = path.with_name(path.name + ".tmp")
    # The main process puts the offsets of the tensors under its number, 0, for `merge` to send.
    offsets: dict[int, dict[str, dict[str, int]]] = {}
    try:
        # `together` raises an error of one process on all, so that none waits for the others
        with process.together():
            if process.is_main:
                offsets[0] = lay_out(temporary, parts, content)
        offsets = process.merge(offsets)
        # In a thread, while all processes call short collectives: in a single one, those without
        # rows would wait for the others, and fail after TIMEOUT.
        with process.together(), ThreadPoolExecutor() as pool:
            written = pool.submit(write_pieces, temporary, parts, offsets[0])
            process.wait_until(written.done)
            written.result()  # raises the error of write_pieces
        if process.is_main:
            replace_file(temporary, path)
    except Exception:
        if process.is_main:
            # an error of `unlink` would hide why the save failed
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise


def lay_out(path: Path, parts: dict[str, dict], content: dict) -> dict[str, dict[str, int]]:
    """Write a checkpoint whose tensors are gaps, which take no disk space until they are filled.
    Return where they begin in the file, in bytes, by part and name."""
    with FakeTensorMode():  # tensors with a shape and a dtype, without memory
        gaps = tree_map(empty_tensor, parts)
    # skip_data: torch.save leaves empty space in place of a tensor's bytes
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(content | gaps, path)

    # In this mode torch.load reads no tensors and sets _checkpoint_offset, their place in the file.
    with FakeTensorMode():
        layout = torch.load(path, weights_only=True)
    offsets: dict[str, dict[str, int]] = {}
    for part in parts:
        tensors = flatten(layout[part])
        offsets[part] = {
            name: x.untyped_storage()._checkpoint_offset for name, x in tensors.items()
        }
    return offsets


def empty_tensor(piece: Piece) -> Tensor:
    """Return a tensor for all rows of the tensor of a piece; call it in FakeTensorMode."""
    return torch.empty(piece.shape, dtype=piece.values.dtype)


def write_pieces(path: Path, parts: dict[str, dict], offsets: dict[str, dict[str, int]]) -> None:
    """Write the rows of this process into a file of lay_out, which returned the offsets, and force
    them to disk."""
    # A process whose rows another one writes has none here, and may lack the folder.
    if sum(len(piece.rows) for piece in tree_leaves(parts)) == 0:
        return
    # Write-only, or NFS may read a page and write it back over rows of another machine.
    with open(os.open(path, os.O_WRONLY), "wb") as file:
        for part, pieces in parts.items():
            for name, piece in flatten(pieces).items():
                row_bytes = piece.values.contiguous().view(torch.uint8)  # (r, bytes of a row)
                # Rows with consecutive indices are written at once: split where one is skipped.
                breaks = torch.nonzero(piece.rows.diff() != 1).flatten() + 1
                runs_of_rows = piece.rows.tensor_split(breaks)
                runs_of_bytes = row_bytes.tensor_split(breaks)
                for rows, values in zip(runs_of_rows, runs_of_bytes, strict=True):
                    if len(rows) > 0:  # empty if another process writes this tensor
                        file.seek(offsets[part][name] + int(rows[0]) * values.size(1))
                        file.write(values.numpy())
        file.flush()
        os.fsync(file.fileno())
