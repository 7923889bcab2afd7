"""Options of train.py from files, and what nanoGPT's options are called here."""

import json
import tomllib
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import get_type_hints

from config import ConfigError, TrainConfig, has_type

PER_LAUNCH = ("config", "resume", "overwrite", "dry_run", "profile")  # a config.json has them
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
    "compile": "--use_torch_compile compiles the training step; leave it out for off",
    "wandb_log": "--wandb logs to Weights & Biases",
    "wandb_project": "--wandb logs to the project gpt2",
    "wandb_run_name": "--wandb names the run by itself",
    "backend": "NCCL is used on CUDA, gloo elsewhere",
    "bias": "--recipe gpt2,bias=False trains without biases",
}


def read_config_file(path: Path) -> dict:
    """Return the options in a .toml file, or those of a run in its config.json; raise ConfigError
    if there is an unknown one."""
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        values = values.get("train_config", values)
        if type(values) is not dict:
            raise ValueError("it holds no options")
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--config {path} is neither TOML nor a config.json: {error}") from error
    known, kinds = [f.name for f in fields(TrainConfig)], get_type_hints(TrainConfig)
    for name, value in values.items():
        if name in known and not has_type(value, kinds[name]):
            raise ConfigError(f"--config {path}: {name} = {value!r} is of a wrong type; see --help")
        if path.suffix == ".toml" and name in (
            "config",
            "resume",
            "overwrite",
            "dry_run",
            "profile",
        ):
            raise ConfigError(f"--config {path}: give --{name} on the command line")
        if name not in (*known, "resolved_recipe", "chosen"):
            near = get_close_matches(name, known, 1)
            meant = NANOGPT_OPTIONS.get(name) or (
                f"did you mean {near[0]}?" if near else "see --help"
            )
            raise ConfigError(f"--config {path}: there is no option {name}: {meant}")
    return values
