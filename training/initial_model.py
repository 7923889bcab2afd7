"""The model that a run begins with: from the seed, of --init_from, or of the checkpoint resumed."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from config import TrainConfig, recipe_of
from model.config import SIZES, GPTConfig
from model.empty import with_context
from model.gpt import GPT
from model.huggingface import find_folder, read_config
from training import checkpoint as ckpt
from training.checkpoint_folder import find_best, load_hugging_face
from utils.cli import given_options
from utils.errors import UserError


def build_model(config: TrainConfig, saved: dict | None, vocab_size: int) -> GPT:
    """Return the model of the run on the CPU: resumed, pre-trained or from the seed."""
    torch.manual_seed(config.seed)
    if saved is None and config.init_from:
        path = checkpoint_to_start_from(config.init_from)
        if path is None:
            model = load_hugging_face(config.init_from)
        else:
            model, _ = ckpt.load_model(path, exact=True)
        if model.config.vocab_size != vocab_size:
            raise UserError(
                f"{config.init_from} has {model.config.vocab_size:,} tokens, {config.data_dir} "
                f"{vocab_size:,}: the shards need the same tokenizer"
            )
        return with_context(model, adopt_shape(config, model.config)).train()
    model = GPT(config.model_config(vocab_size))
    if saved:
        ckpt.load_weights(model, saved, exact=True)
    elif config.resolved_recipe.zero_init:  # each block begins as the identity
        for block in model.transformer.h:
            torch.nn.init.zeros_(block.attn.c_proj.weight)
            torch.nn.init.zeros_(block.mlp.c_proj.weight)
    return model


def checkpoint_to_start_from(init_from: str) -> Path | None:
    """Return the checkpoint that --init_from names, None for a Hugging Face name or folder."""
    path = Path(init_from)
    if path.is_dir():
        held = any(path.glob("*.pt")) or (path / "checkpoints").is_dir()
        ours = held or not (path / "config.json").exists()
    else:
        ours = path.is_file() or path.suffix == ".pt"
    return find_best(path) if ours else None


def initial_shape(config: TrainConfig) -> GPTConfig:
    """Return the architecture of the model that --init_from names, with the context and dropout of
    the options; raise UserError where --overwrite would remove its checkpoint."""
    path = checkpoint_to_start_from(config.init_from)
    if path is None:
        return adopt_shape(config, read_config(find_folder(config.init_from)))
    if config.overwrite and path.resolve().parent == config.checkpoint_dir.resolve():
        raise UserError(
            f"--overwrite would remove {path}, the weights of --init_from; give another "
            "--checkpoint_dir"
        )
    return adopt_shape(config, ckpt.model_config(ckpt.load_checkpoint(path), path))


def adopt_shape(config: TrainConfig, pretrained: GPTConfig) -> GPTConfig:
    """Write the shape of a pre-trained model into the options, and return it with their context and
    dropout; UserError where an option contradicts it."""
    named = config.model_type if config.model_type != "gpt2" else pretrained.size
    if named != pretrained.size:
        found = ", ".join(f"{name} {getattr(pretrained, name)}" for name in SIZES["gpt2"])
        found = f"a {pretrained.size}" if pretrained.size else f"of another size: {found}"
        raise UserError(f"--model_type {named}: {config.init_from} is {found}")
    if config.block_size > pretrained.block_size:
        raise UserError(
            f"--block_size {config.block_size} is more than the context of {config.init_from}: "
            f"give --block_size {pretrained.block_size} or less"
        )
    for name in ("n_layer", "n_head", "n_embd"):
        value = getattr(pretrained, name)
        if getattr(config, name) not in (None, value):
            raise UserError(f"--{name} {getattr(config, name)}: {config.init_from} has {value}")
        setattr(config, name, value)
    if differing := config.model_config(pretrained.vocab_size).differs_from(pretrained.fields):
        if config.recipe != "gpt2" or "recipe" in given_options(sys.argv[1:]):
            raise UserError(
                f"--recipe {config.recipe}: {config.init_from} is a {recipe_of(pretrained)}, which "
                f"differs in {', '.join(differing)}; leave out --recipe"
            )
        config.recipe = recipe_of(pretrained)
    return replace(pretrained, block_size=config.block_size, dropout=config.dropout)
