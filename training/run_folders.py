"""Folders of a run: whether it may write to them, what it must not replace there, their locks."""

import contextlib
import errno
import json
import math
import os
import zlib
from itertools import chain, count
from pathlib import Path

import torch

from config import TrainConfig
from training import checkpoint as ckpt
from training.checkpoint_folder import (
    BEST,
    LAST,
    STABLE,
    checkpoint_folder,
    find_newest,
    numbered_checkpoints,
    step_of,
    step_of_best,
)
from utils.distributed import Process
from utils.errors import UserError
from utils.files import check_space, link_or_copy, lock_folder
from utils.log_files import CONFIG, logged_run
from utils.logger import catch_write_errors

# options, beside paths, in which the machines of a run may differ
OF_A_MACHINE = ("device", "resume", "config", "init_from", "chosen")


def best_loss(folder: Path, saved: dict) -> float:
    """Return the loss of the best checkpoint in a folder, infinity if it is not of the run `saved`
    or of other validation tokens. model_last.pt is written before its step is validated."""
    try:
        best = ckpt.load_checkpoint(folder / BEST)
    except UserError:
        return math.inf
    same = all(best.get(name) == saved.get(name) for name in ("run_id", "val_checksum"))
    tokens = [state["train_config"].get("val_tokens") for state in (best, saved)]
    return best["best_loss"] if same and tokens[0] == tokens[1] else math.inf


def checkpoint_to_resume(resume: str | None, checkpoint_dir: Path) -> Path | None:
    """Return the checkpoint that --resume names: a file, the newest one of a folder, or for auto of
    `checkpoint_dir`; None for a new run."""
    if not resume:
        return None
    if resume == "auto":
        return find_newest(checkpoint_dir)
    path = Path(resume)
    if path.is_dir():
        path = find_newest(checkpoint_folder(path))
    if path is None:
        raise UserError(f"--resume {resume}: the folder holds no checkpoint")
    return path


def find_unsaved_run(checkpoint_dir: Path, log_dir: Path, *, finetunes: bool) -> dict | None:
    """Return the config.json of a run of train.py, or of finetune.py, that ended before its first
    checkpoint in a folder; None if there was none."""
    try:
        run = json.loads((log_dir / CONFIG).read_text(encoding="utf-8"))
        same = run["train_config"]["checkpoint_dir"] == str(checkpoint_dir)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return run if same and ("finetune" in run) == finetunes else None


def check_equal_options(config: TrainConfig, process: Process) -> None:
    """Raise UserError on every process unless all have the same options, but for paths and the
    device."""
    values = config.to_dict()
    for name in [n for n in values if n.endswith(("_dir", "_data")) or n in OF_A_MACHINE]:
        del values[name]
    found = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    if not torch.equal(*process.min_max(torch.tensor([found], device=process.device))):
        raise UserError(
            "the processes have different options; do all machines share --checkpoint_dir and "
            "--log_dir, and have the same command line?"
        )


