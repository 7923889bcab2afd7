"""What a run begins with: the model of a checkpoint that is resumed, or that of --init_from, and
whether all processes have the same.

Weights of a checkpoint are read here for their checksum alone, by each process a part of the rows.
Those of a new model are GPT.initial_weights of model/gpt.py; training/parallel/own_rows.py fills
weights in.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from config import RunOptions
from data.open_model import open_pretrained
from model.config import GPTConfig
from model.formats.checkpoint import (
    Checkpoint,
    check_head,
    find_checkpoint,
    load_checkpoint,
    open_weights,
    rows_checksum,
)
from model.rows import Rows
from utils.distributed import ALONE, Process
from utils.errors import UserError

# Ends of the names of options and entries that may differ between the machines of a run: their own
# folders, files and devices. Checksums of the folders' and files' content are compared instead.
PER_MACHINE = ("_dir", "data", "device", "init_from", "command", "corpus")
# error of a run whose processes would train together on different things
DIFFERENT = (
    "the processes have different options, checkpoints, initial weights, tokenizers or "
    "data: give all machines the same, as in folders that they share"
)


@dataclass
class InitialModel:
    """A model that a run begins with, before its weights are filled in."""

    model_config: GPTConfig
    weights: Mapping[str, Rows]
    """Float32, by parameter name: mapped from a checkpoint, or whole in memory."""
    tokenizer: str
    """Its spec, see data/tokenizer.py."""
    checkpoint: Checkpoint
    """Content of its file, {} for a model of another project."""

    def checksum(self, process: Process) -> int:
        """Return the checksum of the weights. Every process must call it."""
        # A model of another project is whole in the memory of each process, and may differ between
        # machines: each sums up its own, and compare_processes finds the difference.
        return rows_checksum(self.weights, process if self.checkpoint else ALONE)


def open_initial(
    options: RunOptions, checkpoint: Checkpoint | None, process: Process
) -> InitialModel | None:
    """Return the model that a run begins with: that of the checkpoint that is resumed, or that of
    --init_from, None without both. Every process must call it; raises UserError for a damaged file.
    """
    # With --resume auto, a machine without the folder of the others would begin a new run.
    if not process.all_equal(int(checkpoint is None)):
        raise UserError(DIFFERENT)
    if checkpoint is None:
        return open_saved(options.init_from, process) if options.init_from else None
    # `checkpoint` is open already. Its path serves error messages only: it may hold a later save.
    # read_options has put it into --resume.
    assert options.resumed is not None
    return open_initial_checkpoint(options.resumed, checkpoint, process)


def init_checksum(
    options: RunOptions,
    checkpoint: Checkpoint | None,
    initial: InitialModel | None,
    process: Process,
) -> int | None:
    """Return the checksum of the weights of --init_from that a run began from, which `initial`
    holds if the run is new; None for random ones. Raises UserError if a resumed run is given other
    weights by --init_from than it began from. Every process must call it."""
    if checkpoint is None:
        return initial.checksum(process) if initial is not None else None
    # Another path, even on one machine only, may hold the same weights: compare checksums.
    if not process.all_agree(options.init_from == checkpoint["config"]["init_from"]):
        open_original(options, checkpoint, process)
    return checkpoint["init_checksum"]


def open_original(
    options: RunOptions, checkpoint: Checkpoint, process: Process
) -> Mapping[str, Rows]:
    """Return the weights of --init_from for a resumed run; raise UserError unless it began from
    them. Every process must call it."""
    # init_checksum calls this for an --init_from that was given anew; finetune.py always has one.
    assert options.init_from is not None
    original = open_saved(options.init_from, process)
    if original.checksum(process) != checkpoint["init_checksum"]:
        raise UserError(
            f"{options.init_from} does not hold the weights that the run of {options.resume} began "
            "from: give their place, or begin a new run in another folder"
        )
    return original.weights


def open_saved(model_name: str | Path, process: Process) -> InitialModel:
    """Return the model of --init_from, `model_name`. Every process must call it."""
    path = find_checkpoint(model_name)  # None for a model of another project
    if path is not None:
        checkpoint = load_checkpoint(path)
        check_head(path, checkpoint, is_reward_model=False)
        return open_initial_checkpoint(path, checkpoint, process)
    model, tokenizer = open_pretrained(model_name)  # model on the CPU, tokenizer spec
    return InitialModel(model.config, model.state_dict(), tokenizer, {})


def open_initial_checkpoint(path: Path, checkpoint: Checkpoint, process: Process) -> InitialModel:
    """Return the model of an open checkpoint. Every process must call it; raises UserError for a
    damaged file."""
    # Each process reads a part of the rows below, so all must have the same file; with --resume
    # FOLDER each machine picks one. The CRC-32 of its checksums identifies it.
    if not process.all_equal(crc32_of(checkpoint["checksums"])):
        raise UserError(DIFFERENT)
    model_config, weights = open_weights(path, checkpoint, process)
    return InitialModel(model_config, weights, checkpoint["tokenizer"], checkpoint)


def crc32_of(content: object) -> int:
    """Return the CRC-32 of plain values, written as JSON: a number that processes can compare."""
    return zlib.crc32(json.dumps(content).encode())


def compare_processes(options: RunOptions, entries: Checkpoint, process: Process) -> None:
    """Raise UserError on every process if they differ in their options, or in what the run is made
    of, the `entries` of its checkpoints. open_initial_checkpoint has compared the checkpoint that
    they resume.

    They would average gradients of different models, or wait for each other for ever. Every process
    must call it, before the first exchange of gradients.
    """
    common: dict[str, object] = {}
    for name, value in {**entries, **options.to_dict()}.items():
        if not name.endswith(PER_MACHINE):
            common[name] = value
    if not process.all_equal(crc32_of(common)):
        raise UserError(DIFFERENT)


def warn_of_order(process: Process, checkpoint: Checkpoint | None, data_order: dict) -> None:
    """Warn where the batch of a step follows from other data or options, `data_order` of this run,
    than in the checkpoint that is resumed."""
    # No optimizer state: no step has read data yet.
    if checkpoint is None or not checkpoint["optimizer"]:
        return
    earlier_order = checkpoint["data_order"]
    if data_order != earlier_order:
        process.print(f"warning: the data order changes from {earlier_order} to {data_order}")
