"""Life of a run, for train.py and finetune.py: resolve its options (of the checkpoint, then of
--config, then of the command line), lock its folders, open its log, resume, finish."""

import contextlib
import json
import os
import signal
import sys
import tomllib
import zlib
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import torch

from config.options import DERIVED, RunOptions, log_folder
from data.tokenizer import tokenizer_identity
from model.gpt import GPT
from training import checkpoint as ckpt
from training.checkpoint import find_newest, load_checkpoint, newest_first
from training.parallel import load_optimizer_state
from training.saver import finish_writing
from training.schedule import check_schedule, warmup_length
from training.state import TrainState
from utils import distributed
from utils.cli import flag_value, named_flags, parse, to_flags
from utils.devices import compile_problem, describe, pick_device, pick_dtype
from utils.distributed import Process, StopSignal
from utils.errors import UserError
from utils.files import atomic_write, check_space, lock_folder
from utils.logger import CONFIG, PICTURE, Logger, Tracker, copy_log, logged_run
from utils.throughput import NAMED_GPUS

Options = TypeVar("Options", bound=RunOptions)


def resolve(config_class: type[Options], script: str) -> tuple[Options, dict | None]:
    """Return the options of a run of `script`, and the checkpoint that it resumes, if any."""
    flags = sys.argv[1:]
    if file := flag_value(flags, "config"):
        flags = [*to_flags(read_options(Path(file).expanduser())), *flags]
    path, saved = find_resumed(config_class, flags), None
    if path:
        saved = load_checkpoint(path)
        if saved["script"] != script:
            raise UserError(f"{path} is of {saved['script']}: begin from it by --init_from {path}")
        # its folders are not taken over: it may have been copied or moved
        folders = {"checkpoint_dir": path.parent, "log_dir": None}
        flags = [*to_flags(given_options(saved) | folders), *flags]
    config = parse(config_class, flags)
    config.resume = str(path) if path else None
    check_schedule(config.schedule)
    for package in ("trackio", "wandb"):
        if getattr(config, package, False) and find_spec(package) is None:
            raise UserError(f"--{package} needs a package: pip install {package}")
    if config.overwrite and config.init_from:
        start = ckpt.checkpoint_folder(Path(config.init_from)).resolve()
        if start.is_relative_to(config.checkpoint_dir.resolve()):
            raise UserError(
                "--overwrite would remove the weights of --init_from: give another --checkpoint_dir"
            )
    given = {name.removeprefix("no_") for name, _ in named_flags(flags)}
    config.derived = tuple(name for name in DERIVED if name not in given)
    on_gpu = config.device in NAMED_GPUS or pick_device(config.device).type == "cuda"
    if "use_torch_compile" in config.derived:
        config.use_torch_compile = on_gpu
    if config.use_torch_compile and on_gpu and config.device not in NAMED_GPUS:
        problem = compile_problem(pick_device(config.device))
        if problem:
            config.use_torch_compile = False
            if distributed.launched("RANK") == 0:
                print(f"warning: training is not compiled: {problem}", flush=True)
    if "micro_batch_size" in config.derived and on_gpu and script == "train.py":
        config.micro_batch_size = "auto"
    if saved and saved["step"] > config.max_steps:
        raise UserError(f"{path} is at step {saved['step']}, after --max_steps {config.max_steps}")
    return config, saved


def given_options(content: dict) -> dict:
    """Return the options in a checkpoint or config.json, without those to be derived again."""
    derived = content["derived"]
    return {name: value for name, value in content["config"].items() if name not in derived}


def read_options(path: Path) -> dict:
    """Return the options in a .toml file, or those of a run in its config.json."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text) if path.suffix == ".toml" else given_options(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"--config {path} is no .toml and no run's config.json: {reason}"
        ) from error


def find_resumed(config_class: type[RunOptions], flags: list[str]) -> Path | None:
    """Return the checkpoint that --resume names, of a folder its newest; None for a new run."""
    resume = flag_value(flags, "resume")
    if resume is None:
        return None
    if resume == "auto":
        folder = config_class.checkpoint_folder(flags)
        newest = find_newest(folder)
        if newest is None and distributed.launched("RANK") == 0:
            print(f"no checkpoint in {folder}: a new run", flush=True)
        return newest
    path = Path(resume).expanduser()
    if path.is_dir() and not (path := find_newest(ckpt.checkpoint_folder(path))):
        raise UserError(f"--resume {resume}: the folder holds no checkpoint")
    return path


def check_folders(config: RunOptions, saved: dict | None) -> None:
    """Raise UserError if the run would write over another's files, or over its own later ones."""
    run_id, step = (saved["run_id"], saved["step"]) if saved else (None, 0)
    folder, log, name = config.checkpoint_dir, logged_run(config.log_dir), "checkpoint_dir"
    held = newest_readable(folder)
    if held and held["run_id"] != run_id:
        found = f"{folder} holds the checkpoints of another run"
    elif held and held["step"] > step:
        found = f"{folder} holds a checkpoint of step {held['step']}, after step {step}"
    elif log is not None and log.get("run_id", "") != run_id and not begins_anew(config, log):
        found, name = f"{config.log_dir} holds the log of another run", "log_dir"
    else:
        return
    if not config.overwrite:
        ways = f"give another --{name}, or --overwrite it"
        raise UserError(f"{found}; continue it with --resume auto, {ways}")


