"""The options of a run, in one direction: flags -> options -> resolved options.

Options become a list of flags wherever they come from: a resumed checkpoint, a --config file or the
command line. All flags are parsed together, and the last of equal flags wins. The options that no
flag gives are then resolved once, from the recipe, the device and the memory. Only a micro-batch
that runs out of memory is changed later (training/trial.py).

This file is not about single options (config.py) or about a run's files (training/run.py).
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from config import (
    DERIVED,
    MachineOptions,
    ResolvedTrainOptions,
    RunOptions,
    TrainOptions,
    resolve_from_recipe,
)
from data.loader import folders_of
from model.config import GPTConfig
from model.execution import check_compiler
from model.formats.checkpoint import (
    Checkpoint,
    find_checkpoint_folder,
    find_newest,
    load_checkpoint,
    run_and_step,
)
from recipes import Recipe, parse_recipe
from training.forecast.advice import choose_micro_batch
from training.forecast.memory import Hardware
from training.optimizers import matrix_optimizer
from training.parallel.tensor_parallel import check_divides
from training.start import describe_differences, refuse_missing
from utils.cli import expand_home, flag_value, named_flags, parse, to_flags
from utils.devices import is_bfloat16_faster, pick_device
from utils.distributed import Process
from utils.errors import UserError
from utils.launch import is_main_process
from utils.throughput import NAMED_GPUS, plan_gpus

Options = TypeVar("Options", bound=RunOptions)  # TrainOptions or FinetuneOptions
Machine = TypeVar("Machine", bound=MachineOptions)  # ResolvedTrainOptions or FinetuneOptions


def read_options(
    options_class: type[Options], script: str, command_line: list[str]
) -> tuple[Options, list[str], Checkpoint | None]:
    """Return the options that the flags of a script give, the names of the derived options, and
    the resumed checkpoint, None for a new run.

    Derived options are those of DERIVED (config.py) that no flag sets, or that a flag sets to
    "auto", such as ["log_dir", "min_lr"]. In the options, `resume` is the path of the checkpoint,
    "auto" if there is none to continue, or None without the flag. Raises UserError for options that
    contradict each other.
    """
    given_flags = expand_flags(command_line)  # ["--max_lr", "6e-4", ...]

    # If the run resumes a checkpoint, `flags` are those of its options, then the given ones: the
    # parser takes the last of equal flags.
    flags = given_flags
    checkpoint = None
    resume = flag_value(given_flags, "resume")  # a file, a folder, "auto", or None
    path = find_resumed(options_class, resume, given_flags)  # of a checkpoint; None: a new run
    if path is not None:
        # The run goes on in the present folder of the file, which may have been copied or moved,
        # unless a flag names another folder.
        folder = options_class.checkpoint_folder(
            ["--checkpoint_dir", str(path.parent), *given_flags]
        )
        # With --overwrite, a branch begins again instead of continuing from its own newest file.
        if "overwrite" not in dict(named_flags(given_flags)):
            path = newest_of_branch(path, folder)  # `path`, unless `folder` has a branch of it
        checkpoint = load_checkpoint(path)
        if checkpoint["script"] != script:
            raise UserError(
                f"{path} is of {checkpoint['script']}: begin from it with --init_from {path}"
            )
        flags = to_flags(saved_options(checkpoint, folder)) + given_flags
        resume = str(path)

    # finetune.py names its folder after --method if --checkpoint_dir is not given
    checkpoint_dir = options_class.checkpoint_folder(flags)
    # for a wrong flag `parse` raises UserError, or SystemExit after tyro has printed the mistake
    options = replace(parse(options_class, flags), resume=resume, checkpoint_dir=checkpoint_dir)
    if checkpoint is not None:
        check_inputs(options, given_flags, checkpoint)  # UserError if an input is gone
    if options.overwrite and options.init_from:
        refuse_removing(options.init_from, options.checkpoint_dir)

    # `int` cannot fail, because the parser has checked the flags
    max_steps = flag_value(flags, "max_steps")
    if checkpoint and max_steps and checkpoint["step"] > int(max_steps):
        raise UserError(f"{path} is at step {checkpoint['step']}, after --max_steps {max_steps}")
    return options, list_derived(given_flags, checkpoint), checkpoint


def refuse_removing(init_from: str, folder: Path) -> None:
    """Raise UserError if the weights of --init_from lie in `folder`, the checkpoint folder of the
    run. --overwrite removes other checkpoints from it when the log is opened (Run.open_log)."""
    # of runs/a: runs/a/checkpoints; other paths stay
    weights_path = find_checkpoint_folder(Path(init_from)).resolve()
    if weights_path.is_relative_to(folder.resolve()):
        raise UserError(
            "--overwrite would remove the weights of --init_from: give another --checkpoint_dir"
        )


def list_derived(given_flags: list[str], checkpoint: Checkpoint | None) -> list[str]:
    """Return the names of the options that this run derives (read_options). A resumed run derives
    those that its checkpoint names, unless `given_flags` set them now."""
    # {"max_lr": "6e-4", "use_torch_compile": None} for --max_lr 6e-4 --no_use_torch_compile
    given_values = {name.removeprefix("no_"): value for name, value in named_flags(given_flags)}
    derived: list[str] = []
    for name in DERIVED:
        if name in given_values:
            is_derived = given_values[name] == "auto"  # it asks to derive the option again
        else:
            is_derived = checkpoint is None or name in checkpoint["derived"]
        if is_derived:
            derived.append(name)
    return derived


def check_inputs(options: Options, given_flags: list[str], checkpoint: Checkpoint) -> None:
    """Raise UserError if a file or folder that a resumed run read is not there any more. Those that
    `given_flags` name are the user's present choice."""
    written = ("checkpoint_dir", "log_dir")
    for name, value in vars(options).items():
        if name in written or name in dict(named_flags(given_flags)):
            continue
        paths = value if isinstance(value, tuple) else (value,)
        if name == "data_dir":
            paths = folders_of(value)  # data/a of data/a:0.7
        elif name == "reward" and value not in (None, "exact"):
            # of grpo: a reward model's checkpoint, or FILE.py:FUNCTION
            file_name, _, _ = value.rpartition(":")
            paths = (Path(file_name if file_name.endswith(".py") else value),)
        for path in paths:
            if isinstance(path, Path):
                # `checkpoint` has the folder that relative paths are in
                refuse_missing(path, name, checkpoint)


