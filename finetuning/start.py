"""The model that a run of finetune.py begins with, and the one that it compares with."""

import zlib
from dataclasses import replace
from pathlib import Path

import torch
from training.checkpoint_folder import is_chat, open_model
from training.initial_model import checkpoint_to_start_from

from config import TrainConfig
from finetuning.options import FinetuneConfig
from model import cpu
from model.empty import empty_gpt, with_context
from model.gpt import GPT
from training import checkpoint as ckpt
from utils.distributed import Process
from utils.errors import UserError


def build_finetuned(options: FinetuneConfig, saved: dict | None) -> tuple[GPT, dict, str]:
    """Return the model of a run of finetune.py on the CPU, resumed or of --init_from, with
    "tokenizer", "train_tokens" and the data_dir of its pre-training."""
    if saved:
        path = Path(options.resume)
        model = GPT(ckpt.model_config(saved, path))
        ckpt.verify(saved, path, "model", "model_low", "optimizer")
        ckpt.load_weights(model, saved, exact=True)
        tokenizer, before = saved["tokenizer"], saved
    else:
        model, tokenizer, before = open_init(options)
        check_kind_of_text(options, before)
        if options.method == "reward" and not model.config.reward_head:
            model = with_reward_head(model)
    data_dir = before["train_config"]["data_dir"] if before else str(TrainConfig().data_dir)
    about = {"tokenizer": tokenizer, "train_tokens": before.get("train_tokens", 0)}
    return model.train(), about, data_dir


def open_init(options: FinetuneConfig) -> tuple[GPT, str, dict]:
    """Return the model of --init_from in the context of the options, its tokenizer's name, and its
    checkpoint, {} if it is none."""
    path = checkpoint_to_start_from(options.init_from)
    if path and options.overwrite and path.resolve().parent == options.checkpoint_dir.resolve():
        raise UserError(
            f"--overwrite would remove {path}, the weights of --init_from; give another "
            "--checkpoint_dir"
        )
    pretrained, rewards = None if path else options.init_from, options.method == "reward"
    model, tokenizer, before = open_model(path, pretrained, exact=True, rewards=rewards)
    block_size = options.block_size or model.config.block_size
    if block_size > model.config.block_size:
        raise UserError(
            f"--block_size {block_size} is more than the context of {options.init_from}: give "
            f"--block_size {model.config.block_size} or less"
        )
    shape = replace(model.config, block_size=block_size, dropout=options.dropout)
    return with_context(model, shape), tokenizer, before


def check_kind_of_text(options: FinetuneConfig, before: dict) -> None:
    """Raise UserError if preferences or rewards of chats are for a model that was fine-tuned on
    plain text, or the reverse."""
    chat = is_chat(before, None if before else options.init_from)
    if options.method == "sft" or not (chat or "finetune" in before) or chat != options.plain:
        return
    kind, remedy = ("a chat", "leave out") if chat else ("plain text", "give")
    raise UserError(f"{options.init_from} was fine-tuned on {kind}: {remedy} --plain")


def with_reward_head(model: GPT) -> GPT:
    """Return a reward model with the blocks of a model and a head of zeros."""
    weights = {name: x for name, x in model.state_dict().items() if name != "lm_head.weight"}
    weights["reward_head.weight"] = torch.zeros(1, model.config.n_embd)
    scorer = empty_gpt(replace(model.config, reward_head=True))
    scorer.load_state_dict(weights, assign=True)
    return scorer.requires_grad_()


def open_reference(options: FinetuneConfig, process: Process) -> GPT | None:
    """Return the frozen model of --init_from for the methods that compare with it, else None."""
    if not options.needs_reference:
        return None
    path = Path(options.init_from)
    if options.resume and path.suffix == ".pt" and not path.exists():
        raise UserError(
            f"{path}, the model that this run compares with, is gone: put it back, or "
            "give its new place by --init_from"
        )
    reference, *_ = open_init(options)
    reference.eval().requires_grad_(False).to(process.device)
    if process.device.type == "cpu":
        cpu.for_training(reference)  # the modules that the model has, so that both round alike
    return reference


def input_checksums(options: FinetuneConfig, reference: GPT | None) -> dict[str, int]:
    """Return checksums of the run's files, and of the weights of the reference model."""
    files = {"data": options.data, "eval_data": options.eval_data, "questions": options.questions}
    checksums = {name: zlib.crc32(path.read_bytes()) for name, path in files.items() if path}
    if reference is not None:
        checksums["init_from"] = ckpt.checksum(reference.state_dict())
    return checksums


def changed_inputs(
    options: FinetuneConfig, saved: dict | None, checksums: dict[str, int]
) -> list[Path]:
    """Return which of the run's files have changed since the checkpoint; raise UserError if the
    reference model has."""
    before = saved["finetune"].get("checksums", {}) if saved else {}
    changed = [name for name in checksums if before.get(name, checksums[name]) != checksums[name]]
    if "init_from" in changed:
        raise UserError(
            f"{options.init_from} has changed since this run began, which compares with the model "
            "that was there: put it back, or begin anew with --overwrite"
        )
    return [getattr(options, name) for name in changed]