def newest_readable(folder: Path) -> dict | None:
    """Return the newest checkpoint of a folder that is not damaged, None without one."""
    for path in newest_first(folder):
        with contextlib.suppress(UserError):
            return load_checkpoint(path)
    return None


def remove_checkpoints(folder: Path, state: TrainState) -> None:
    """Remove the checkpoints of other runs and of later steps, and damaged ones."""
    for path in newest_first(folder):
        try:
            saved = load_checkpoint(path)
            keep = saved["run_id"] == state.run_id and saved["step"] <= state.step
        except UserError:
            keep = False
        if not keep:
            path.unlink()


def find_log(config: RunOptions, saved: dict) -> Path | None:
    """Return the folder with the log of the run that is resumed, None without one: it belongs to
    the folder of the checkpoint, unless that was moved alone or --log_dir was given."""
    beside = log_folder(Path(config.resume).parent)
    for folder in (config.log_dir, beside, Path(saved["config"]["log_dir"])):
        log = logged_run(folder)
        if log and log.get("run_id") == saved["run_id"]:
            return folder
    return None


def begins_anew(config: RunOptions, log: dict) -> bool:
    """Return whether this run replaces that of a log: with --resume auto, if it ended before its
    first checkpoint in the same folder."""
    auto = flag_value(sys.argv[1:], "resume") == "auto" and config.resume is None
    return auto and log.get("config", {}).get("checkpoint_dir") == str(config.checkpoint_dir)