def check_encoding(folder: Path) -> None:
    """Raise UserError for a folder whose checkpoints torch.load could not map from disk."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--checkpoint_dir {str(folder)!a} is not valid UTF-8, so PyTorch could not read the "
            "checkpoints again; give another folder"
        ) from error


def check_not_copied(path: Path, file: dict, given: set[str]) -> None:
    """Raise UserError if a config.json of the options `file` is a copy, whose folders are those
    of the original run, and one of them was not `given` on the command line."""
    log_dir = Path(file.get("log_dir", path.parent))
    missing = [name for name in ("checkpoint_dir", "log_dir") if name not in given]
    if missing and path.resolve().parent != log_dir.resolve():
        raise UserError(
            f"{path} is not in {log_dir}, where its run wrote: give --{missing[0]}, so that it is "
            f"clear where to continue, as --checkpoint_dir FOLDER --log_dir {path.parent}"
        )


def check_folders(
    config: TrainConfig, saved: dict | None, path: Path | None, given: set[str]
) -> None:
    """Raise UserError if the run would write over the checkpoints or the log of another one, or
    of the one that it resumes a copy of; `given` are the options that were given this time."""
    folder, log = config.checkpoint_dir, logged_run(config.log_dir)
    here = path.resolve().parent if path else None
    was = Path(saved["train_config"].get("checkpoint_dir", "")) if saved else None
    moved = was is not None and here != was.resolve()
    remedy: list[str] = []
    for name in ("checkpoint_dir", "log_dir") if moved else ():
        if name not in given:
            raise UserError(
                f"{path} is not in {was}, where its run wrote: give --{name}, so that it is clear "
                f"where to continue, as --checkpoint_dir {path.parent} --log_dir FOLDER"
            )
    newest = find_newest(folder) if here != folder.resolve() else None
    held = ckpt.load_checkpoint(newest) if newest else None
    if held and (saved is None or held["run_id"] != saved["run_id"]):
        found, flag = f"{folder} holds the checkpoints of another run", "--checkpoint_dir"
    elif held and held["step"] > saved["step"]:
        found = f"{newest} is at step {held['step']}, {path} at step {saved['step']}"
        flag = "--checkpoint_dir"
    elif log is not None and not continues_log(config, saved, moved, log):
        found, flag = f"{config.log_dir} holds the log of another run", "--log_dir"
        if not log:
            path, remedy = config.log_dir / CONFIG, ["restore it"]
            state = "damaged" if path.exists() else "missing"
            found = f"{path} is {state}, which says what run the log beside it is of"
    else:
        return
    ways = remedy if config.resume else [*remedy, "continue it with --resume auto"]
    ways.append(f"give another {flag}")
    ways += [] if config.resume else ["replace it with --overwrite"]
    raise UserError(f"{found}; {', or '.join(ways)}")


def continues_log(config: TrainConfig, saved: dict | None, moved: bool, log: dict) -> bool:
    """Return whether a log, by its config.json, is that of the run that is resumed in its folder,
    or of one that was killed before its first checkpoint."""
    if saved and "run_id" in log:
        return log["run_id"] == saved["run_id"]
    same_folder = log.get("train_config", {}).get("checkpoint_dir") == str(config.checkpoint_dir)
    return bool(saved and not moved) or (config.resume is not None and same_folder)


def check_writable(folder: Path) -> None:
    """Raise PermissionError unless files can be made in a folder."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def lock_folders(
    config: TrainConfig, step: int, process: Process, checkpoint_bytes: int
) -> list[str]:
    """Keep other runs out of the folders of this one until its process ends, and a later
    model_last.pt than the checkpoint of `step`; return a sentence on that.

    Raises a UserError on every process if another run holds a folder or has gone on past `step`,
    where this one resumes; if a folder cannot be written; or if the disk lacks room for the last,
    the best and a temporary checkpoint of `checkpoint_bytes`.
    """
    check_equal_options(config, process)
    problem: Exception | None = None
    notes: list[str] = []
    if process.is_main:
        folder = config.checkpoint_dir
        try:
            with catch_write_errors(config.log_dir):
                lock_folder(config.log_dir, "writing the log in")
                check_writable(config.log_dir)
            if folder.resolve() != config.log_dir.resolve():
                lock_folder(folder, "training into")
            check_writable(folder)
            newest = find_newest(folder)
            if config.resume and newest == Path(config.resume) and newest.name == LAST:
                if ckpt.load_checkpoint(newest)["step"] != step:
                    raise UserError(f"{newest} has just been replaced; start this command again")
            if config.resume and Path(config.resume).resolve().parent == folder.resolve():
                notes = go_back(folder, Path(config.resume), step)
            held = (folder / name for name in (LAST, BEST))
            held_bytes = sum(path.stat().st_size for path in held if path.exists())
            check_space(folder, 3 * checkpoint_bytes - held_bytes, "saving this run")
        except FileExistsError:
            problem = UserError(f"--checkpoint_dir {folder} is a file; give a folder")
        except OSError as error:
            problem = UserError(f"--checkpoint_dir {folder} cannot be written: {error.strerror}")
        except UserError as error:
            problem = error
    if not process.all_agree(problem is None):
        raise problem or UserError("the main process cannot write to --checkpoint_dir, --log_dir")
    return notes


def go_back(folder: Path, resumed: Path, step: int) -> list[str]:
    """Make a checkpoint of the folder, of `step`, its model_last.pt, which --resume auto continues.
    The one before, which may be of another branch, and those of later steps, which the run would
    replace, get names that no run replaces. Return sentences on them, if there are any.
    """
    last = folder / LAST
    if last.exists() and resumed.samefile(last):
        return []
    later = {path: step_of(path) for path in numbered_checkpoints(folder) if step_of(path) > step}
    for path, first in ((folder / STABLE, step + 1), (last, 0)):
        with contextlib.suppress(UserError):  # none, or one that cannot be used
            if (found := ckpt.load_checkpoint(path)["step"]) >= first:
                later[path] = found
    if not later:
        return []
    kept = [f"{path.name} is kept as {link_kept(path, at)}" for path, at in later.items()]
    notes = []
    if (at := later.pop(last, None)) is not None:
        link_or_copy(resumed, last)
        if at < step:
            notes = [
                f"note: the rows of the log before step {step} stay those of the run until now"
            ]
    for path in later:
        path.unlink()
    if (best := step_of_best(folder)) is not None:
        kept.append(f"{BEST}, of step {best}, stays until there is a lower loss")
    return [f"note: continuing at step {step}: {', '.join(kept)}", *notes]


def link_kept(path: Path, step: int) -> str:
    """Link a checkpoint as model_kept_{step}.pt, or as the next name that is free; return it."""
    suffixes = chain([""], map("_{}".format, count(2)))
    names = (path.with_name(f"model_kept_{step:06d}{suffix}.pt") for suffix in suffixes)
    kept = next(name for name in names if not name.exists() or name.samefile(path))
    link_or_copy(path, kept)
    return kept.name
