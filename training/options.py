"""Options of train.py from files, and what nanoGPT's options are called here."""

import json
import tomllib
from dataclasses import fields
from pathlib import Path

from config import PER_LAUNCH, TrainConfig, mistyped
from utils.cli import parse
from utils.devices import pick_device
from utils.errors import UserError, did_you_mean
from utils.gpus import NAMED_GPUS

NANOGPT_OPTIONS = {  # nanoGPT's options without an equal of the same name: docs/NANOGPT.md
    "batch_size": "--micro_batch_size is the number of sequences in a forward pass",
    "gradient_accumulation_steps": "it follows from --total_batch_size, in tokens",
    "learning_rate": "--max_lr is the learning rate after warmup",
    "max_iters": "--max_steps is the number of optimizer steps",
    "lr_decay_iters": "the learning rate decays until --max_steps",
    "warmup_iters": "--warmup_steps is the number of warmup steps",
    "decay_lr": "--min_lr equal to --max_lr keeps the learning rate constant after warmup",
    "eval_interval": "--eval_every is the number of steps between validations",
    "eval_iters": "--val_tokens is the number of validation tokens",
    "eval_only": "python evaluate.py --tasks val computes the validation loss of a checkpoint",
    "log_interval": "every step is logged in metrics.jsonl",
    "always_save_checkpoint": "--save_every saves model_last.pt, each new best is model_best.pt",
    "out_dir": "give --checkpoint_dir and --log_dir",
    "dataset": "--data_dir is the folder of shards; data/fineweb-edu.py --input makes them of text",
    "compile": "--use_torch_compile compiles the training step, --no_use_torch_compile does not",
    "wandb_log": "--wandb logs to Weights & Biases",
    "wandb_project": "--wandb logs to the project gpt2",
    "wandb_run_name": "--wandb names the run by itself",
    "backend": "NCCL is used on CUDA, gloo elsewhere",
    "bias": "--recipe gpt2,bias=False trains without biases",
}


def parse_options(args: list[str] | None = None) -> tuple[TrainConfig, dict]:
    """Return the options of the command line, or of `args`, over those in the file of --config, and
    the latter alone."""
    config = parse(TrainConfig, hints=NANOGPT_OPTIONS, args=args)
    file = read_config_file(config.config) if config.config else {}
    if file:
        config = parse(TrainConfig, default=TrainConfig.from_dict(file), args=args)
    return config, file


def should_compile(config: TrainConfig, given: set[str]) -> bool:
    """Return whether to compile training: as the options say if that is among the `given` ones, of
    the command line, --config or a checkpoint; else on CUDA alone."""
    if given & {"use_torch_compile", "no_use_torch_compile"}:
        return config.use_torch_compile
    try:
        return config.device in NAMED_GPUS or pick_device(config.device).type == "cuda"
    except UserError as error:
        raise UserError(f"{error}; --dry_run also knows {', '.join(NAMED_GPUS)}") from error


def read_config_file(path: Path) -> dict:
    """Return the options in a .toml file, or those of a run in its config.json; raise UserError
    if there is an unknown one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        values = values.get("train_config", values)
        if type(values) is not dict:
            raise ValueError("it holds no options")
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"--config {path} is neither TOML nor a config.json ({error}); configs/ has examples"
        ) from error
    if wrong := mistyped(values):
        value = values[wrong[0]]
        raise UserError(f"--config {path}: {wrong[0]} = {value!r} is of a wrong type; see --help")
    known = [f.name for f in fields(TrainConfig)]
    for name, value in values.items():
        if value == "":
            raise UserError(f'--config {path}: {name} = "" has no value; give one, or leave it out')
        if path.suffix == ".toml" and name in PER_LAUNCH:
            raise UserError(f"--config {path}: give --{name} on the command line")
        if name not in (*known, "resolved_recipe", "chosen"):
            hint = (
                f": {NANOGPT_OPTIONS[name]}"
                if name in NANOGPT_OPTIONS
                else did_you_mean(name, known)
            )
            raise UserError(f"--config {path}: there is no option {name}{hint}")
    return values