def saved_options(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    """Return the options by name with which a run resumes from a checkpoint into `folder`. Flags
    override them. Derived options are left out, except for the warmup, and for the folder of the
    log unless the run was moved or branches off."""
    earlier_options = checkpoint["config"]  # by name, resolved
    options = without_derived(checkpoint)
    options["checkpoint_dir"] = folder
    # The warmup keeps its length. Derived again, for more steps, it would be longer, and the run
    # would warm up a second time.
    options["warmup_steps"] = earlier_options["warmup_steps"]
    # The log stays in its folder. If the run was moved or branches off, None puts the log beside
    # the checkpoints.
    is_moved = folder.resolve() != Path(earlier_options["checkpoint_dir"]).resolve()
    options["log_dir"] = None if is_moved else earlier_options["log_dir"]
    return options


def without_derived(saved_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resolved options by name of a checkpoint or config.json, without the derived ones,
    which a run computes again from its own options and device."""
    options = saved_config["config"]
    return {name: value for name, value in options.items() if name not in saved_config["derived"]}


def fill_bare_resume(words: list[str]) -> list[str]:
    """Return the words of a command line with "auto" behind a --resume without a value."""
    filled_words: list[str] = []
    for i, word in enumerate(words):
        filled_words.append(word)
        has_value = i + 1 < len(words) and not words[i + 1].startswith("--")
        if word == "--resume" and not has_value:
            filled_words.append("auto")
    return filled_words


def expand_flags(command_line: list[str]) -> list[str]:
    """Return the flags of a command line, with those of its --config file in front."""
    # A bare --resume becomes --resume auto. expand_run_dir expands ~, and puts the flag
    # --checkpoint_dir DIR/checkpoints before those of --run_dir DIR.
    flags = expand_run_dir(fill_bare_resume(command_line))
    config_file = flag_value(flags, "config")
    if config_file is not None:
        # in front, so that the command line overrides the file
        flags = expand_run_dir(to_flags(read_options_file(Path(config_file)))) + flags
    return flags


def expand_run_dir(words: list[str]) -> list[str]:
    """Return the words of a command line or options file, with ~ expanded. For a --run_dir, put the
    --checkpoint_dir in it first, so that an explicit --checkpoint_dir in the same words wins."""
    words = expand_home(words)
    run_dir = flag_value(words, "run_dir")
    if run_dir is None:
        return words
    return ["--checkpoint_dir", f"{run_dir}/checkpoints"] + words


def read_options_file(path: Path) -> dict[str, Any]:
    """Return the options by name in a .toml file or in the config.json of a run. Raises UserError
    for a file with other content."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix == ".toml":
            return tomllib.loads(text)
        return without_derived(json.loads(text))  # config.json of a run
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"--config {path} is neither a .toml nor a run's config.json: {error}"
        ) from error


def find_resumed(options_class: type[Options], resume: str | None, flags: list[str]) -> Path | None:
    """Return the path of the checkpoint that --resume names: a file, or the newest one of a folder.
    Return None for a new run."""
    if resume is None:
        return None
    if resume == "auto":
        # checkpoint_folder looks for --checkpoint_dir in the raw flags. They cannot be parsed yet,
        # because the options of the checkpoint come before them.
        folder = options_class.checkpoint_folder(flags)
        newest = find_newest(folder)  # the file of the latest step
        if newest is None and is_main_process():
            print(f"no checkpoint in {folder}: a new run")  # the user may have misspelled it
        return newest
    path = Path(resume)
    if not path.is_dir():
        return path  # if the file is absent, load_checkpoint raises OSError
    # the file of the latest step; of runs/a in runs/a/checkpoints, of another folder in itself
    newest = find_newest(find_checkpoint_folder(path))
    if newest is None:
        raise UserError(f"--resume {resume}: the folder holds no checkpoint")
    return newest


def newest_of_branch(path: Path, folder: Path) -> Path:
    """Return the newest checkpoint in `folder` if the run there branched from the checkpoint
    `path`, so that the same command, started again, continues the branch; else return `path`."""
    newest = find_newest(folder)
    if newest is None or newest == path:
        return path
    # "parent" is run_and_step of the checkpoint from which the run in `folder` branched. If that
    # run is unrelated, refuse_overwriting of training/run.py raises UserError.
    if load_checkpoint(newest).get("parent") != run_and_step(load_checkpoint(path)):
        return path
    if is_main_process():
        print(f"{folder} already holds this branch of {path}: continuing it")
    return newest


def resolve_options(
    options: TrainOptions, derived: list[str], checkpoint: Checkpoint | None
) -> tuple[ResolvedTrainOptions, Recipe]:
    """Return the options of train.py, filled in from the recipe and the kind of device, and the
    recipe. Dtype and micro-batch may still be "auto": resolve_on_device resolves them."""
    recipe = find_recipe(options, checkpoint)  # of --recipe, or that of the resumed run
    matrix_optimizer(recipe)  # raises UserError for an unknown name
    # a value for each None of DERIVED; then use_torch_compile, by the kind of device
    resolved = resolve_compile(resolve_from_recipe(options, recipe), derived)
    # Check before the processes connect that --tensor_parallel divides the heads. With --init_from
    # `agreed_model_config` of training/summary.py checks this when the file is open.
    # --minutes chooses the heads later.
    if resolved.init_from is None and resolved.minutes is None:
        # any vocabulary size will do: heads and MLP do not depend on it
        check_divides(resolved.model_config(recipe, GPTConfig.vocab_size), resolved.tensor_parallel)
    return resolved, recipe


def find_recipe(options: TrainOptions, checkpoint: Checkpoint | None) -> Recipe:
    """Return the recipe of a run. A resumed run keeps its recipe, even if the name means something
    else by now, unless a flag gives another --recipe. Raises UserError if that recipe has another
    optimizer than the optimizer state in the checkpoint."""
    if checkpoint is None:
        return parse_recipe(options.recipe)
    try:
        earlier_recipe = Recipe(**checkpoint["recipe"])
    except TypeError as error:  # for a field that Recipe no longer has
        raise UserError(
            f"{options.resume} was begun by another version of this project, whose recipes had "
            "other fields: continue with that version, or start from the weights alone with "
            "--init_from"
        ) from error
    if options.recipe == checkpoint["config"]["recipe"]:  # texts, such as "modern,qk_norm=False"
        return earlier_recipe
    recipe = parse_recipe(options.recipe)
    # optimizer state is empty before the first step
    if checkpoint["optimizer"] and recipe.optimizer != earlier_recipe.optimizer:
        raise UserError(
            f"{options.resume} has the state of another optimizer, {earlier_recipe.optimizer}: "
            "resume without --recipe, or start from the weights alone with --init_from"
        )
    return recipe


def is_on_gpu(device: str) -> bool:
    """Return whether --device means a CUDA GPU: of this machine, or one that --dry_run plans for.
    Raises UserError for an unknown or missing device."""
    if plan_gpus(device) is not None:  # for --dry_run
        return True
    try:
        return pick_device(device).type == "cuda"
    except UserError as error:
        names = ", ".join(NAMED_GPUS)
        raise UserError(
            f"{error}; train.py --dry_run --device also takes {names}, 16xh100 or 2x8xh100"
        ) from error


def resolve_compile(options: Machine, derived: list[str]) -> Machine:
    """Return the options with use_torch_compile resolved: by default only on CUDA. `derived` has
    the names of the options that no flag sets (read_options)."""
    # By default not on CPUs: there a small model takes longer to compile than to train.
    if "use_torch_compile" in derived:
        options = replace(options, use_torch_compile=is_on_gpu(options.device))
    return options


def compile_if_all_can(options: Machine, process: Process) -> Machine:
    """Return the options without use_torch_compile, after a warning, if a process cannot compile.
    Every process must call it."""
    if options.use_torch_compile:
        try:
            with process.raise_on_all():
                check_compiler(process.device)  # compiles a tiny function, or UserError
        except UserError as error:
            process.print(f"warning: training is not compiled: {error}")
            options = replace(options, use_torch_compile=False)
    return options


def resolve_dtype(options: Machine, process: Process) -> Machine:
    """Return the options with the dtype of the process in place of --dtype auto."""
    on_cpu = process.device.type == "cpu"
    if on_cpu and options.dtype == "bfloat16" and not is_bfloat16_faster():
        process.print("warning: --dtype float32 is faster than bfloat16 on this CPU")
    name = str(process.dtype).removeprefix("torch.")  # "bfloat16"
    return replace(options, dtype=name)  # type: ignore[arg-type]  # PyTorch names them alike


def resolve_on_device(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, process: Process
) -> ResolvedTrainOptions:
    """Return the options with a dtype and a number of sequences in place of --dtype auto and
    --micro_batch_size auto, for a model of this architecture. Every process must call it."""
    options = resolve_dtype(options, process)
    if options.micro_batch_size != "auto":
        return options
    micro_batch_size, sentence = fit_micro_batch(options, recipe, model_config, process)
    if sentence:  # "micro-batch 16, by forecast 9.10 GB of ..."; "" unless on CUDA
        process.print(sentence)
    return replace(options, micro_batch_size=micro_batch_size)


def fit_micro_batch(
    options: ResolvedTrainOptions, recipe: Recipe, model_config: GPTConfig, process: Process
) -> tuple[int, str]:
    """Return the micro-batch in sequences, the same on all processes, and a sentence to print or
    "": those of choose_micro_batch, for the least memory of any process. Every process must call
    it."""
    hardware = Hardware.of(options)  # of this machine: device, dtype, free memory, ...
    # All processes need equal micro-batches, so the one with the least memory decides. Machines may
    # have different numbers of processes: `process` has their greatest common divisor.
    free_bytes = process.min(hardware.free_bytes)
    hardware = replace(
        hardware, free_bytes=free_bytes, processes_per_machine=process.processes_per_machine
    )
    # (32, "micro-batch 32, by forecast 12.34 GB of 80.00 GB free")
    return choose_micro_batch(options, recipe, model_config, hardware)


def continued_model_config(
    options: ResolvedTrainOptions, recipe: Recipe, saved_model_config: GPTConfig
) -> GPTConfig:
    """Return the architecture of a run that begins with the weights of --resume or --init_from,
    which have the architecture `saved_model_config`. It may differ in dropout and, in a new run, in
    a shorter context. Raises UserError for options that ask for another architecture."""
    if options.block_size > saved_model_config.block_size:
        raise UserError(
            f"{options.weights_from} has a context of {saved_model_config.block_size}: give that "
            "--block_size or a smaller one"
        )
    # Dropout is not part of the weights, and a new run may train the first positions of a longer
    # context. A resumed run may not: its data order and optimizer state belong to its context.
    model_config = replace(saved_model_config, dropout=options.dropout)
    if options.resumed_file is None:  # a new run; else it is the path of the checkpoint
        model_config = replace(model_config, block_size=options.block_size)

    # What --recipe, --model_type and the sizes ask for must be the architecture of the weights.
    vocab_size = model_config.vocab_size
    requested_model_config = options.model_config(recipe, vocab_size)
    gpt2_model_config = GPTConfig(options.block_size, vocab_size, dropout=options.dropout)
    if options.init_from is not None and requested_model_config == gpt2_model_config:
        # With --init_from, options for GPT-2's own architecture count as defaults, which nobody
        # gave. Only --block_size still counts: that of a resumed run may not be shorter.
        requested_model_config = replace(model_config, block_size=options.block_size)
    if requested_model_config != model_config:
        # "n_layer 12 (here 6), n_head 12 (here 6)"
        changes = describe_differences(vars(model_config), vars(requested_model_config))
        raise UserError(
            f"{options.weights_from} holds a model of another architecture: {changes}; leave out "
            "--recipe, --model_type and the sizes, or begin a new model in another --checkpoint_dir"
        )
    return model_config
