"""Options of a run, and their checks: the command line over the checkpoint that it resumes."""

import sys
import zlib
from dataclasses import asdict, replace
from pathlib import Path

import torch

from config import TrainConfig
from data.loader import Sequences, TokenStream
from data.shards import is_interrupted
from training import checkpoint as ckpt
from training.checkpoint_folder import BEST, STABLE
from training.initial_model import initial_shape
from training.options import parse_options, should_compile
from training.run_folders import (
    best_loss,
    check_encoding,
    check_folders,
    check_not_copied,
    checkpoint_to_resume,
    find_unsaved_run,
)
from training.schedule import stable_steps
from training.state import has_same_validation
from utils.cli import given_options, parse
from utils.distributed import Process, is_main
from utils.errors import UserError
from utils.log_files import CONFIG
from utils.logger import require_package

FOLDERS = {"resume", "data_dir", "checkpoint_dir", "log_dir"}
FEW = 16  # validation sequences that give a rough loss


def resolve_run() -> tuple[TrainConfig, dict | None]:
    """Return the options of this run, and the checkpoint that it resumes, if any, which has the
    options that are not on the command line."""
    config, file = parse_options()
    if config.init_from in ("resume", "scratch"):
        raise UserError(
            f"--init_from {config.init_from}: --resume auto continues a run; new ones need neither"
        )
    if config.resume and config.overwrite:
        raise UserError("--resume continues a run, --overwrite replaces it: give one of the two")
    check_encoding(config.checkpoint_dir)
    given = given_options(sys.argv[1:])
    of_a_run = config.config is not None and config.config.suffix != ".toml"
    if of_a_run and config.resume == "auto":
        check_not_copied(config.config, file, given)
    path = checkpoint_to_resume(config.resume, config.checkpoint_dir)
    folders = config.checkpoint_dir, config.log_dir
    begins = config.resume == "auto" and path is None and given <= FOLDERS
    if begins and find_unsaved_run(*folders, finetunes=False):
        begun = config.log_dir / CONFIG
        if is_main():
            print(f"no checkpoint in {folders[0]}: beginning again with the options of {begun}")
        config, file = parse_options(["--config", str(begun), *sys.argv[1:]])
    saved = None
    if path is not None:
        saved = ckpt.load_checkpoint(path)
        if "finetune" in saved:
            raise UserError(
                f"{path} was written by finetune.py, which continues it; train.py begins from its "
                f"weights by --init_from {path}"
            )
        init_from, config = config.init_from, resumed_config(saved, path, file)
        begun_from = saved["train_config"].get("init_from")
        if init_from and Path(init_from).resolve() != Path(begun_from or "").resolve():
            raise UserError(
                f"{path} continues a run that was begun from {begun_from or 'random weights'}, not "
                f"from {init_from}: leave out --resume or --init_from, or give another "
                "--checkpoint_dir"
            )
        saved["best_loss"] = min(saved["best_loss"], best_loss(config.checkpoint_dir, saved))
    elif config.init_from:
        initial_shape(config)  # before the checks: the recipe says which rates are allowed
    before = saved["train_config"].keys() if saved else set()
    config.use_torch_compile = should_compile(config, given | file.keys() | before)
    if saved and "min_lr" not in given | file.keys():
        check_saved_min_lr(config)
    config.check()
    if config.resolved_recipe.model.get("reward_head"):
        raise UserError("a reward model is trained by finetune.py --method reward")
    check_extras(config)
    if not config.overwrite:
        # the folders in a config.json are those of its run
        check_folders(config, saved, path, given if of_a_run else given | file.keys())
    return config, saved


