"""What a run begins with: the model of --resume or --init_from, equal on all processes.

This file reads the weights of a checkpoint only for their checksum, and each process reads only a
part of the rows. model/initial_weights.py makes the weights of a new model.
training/parallel/own_rows.py fills weights into a model.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from config import ResolvedOptions, RunOptions
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
from utils.logger import read_logged_config

# Last parts of the names of options and checkpoint entries that may differ between the machines of
# a run: each has its own folders, files and devices. compare_processes compares checksums of the
# content of folders and files instead.
MACHINE_SUFFIXES = ("_dir", "data", "device", "init_from", "command", "corpus")
# Error if the processes of a run would train on different things.
DIFFERENT = (
    "the processes have different options, checkpoints, initial weights, tokenizers or "
    "data: give all machines the same, for example in shared folders"
)


@dataclass
class InitialModel:
    """The model that a run begins with, before its weights are filled in."""

    model_config: GPTConfig
    weights: Mapping[str, Rows]
    """Float32 weights by parameter name: mapped from a checkpoint, or whole in memory."""
    tokenizer_spec: str
    """Text that names its tokenizer, such as "gpt2", or defines it: see data/tokenizer.py."""
    checkpoint: Checkpoint
    """Content of its checkpoint file; {} for a model of another project."""

    def checksum(self, process: Process) -> int:
        """Return the checksum of the weights. Every process must call it."""
        # Each process has a whole model of another project in memory, which may differ between
        # machines. So each computes the checksum of its own, without collectives (ALONE), and
        # compare_processes compares them.
        return rows_checksum(self.weights, process if self.checkpoint else ALONE)


def open_initial(
    options: RunOptions, checkpoint: Checkpoint | None, process: Process
) -> InitialModel | None:
    """Return the model of the resumed checkpoint, or else of --init_from; None without both. Every
    process must call it. Raises UserError for a damaged file.
    """
    # UserError if only some have a checkpoint: with --resume auto, a machine that lacks the folder
    # would begin a new run.
    process.check_equal(int(checkpoint is None), DIFFERENT)
    if checkpoint is None:
        return open_init_from(options.init_from, process) if options.init_from else None
    # the file of `checkpoint`: read_options sets --resume to it whenever it returns a checkpoint
    assert options.resumed_file is not None
    return open_initial_checkpoint(options.resumed_file, checkpoint, process)


def init_checksum(
    options: RunOptions,
    checkpoint: Checkpoint | None,
    initial: InitialModel | None,
    process: Process,
) -> int | None:
    """Return the checksum of the --init_from weights of a run, None for random weights. `initial`
    has these weights if the run is new. Raises UserError if --init_from gives a resumed run other
    weights than it began from. Every process must call it."""
    if checkpoint is None:
        return initial.checksum(process) if initial is not None else None
    # If the path changed, on one machine at least, it may still hold the same weights.
    if not process.all_agree(options.init_from == checkpoint["config"]["init_from"]):
        open_original(options, checkpoint, process)  # raises UserError for other weights
    return checkpoint["init_checksum"]


def open_original(
    options: RunOptions, checkpoint: Checkpoint, process: Process
) -> Mapping[str, Rows]:
    """Return the --init_from weights of a resumed run. Raises UserError unless the run began from
    them. Every process must call it."""
    # init_checksum calls this for a changed --init_from, finetune.py for its required --init_from.
    assert options.init_from is not None
    if options.init_from.endswith(".pt"):  # else a folder, or a model of another project
        refuse_missing(Path(options.init_from), "init_from", checkpoint)
    original = open_init_from(options.init_from, process)
    if original.checksum(process) != checkpoint["init_checksum"]:
        raise UserError(
            f"{options.init_from} does not hold the weights that the run of {options.resumed_file} "
            "began from: give the original weights, or begin a new run in another folder"
        )
    return original.weights


def open_init_from(model_name: str | Path, process: Process) -> InitialModel:
    """Return the model that `model_name`, the value of --init_from, names: a checkpoint of this
    project or a model of another one. Every process must call it."""
    path = find_checkpoint(model_name)  # None for a model of another project
    if path is not None:
        checkpoint = load_checkpoint(path)
        check_head(path, checkpoint, is_reward_model=False)
        return open_initial_checkpoint(path, checkpoint, process)
    # a float32 model on the CPU, and the spec of its tokenizer, such as "gpt2"
    model, tokenizer_spec = open_pretrained(model_name)
    return InitialModel(model.config, model.state_dict(), tokenizer_spec, {})  # no checkpoint


def open_initial_checkpoint(path: Path, checkpoint: Checkpoint, process: Process) -> InitialModel:
    """Return the model of a loaded checkpoint, whose tensors are mapped from the file `path`. Every
    process must call it, because they compare the file. Raises UserError for a damaged file."""
    # Each process reads a part of the rows below, so all must have the same file. With --resume
    # FOLDER each machine picks its own. The CRC-32 of the checksums identifies a file.
    process.check_equal(crc32_of(checkpoint["checksums"]), DIFFERENT)
    # Rows (model/rows.py) by parameter name: reading them joins two halves in the file to float32.
    # open_weights verifies the checksums first; for them each process reads a part of the rows.
    model_config, weights = open_weights(path, checkpoint, process)
    # checkpoint["tokenizer"]: the spec, such as "gpt2"
    return InitialModel(model_config, weights, checkpoint["tokenizer"], checkpoint)


def crc32_of(content: object) -> int:
    """Return the CRC-32 of plain values as JSON, such as {"model": 83, "optimizer": 17}, so that
    processes can compare one number."""
    return zlib.crc32(json.dumps(content).encode())


def compare_processes(options: RunOptions, entries: Checkpoint, process: Process) -> None:
    """Raise UserError on every process if the processes differ in their options or in the `entries`
    of their checkpoints, such as recipe, tokenizer and data order.

    Such processes would average gradients of different models, or wait for each other forever.
    Every process must call it, before the first exchange of gradients. open_initial_checkpoint has
    compared the resumed checkpoint already.
    """
    # {"max_lr": 0.0006, "recipe": {...}, "tokenizer": "gpt2", ...}
    compared: dict[str, object] = {}
    for name, value in {**entries, **options.to_dict()}.items():
        if not name.endswith(MACHINE_SUFFIXES):  # not "data_dir", "device", ...
            compared[name] = value
    # raises UserError(DIFFERENT) on every process unless all give the same number
    process.check_equal(crc32_of(compared), DIFFERENT)


def refuse_missing(path: Path, name: str, checkpoint: Checkpoint) -> None:
    """Raise UserError if what a resumed run read by the flag `name` is not there any more."""
    if not path.exists():
        # a path of the resumed run is relative to its working_dir, which older files lack
        earlier_path = Path(checkpoint.get("working_dir", "")) / path
        raise UserError(
            f"{path} is not here: the resumed run read it at {earlier_path}; give its present "
            f"place by --{name}"
        )


def warn_of_order(process: Process, checkpoint: Checkpoint | None, data_order: dict) -> None:
    """Warn if this run reads the data in another order than the run that it resumes. `data_order`
    is what determines the order, from checkpoint_entries of train.py or finetune.py: seed and a
    checksum of the data; in train.py also weights, in finetune.py batch size and --reward."""
    # without optimizer state no step has read data yet
    if checkpoint is None or not checkpoint["optimizer"]:
        return
    changes = describe_differences(checkpoint["data_order"], data_order)  # "seed 1 (here 2)", or ""
    if changes:
        process.print(f"warning: the data order changes: {changes}")


def warn_of_log(process: Process, options: ResolvedOptions, checkpoint: Checkpoint | None) -> None:
    """Warn if a resumed run begins a new log, because its log lies elsewhere."""
    if checkpoint is None or checkpoint["step"] == 0 or options.is_branch:
        return
    # content of config.json; None without a log
    logged_config = read_logged_config(options.log_dir)
    if logged_config is None or logged_config.get("run_id") != checkpoint["run_id"]:
        earlier = checkpoint["config"]["log_dir"]
        process.print(
            f"warning: {options.log_dir} has no log of this run, whose log was in {earlier}: a new "
            f"log begins after step {checkpoint['step']}; --log_dir names the folder of the old one"
        )


def describe_differences(saved: Mapping[str, object], here: Mapping[str, object]) -> str:
    """Return the names whose values differ as text: "n_layer 12 (here 6), n_head 12 (here 6)" for
    {"n_layer": 12, "n_head": 12} and {"n_layer": 6, "n_head": 6}. Messages of a resumed run or
    sweep show it."""
    changes: list[str] = []
    for name, value in saved.items():
        if here.get(name) != value:  # None if this version has no such option
            changes.append(f"{name} {value} (here {here.get(name)})")
    return ", ".join(changes)
