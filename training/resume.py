"""The settings of a training run: the command line, over the checkpoint that it resumes."""

from dataclasses import replace
from pathlib import Path

from config import ConfigError, TrainConfig
from model.config import GPTConfig
from training import checkpoint as ckpt
from training.schedule import stable_steps
from utils.cli import parse
from utils.logger import has_rows_of_another, require


def settings() -> tuple[TrainConfig, dict | None]:
    """The settings of this run and the checkpoint it resumes, if any.

    What is not given on the command line comes from the checkpoint.
    """
    config = parse(TrainConfig)
    if config.resume and config.overwrite:
        raise ConfigError("--resume continues a run, --overwrite replaces it: give one of the two")
    path = Path(config.resume) if config.resume else None
    if config.resume == "auto":
        path = ckpt.find_newest(config.checkpoint_dir)
    saved = None
    if path is not None:
        saved = ckpt.load_checkpoint(path)
        try:
            default = TrainConfig.from_dict(saved["train_config"])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        config = parse(TrainConfig, default=default)
        config.resume = str(path)
        shape = ckpt.model_config(saved, path)
        if config.model_config(shape.vocab_size) != replace(shape, dropout=config.dropout):
            raise ConfigError(
                f"{path} holds a model of another shape ({saved['model_config']}); leave out the "
                "flags that change it, or start a new run in another --checkpoint_dir"
            )
    config.check()
    folder = config.checkpoint_dir
    newest = ckpt.find_newest(folder)
    going_back = path is not None and path.resolve().parent == folder.resolve()
    if newest is not None and not going_back and not config.overwrite:
        if saved is None or ckpt.load_checkpoint(newest)["run_id"] != saved["run_id"]:
            raise ConfigError(
                f"{folder} holds the checkpoints of another run; continue it with --resume auto, "
                "give another --checkpoint_dir, or replace it with --overwrite"
            )
    check_extras(config)
    if saved is None and not config.overwrite:
        if has_rows_of_another(config.log_dir, folder if config.resume else None):
            raise ConfigError(
                f"{config.log_dir} holds the log of another run; continue it with --resume auto, "
                "give another --log_dir, or replace it with --overwrite"
            )
    return config, saved


def check_extras(config: TrainConfig) -> None:
    """ConfigError or LogError for benchmark files or packages that are not here."""
    for path in (config.hellaswag_data, config.lambada_data):
        if path is not None and not path.is_file():
            raise ConfigError(f"there is no file {path}")
    for name in ("tensorboard", "wandb"):
        if getattr(config, name):
            require(name)


def other_order(config: TrainConfig, saved: dict, train_tokens: int) -> list[str]:
    """Sentences about what is not as it was when the checkpoint was written, and changes what comes
    of it: the order of the data or of the sums, the recipe."""
    then, now = saved["train_config"], config.to_dict()
    changed = [
        f"--{name} was {then[name]}"
        for name in ("total_batch_size", "seed")
        if then.get(name, now[name]) != now[name]
    ]
    if saved["train_tokens"] not in (0, train_tokens):
        changed.append(f"there were {saved['train_tokens']:,} train tokens")
    end = "the order from here on is another one, so this epoch may repeat or miss sequences"
    warnings = [f"warning: when the checkpoint was written {what}; {end}" for what in changed]
    before, recipe = then.get("chosen", {}), now["chosen"]
    for name in (name for name in before if before[name] != recipe.get(name)):
        warnings.append(f"note: the recipe's {name} was {before[name]} and is {recipe.get(name)}")
    if before.get("schedule") == "wsd" and config.max_steps > then["max_steps"]:
        if saved["step"] > stable_steps(then["max_steps"], before["decay"]):
            warnings.append(
                f"warning: this checkpoint has begun to decay; {ckpt.STABLE} is for a longer run"
            )
    micro, was = config.micro_batch_size, then.get("micro_batch_size")
    if was != micro:
        warnings.append(
            f"note: --micro_batch_size was {was} and is {micro}: sums are rounded in another order"
            + (", dropout is drawn otherwise" if config.dropout else "")
        )
    return warnings


def fitting(config: TrainConfig, pretrained: GPTConfig) -> GPTConfig:
    """Takes the shape of a pre-trained model over into the settings, which may not contradict."""
    asked = config.model_type if config.model_type != "gpt2" else pretrained.size
    if asked != pretrained.size:
        raise ConfigError(f"--model_type {asked}: {config.init_from} is a {pretrained}")
    if config.block_size > pretrained.block_size:
        raise ConfigError(
            f"--block_size {config.block_size}: {config.init_from} has {pretrained.block_size}"
        )
    for name in ("n_layer", "n_head", "n_embd"):
        value = getattr(pretrained, name)
        if getattr(config, name) not in (None, value):
            raise ConfigError(f"--{name} {getattr(config, name)}: {config.init_from} has {value}")
        setattr(config, name, value)
    return replace(pretrained, block_size=config.block_size, dropout=config.dropout)