def resumed_config(saved: dict, path: Path, file: dict) -> TrainConfig:
    """Return the command line over the options of --config over those in a checkpoint; UserError
    where the model would have another shape or the run would already be over."""
    values = saved["train_config"] | file
    if "recipe" in file:
        values["resolved_recipe"] = None  # is of another recipe
    try:
        default = TrainConfig.from_dict(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    config = parse(TrainConfig, default=default)
    config.resume = str(path)
    shape = ckpt.model_config(saved, path)
    was = asdict(replace(shape, dropout=config.dropout))
    now = asdict(config.model_config(shape.vocab_size))
    names = [name for name in was if was[name] != now[name]]
    if changed := [f"{name} was {was[name]} and is {now[name]}" for name in names]:
        raise UserError(
            f"{path} holds a model of another shape: {', '.join(changed)}; leave out the options "
            "that change it, or start a new run in another --checkpoint_dir"
        )
    return config


def check_saved_min_lr(config: TrainConfig) -> None:
    """Raise UserError if --min_lr, taken from the checkpoint, is above a lower --max_lr."""
    max_lr = config.resolved_recipe.max_lr
    if config.min_lr is not None and config.min_lr > max_lr:
        raise UserError(
            f"--min_lr {config.min_lr} of the checkpoint is above --max_lr {max_lr}: give --min_lr "
            "as well"
        )


def already_done(config: TrainConfig, start: int) -> str:
    """Return a clause for a run that began at `start`, its last step; "" for any other."""
    if start < config.max_steps:
        return ""
    return f"; it was already at step {start} of {config.max_steps}: give a larger --max_steps"


def check_extras(config: TrainConfig) -> None:
    """Raise UserError or UserError for benchmark files or packages that are missing."""
    for path in (config.hellaswag_data, config.lambada_data):
        if path is not None and not path.is_file():
            raise UserError(f"there is no file {path}")
    for name in ("tensorboard", "wandb"):
        if getattr(config, name):
            require_package(name)


def check_checkpoint(
    config: TrainConfig, saved: dict | None, stream: TokenStream, process: Process
) -> None:
    """Raise UserError if the checkpoint does not suit the shards or the length of the run, or if
    other processes resume from another step or run; every process must call it."""
    if saved:
        found = f"{stream.vocab_size:,} {stream.tokenizer}"
        if found != (was := f"{saved['model_config']['vocab_size']:,} {saved['tokenizer']}"):
            raise UserError(f"{config.data_dir} has {found} tokens, the checkpoint {was} tokens")
        ckpt.verify(saved, Path(config.resume), "model", "model_low", "optimizer")
        if saved["step"] > config.max_steps:
            raise UserError(
                f"{config.resume} is at step {saved['step']}, after --max_steps "
                f"{config.max_steps}; give a larger one to continue"
            )
    step, run = (saved["step"], zlib.crc32(saved["run_id"].encode())) if saved else (-1, 0)
    if not torch.equal(*process.min_max(torch.tensor([step, run], device=process.device))):
        found = f"resumes from {config.resume}, step {step}" if saved else "found no checkpoint"
        raise UserError(
            f"rank {process.rank} {found}, other ranks from another step or run; is "
            "--checkpoint_dir a folder that all machines share?"
        )


def length_warnings(config: TrainConfig, val_sequences: int) -> list[str]:
    """Return sentences on a validation text or a run that is too short."""
    notes = []
    if val_sequences < FEW:
        notes.append(f"warning: the validation text is {val_sequences} sequences: a rough loss")
    if config.resolved_warmup >= config.max_steps:
        notes.append(
            f"warning: --warmup_steps {config.resolved_warmup} are not over by --max_steps "
            f"{config.max_steps}: give {max(1, config.max_steps // 10)} or less"
        )
    return notes


def run_warnings(
    config: TrainConfig, saved: dict | None, train: Sequences, val: Sequences
) -> list[str]:
    """Return what length_warnings and resume_warnings find."""
    notes = length_warnings(config, len(val))
    if is_interrupted(config.data_dir):
        notes.append(
            f"warning: {config.data_dir} is not whole: sharding was interrupted; run its command "
            "again"
        )
    if train.stream.has_low_ids:
        notes.append(
            f"warning: {config.data_dir} is read as GPT-2 tokens, but its first ids are all below "
            "10,000: with another tokenizer, shard the text by data/fineweb-edu.py"
        )
    return notes + resume_warnings(config, saved, train.stream, val)


def resume_warnings(
    config: TrainConfig, saved: dict | None, train: TokenStream, val: Sequences
) -> list[str]:
    """Return sentences on what differs from the checkpoint and changes the result: the order of
    data or of sums, the recipe, the validation text."""
    if saved is None and config.init_from:
        name = f"{config.init_from}, recipe {config.recipe}"
        return [f"weights of {name}; optimizer, schedule and step are new"]
    if saved is None:
        return []
    if not saved["optimizer"]:  # before the first step, or converted
        return [f"note: {config.resume} holds weights alone; --init_from begins a run from these"]
    then, now = saved["train_config"], config.to_dict()
    names = ("total_batch_size", "seed")
    changed = [f"--{n} was {then[n]}" for n in names if then.get(n, now[n]) != now[n]]
    if saved["train_tokens"] not in (0, len(train)):
        changed.append(f"there were {saved['train_tokens']:,} train tokens")
    end = "the data order changes from here on, so this epoch may repeat or miss sequences"
    notes = [f"warning: when the checkpoint was written {what}; {end}" for what in changed]
    if not has_same_validation(config, saved, val):
        notes.append(
            "warning: the validation text is another one, or more or less of it: the best loss "
            f"starts anew, and {BEST} is replaced at the next validation"
        )
    if then.get("max_steps") != config.max_steps and not config.resolved_recipe.schedule == "wsd":
        notes.append(
            f"note: --max_steps was {then['max_steps']} and is {config.max_steps}: the learning "
            "rate follows the new length"
        )
    before = then.get("resolved_recipe", then.get("chosen", {}))  # older checkpoints: chosen
    for name, value in before.items():
        if value != (new := now["resolved_recipe"].get(name)):
            given = any(options.get(name) is not None for options in (then, now))
            what = f"--{name}" if given else f"the recipe's {name}"
            notes.append(f"note: {what} was {value} and is {new}")
    if before.get("schedule") == "wsd" and config.max_steps > then["max_steps"]:
        if saved["step"] > stable_steps(then["max_steps"], before["decay"]):
            notes.append(
                f"warning: this checkpoint has begun to decay; {STABLE} is for a longer run"
            )
    micro, was = config.micro_batch_size, then.get("micro_batch_size")
    if was != micro:
        notes.append(
            f"note: --micro_batch_size was {was} and is {micro}: sums are rounded in another order"
            + (", dropout masks differ" if config.dropout else "")
        )
    return notes
