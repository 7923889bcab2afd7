"""Options of a run of finetune.py: the command line over those of the checkpoint it resumes."""

import sys
from dataclasses import fields, replace
from pathlib import Path

from training.initial_model import checkpoint_to_start_from
from training.run_folders import (
    best_loss,
    check_encoding,
    checkpoint_to_resume,
    find_unsaved_run,
)
from utils.log_files import CONFIG

from config import mistyped
from finetuning.options import FinetuneConfig
from training import checkpoint as ckpt
from utils.cli import given_options, parse
from utils.distributed import is_main
from utils.errors import UserError

PATHS = ("data", "eval_data", "questions", "checkpoint_dir", "log_dir")
PER_LAUNCH = {"resume": None, "overwrite": False}
FOLDERS = {"resume", "method", "checkpoint_dir", "log_dir"}
# default learning rates after warmup, those of trl
LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "reward": 1e-4, "grpo": 1e-6}


def resolve_run() -> tuple[FinetuneConfig, dict | None]:
    """Return the options of this run, and the checkpoint that it resumes, if any, which has the
    options that are not on the command line."""
    options, saved = parse(FinetuneConfig), None
    if options.resume and options.overwrite:
        raise UserError("--resume continues a run, --overwrite replaces it: give one of the two")
    folder = with_folders(options).checkpoint_dir if options.resume == "auto" else Path()
    path = checkpoint_to_resume(options.resume, folder)
    if options.resume == "auto" and path is None:
        options = begun_before(options)
    if path is not None:
        saved = ckpt.load_checkpoint(path)
        before = saved_options(saved, path)
        options = parse(FinetuneConfig, default=before)
        keep_start(before, options)
        check_unchanged(before, options, path)
        if options.max_steps is not None and saved["step"] > options.max_steps:
            raise UserError(
                f"{path} is at step {saved['step']}, after --max_steps {options.max_steps}; give a "
                "larger one to continue"
            )
        options.resume = str(path)
    elif options.init_from:
        options.init_from = str(checkpoint_to_start_from(options.init_from) or options.init_from)
    options.check()
    options = with_folders(options)
    if options.max_lr is None:
        options.max_lr = LEARNING_RATES[options.method]
    check_encoding(options.checkpoint_dir)
    if saved:
        saved["best_loss"] = min(saved["best_loss"], best_loss(options.checkpoint_dir, saved))
    return options, saved


def begun_before(options: FinetuneConfig) -> FinetuneConfig:
    """Return the options of the run in these folders if it ended before its first checkpoint and
    the command line has nothing but folders; else the options."""
    folders = with_folders(options)
    run = find_unsaved_run(folders.checkpoint_dir, folders.log_dir, finetunes=True)
    if run is None or not given_options(sys.argv[1:]) <= FOLDERS:
        return options
    path = folders.log_dir / CONFIG
    if is_main():
        print(f"no checkpoint in {folders.checkpoint_dir}: beginning again with those of {path}")
    before = saved_options(run, path)
    options = parse(FinetuneConfig, default=before)
    check_unchanged(before, options, path)
    return options


def keep_start(before: FinetuneConfig, now: FinetuneConfig) -> None:
    """Replace a folder in --init_from of a resumed run by the checkpoint that it began from."""
    if now.init_from == before.init_from or not before.init_from:
        return
    begun, given = Path(before.init_from), Path(now.init_from)
    if begun.resolve().is_relative_to(given.resolve()):
        now.init_from = before.init_from
    else:
        now.init_from = str(checkpoint_to_start_from(now.init_from) or now.init_from)


def check_unchanged(before: FinetuneConfig, now: FinetuneConfig, path: Path) -> None:
    """Raise UserError if a resumed run is to have another method, model or kind of text. The
    model that it compares with may have another path; changed_inputs looks at its weights."""
    names = ("method", "block_size", "dropout", "plain")
    for name in names if before.needs_reference else (*names, "init_from"):
        was, value = getattr(before, name), getattr(now, name)
        if value != was:
            raise UserError(
                f"{path} is of a run with --{name} {was}, not {value}: leave it out, or begin "
                "another run in another --checkpoint_dir"
            )


def with_folders(options: FinetuneConfig) -> FinetuneConfig:
    """Return options with the default folders of their method."""
    folders = {"checkpoint_dir": "checkpoints", "log_dir": "logs"}
    missing = [name for name in folders if getattr(options, name) is None]
    if missing and options.method is None:
        raise UserError("give --method, or --checkpoint_dir and --log_dir of a run to resume")
    run = Path("runs") / str(options.method)
    return replace(options, **{name: run / folders[name] for name in missing})


def saved_options(saved: dict, path: Path) -> FinetuneConfig:
    """Return the options in a checkpoint of finetune.py; raise UserError for another one."""
    values = saved.get("finetune")
    if type(values) is not dict:
        raise UserError(f"{path} was written by train.py: begin from it by --init_from {path}")
    known = {f.name: values[f.name] for f in fields(FinetuneConfig) if f.name in values}
    if wrong := mistyped(known, FinetuneConfig):
        raise UserError(f"{path}: the saved options are damaged: {', '.join(wrong)}")
    if "model_config" in saved:
        known["block_size"] = ckpt.model_config(saved, path).block_size
    paths = {name: Path(known[name]) for name in PATHS if known.get(name) is not None}
    return FinetuneConfig(**{**known, **paths, **PER_LAUNCH})