@dataclass
class Run:
    """State that all stages of a run share."""

    config: RunOptions
    saved: dict | None
    """Checkpoint that is resumed, until `load_state`."""
    process: Process
    dtype: torch.dtype
    """Dtype of matmuls."""
    state: TrainState
    start_step: int
    log_before: Path | None = None
    """Folder with the log of the run that is resumed; None without one, or for a new run."""
    stopping: bool = False
    """True once a process was told to stop."""
    logger: Logger = field(init=False)

    @classmethod
    def start(cls, config: RunOptions, saved: dict | None) -> "Run":
        """Join the process group, and keep other runs out of the folders of this one until its
        process ends. Raises UserError on every process if they hold another run, or if the
        processes differ in their options or checkpoints."""
        process = distributed.start(config.device, before_exit=finish_writing)
        process = replace(process, stop=StopSignal(announce=process.is_main))
        faster = pick_dtype("auto", process.device, process.all_agree)
        dtype = faster if config.dtype == "auto" else pick_dtype(config.dtype, process.device)
        # from a low scale, as a few overflows in a row end a run
        scaler = torch.amp.GradScaler(process.device.type, 2.0**10, enabled=dtype is torch.float16)
        state = TrainState.start(saved, scaler)
        problem: Exception | None = None
        if process.is_main:
            try:
                for folder in {config.checkpoint_dir.resolve(), config.log_dir.resolve()}:
                    lock_folder(folder, "writing to")
                check_folders(config, saved)
            except (OSError, UserError) as error:
                problem = error
        if not process.all_agree(problem is None):
            raise problem or UserError("the main process cannot write to its folders")
        own = ("_dir", "_data", "device", "init_from")  # a machine's own
        told = {k: v for k, v in config.to_dict().items() if not k.endswith(own)}
        told |= {"step": state.step, "run": state.run_id if saved else None}
        if not process.all_equal(zlib.crc32(json.dumps(told).encode())):
            raise UserError(
                "the processes have different options or checkpoints; is --checkpoint_dir a folder "
                "that all machines share?"
            )
        if dtype is not faster and not saved:
            process.print(f"warning: --dtype {config.dtype}, where auto would take {faster}")
        about = ", ".join(f"{k} {v}" for k, v in describe(process.device).items())
        process.print(f"{about}, matmuls {dtype}")
        config.dtype = str(dtype).removeprefix("torch.")  # kept by a resumed run
        log_before = find_log(config, saved) if saved else None
        return cls(config, saved, process, dtype, state, state.step, log_before)

    @property
    def ended(self) -> bool:
        """True after the last step."""
        return self.state.step == self.config.max_steps

    def load_state(self, model: GPT, optimizers: list[torch.optim.Optimizer]) -> None:
        """Load the optimizer state of the checkpoint that is resumed, and close the file."""
        if self.saved:
            with ckpt.reading(Path(self.config.resume)):
                ckpt.verify(self.saved, "optimizer")
            load_optimizer_state(model, optimizers, self.saved["optimizer"])
        self.saved = None  # it is mapped from disk

    def open_log(self, model: GPT, about: dict) -> None:
        """Open the log and write config.json with the entries `about`; first remove the checkpoints
        that --overwrite replaces, and see that the disk has room for three. In another folder a
        resumed run begins with a copy of its log up to its step."""
        config, state, trackers = self.config, self.state, []
        warmup = warmup_length(config)
        if warmup < config.warmup_steps:
            self.process.print(
                f"warning: --warmup_steps {config.warmup_steps} is more than half of the "
                f"{config.max_steps} steps: the learning rate rises for {warmup}"
            )
        if self.process.is_main:
            if config.overwrite:
                remove_checkpoints(config.checkpoint_dir, state)
            if self.log_before not in (None, config.log_dir):
                copy_log(self.log_before, config.log_dir, state.step)
            held = sum(path.stat().st_size for path in config.checkpoint_dir.glob("model_*.pt"))
            need = 3 * 12 * model.num_parameters() - held
            check_space(config.checkpoint_dir, need, "saving this run")
            trackers = open_trackers(config, state)
        self.logger = Logger(
            config.log_dir,
            start=state.step,
            total=config.max_steps,
            is_main=self.process.is_main,
            overwrite=self.log_before is None,  # that of another run, which check_folders allows
            trackers=trackers,
        )
        if self.process.is_main:
            content = {"command": sys.argv, "run_id": state.run_id, **about}
            content["tokenizer"] = tokenizer_identity(about["tokenizer"])
            content["config"], content["derived"] = config.to_dict(), config.derived
            content["model_config"] = asdict(model.config)
            content["versions"] = describe(self.process.device)
            with atomic_write(config.log_dir / CONFIG) as file:
                file.write(json.dumps(content, indent=1).encode())

    def finish(self, message: str) -> None:
        """Print how the run ended, draw its picture, and exit with 128 + the signal if one came."""
        if self.stopping:
            message = f"stopped; saved at step {self.state.step}: continue with --resume auto"
            if self.state.step == self.start_step:
                message = f"stopped at step {self.start_step}, before a new checkpoint"
        self.logger.print(message)
        self.logger.close()
        folder = self.config.log_dir
        if self.process.is_main and not self.stopping and find_spec("matplotlib"):
            with contextlib.suppress(UserError):  # a run without a step
                # on demand: matplotlib takes a second
                import_module("evaluation.figure").draw([folder], folder / PICTURE)
        distributed.stop()
        if self.stopping:
            sys.exit(128 + (self.process.stop.signal or signal.SIGTERM))


class WandbTracker:
    """Run of Weights & Biases whose charts have the step of training as their axis. The service's
    own step only grows: it would drop the rows of steps that a resumed run does again."""

    def __init__(self, **options: object) -> None:
        self.run = import_module("wandb").init(**options)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, float], step: int) -> None:
        self.run.log(values | {"step": step})

    def finish(self) -> None:
        self.run.finish()


def open_trackers(config: RunOptions, state: TrainState) -> list[Tracker]:
    """Open Weights & Biases and trackio as far as asked for. WANDB_PROJECT and TRACKIO_PROJECT in
    the environment name the project."""
    trackers: list[Tracker] = []
    shared = {"config": config.to_dict(), "resume": "allow"}
    if getattr(config, "wandb", False):  # it reads WANDB_NAME itself
        project = os.environ.get("WANDB_PROJECT", "gpt2")
        options = {"project": project, "id": state.run_id, "dir": str(config.log_dir), **shared}
        trackers.append(WandbTracker(**options))
    if getattr(config, "trackio", False):
        project = os.environ.get("TRACKIO_PROJECT", "gpt2")
        options = {"project": project, "name": state.run_id, **shared}
        trackers.append(import_module("trackio").init(**options))
    return trackers
