"""Life of a run, for train.py and finetune.py: resolve its options (of the checkpoint, then of
--config, then of the command line), lock its folders, open its log, resume, finish."""

import contextlib
import json
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

from config import RunOptions
from data.tokenizer import tokenizer_name
from model.gpt import GPT
from training import checkpoint as ckpt
from training.checkpoint import find_newest, load_checkpoint
from training.parallel import load_optimizer_state
from training.saver import finish_writing
from training.schedule import check_schedule
from training.state import TrainState
from utils import distributed
from utils.cli import flag_value, named_flags, parse, to_flags
from utils.devices import describe, pick_device, pick_dtype
from utils.distributed import Process
from utils.errors import UserError
from utils.files import atomic_write, check_space, lock_folder
from utils.gpus import NAMED_GPUS
from utils.logger import CONFIG, PICTURE, Logger, Tracker, logged_run
from utils.signals import StopSignal

Options = TypeVar("Options", bound=RunOptions)


def resolve(config_class: type[Options], script: str) -> tuple[Options, dict | None]:
    """Return the options of a run of `script`, and the checkpoint that it resumes, if any."""
    flags = sys.argv[1:]
    if file := flag_value(flags, "config"):
        flags = [*to_flags(read_options(Path(file).expanduser())), *flags]
    own = {name for name, _ in named_flags(flags)}
    path, saved = find_resumed(config_class, flags), None
    if path:
        saved = load_checkpoint(path)
        if saved["script"] != script:
            raise UserError(f"{path} is of {saved['script']}: begin from it by --init_from {path}")
        flags = [*to_flags(saved["config"]), "--checkpoint_dir", str(path.parent), *flags]
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
    on_gpu = config.device in NAMED_GPUS or pick_device(config.device).type == "cuda"
    if "use_torch_compile" not in given:
        config.use_torch_compile = on_gpu
    if on_gpu and script == "train.py" and "micro_batch_size" not in own:
        config.micro_batch_size = "auto"
    if saved and saved["step"] > config.max_steps:
        raise UserError(f"{path} is at step {saved['step']}, after --max_steps {config.max_steps}")
    return config, saved


def read_options(path: Path) -> dict:
    """Return the options in a .toml file, or those of a run in its config.json."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)["config"]
    except Exception as error:
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
        return find_newest(config_class.checkpoint_folder(flags))
    path = Path(resume).expanduser()
    if path.is_dir() and not (path := find_newest(ckpt.checkpoint_folder(path))):
        raise UserError(f"--resume {resume}: the folder holds no checkpoint")
    return path


def check_folders(config: RunOptions, saved: dict | None) -> None:
    """Raise UserError if the run would write over another's files, or over its own later ones."""
    run_id, step = (saved["run_id"], saved["step"]) if saved else (None, 0)
    folder, log, name = config.checkpoint_dir, logged_run(config.log_dir), "checkpoint_dir"
    held = load_checkpoint(newest) if (newest := find_newest(folder)) else None
    if held and held["run_id"] != run_id:
        found = f"{folder} holds the checkpoints of another run"
    elif held and held["step"] > step:
        found = f"{newest} is at step {held['step']}, after step {step}"
    elif log is not None and log.get("run_id", "") != run_id and not begins_anew(config):
        found, name = f"{config.log_dir} holds the log of another run", "log_dir"
    else:
        return
    if not config.overwrite:
        ways = f"give another --{name}, or --overwrite it"
        raise UserError(f"{found}; continue it with --resume auto, {ways}")


def begins_anew(config: RunOptions) -> bool:
    """Return whether the log is replaced: by --overwrite, or by --resume auto where its run ended
    before the first checkpoint in the same folder."""
    log = (logged_run(config.log_dir) or {}).get("config", {})
    auto = flag_value(sys.argv[1:], "resume") == "auto"
    unsaved = log.get("checkpoint_dir") == str(config.checkpoint_dir) and auto
    none_saved = find_newest(config.checkpoint_dir) is None
    return config.resume is None and (config.overwrite or (unsaved and none_saved))


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
        dtype = faster if config.dtype == "auto" else getattr(torch, config.dtype)
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
        return cls(config, saved, process, dtype, state, state.step)

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
        that --overwrite replaces, and see that the disk has room for three."""
        config, state, trackers = self.config, self.state, []
        anew = begins_anew(config)
        if self.process.is_main:
            for path in config.checkpoint_dir.glob("model_*.pt") if config.overwrite else ():
                old = load_checkpoint(path)
                if old["run_id"] != state.run_id or old["step"] > state.step:
                    path.unlink()
            held = sum(path.stat().st_size for path in config.checkpoint_dir.glob("model_*.pt"))
            need = 3 * 12 * model.num_parameters() - held
            check_space(config.checkpoint_dir, need, "saving this run")
            trackers = open_trackers(config, state)
        sizes = {"start": state.step, "total": config.max_steps, "overwrite": anew}
        self.logger = Logger(
            config.log_dir, is_main=self.process.is_main, trackers=trackers, **sizes
        )
        if self.process.is_main:
            content = {"command": sys.argv, "run_id": state.run_id, **about}
            content["tokenizer"] = tokenizer_name(about["tokenizer"])
            content["config"] = config.to_dict()
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


def open_trackers(config: RunOptions, state: TrainState) -> list[Tracker]:
    """Open Weights & Biases and trackio, which has the same interface, as far as asked for."""
    shared, trackers = {"project": "gpt2", "config": config.to_dict(), "resume": "allow"}, []
    if getattr(config, "wandb", False):
        options = {"id": state.run_id, "dir": str(config.log_dir), **shared}
        trackers.append(import_module("wandb").init(**options))
    if getattr(config, "trackio", False):
        trackers.append(import_module("trackio").init(name=state.run_id, **shared))
    return trackers
