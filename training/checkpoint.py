"""The checkpoint file: the one place that knows its format.

    model         every weight in bfloat16, under nanoGPT's names: complete and usable by itself
    model_low     the low 16 bits that bfloat16 drops, int16: both together are the float32 weights
    optimizer     state by parameter name
    step, tokens, best_loss, seed (with step, all there is to the random state), run_id
    guard         the recent losses and gradient norms that spikes are measured against
    model_config, tokenizer, train_tokens, train_config, versions, format_version

Plain containers and tensors, so that torch.load(path, weights_only=True, mmap=True) reads it. State
is that of the whole model: any file resumes on any number of processes.
"""

import math
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from data.tokenizer import TOKENIZERS
from model.config import SIZED, GPTConfig, ModelError
from model.gpt import GPT, skeleton
from model.huggingface import load_pretrained
from utils.errors import UserError
from utils.files import atomic_write, check_space, sync_folder

FORMAT_VERSION = 1
LAST, BEST, NUMBERED = "model_last.pt", "model_best.pt", "model_step_{:06d}.pt"
STABLE = "model_stable.pt"  # of --schedule wsd, before it decays
TYPES = {
    "model": dict,
    "model_low": dict,
    "optimizer": dict,
    "step": int,
    "tokens": int,
    "best_loss": float,
    "seed": int,
    "run_id": str,
    "model_config": dict,
    "tokenizer": str,
    "train_tokens": int,
    "train_config": dict,
    "guard": dict,
}
LARGEST = {int: 2**63 - 1, float: math.inf}  # the numbers among them lie between 0 and this
DTYPES = {  # of the tensors that belong to one weight; all but step have its shape
    "model": torch.bfloat16,
    "model_low": torch.int16,
    "step": torch.float32,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "momentum_buffer": torch.float32,
}
ADAMW, MUON = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)


class CheckpointError(UserError):
    """A checkpoint that cannot be read, written or used here. Names the path."""


def split_float32(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper half of float32 numbers as bfloat16, rounded half up, and the int16 that is left.

    Rounding half up on the bits as an integer keeps the difference within int16 for every pattern,
    infinities and NaNs included.
    """
    bits = x.contiguous().view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
    return high.view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """The float32 numbers that split_float32 took apart, bit for bit."""
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def assemble(weights: dict[str, Tensor], **rest: object) -> dict:
    """What a checkpoint file holds. `weights` are float32 on the CPU; `rest` is what
    TYPES lists beside the two halves of them."""
    halves = {name: split_float32(weight) for name, weight in weights.items()}
    state = {
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__)},
        "model": {name: high for name, (high, _) in halves.items()},
        "model_low": {name: low for name, (_, low) in halves.items()},
        **rest,
    }
    assert set(TYPES) <= set(state), set(TYPES) - set(state)
    return state


def save_checkpoint(path: Path, state: dict) -> None:
    """Writes what `assemble` made in one step: the file under `path` is the old one or all of the
    new one.

    Raises CheckpointError if it cannot be written, before a byte is if the disk is too full.
    """
    moments = [x for values in state["optimizer"].values() for x in values.values()]
    tensors = [*state["model"].values(), *state["model_low"].values(), *moments]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".tmp").unlink(missing_ok=True)  # what a killed run left
        check_space(path.parent, sum(1000 + x.nbytes for x in tensors), path.name)
        with atomic_write(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError, UserError) as error:  # a full disk is a RuntimeError to torch
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        kept = "; the one before it is untouched" if path.exists() else ""
        raise CheckpointError(f"{path} could not be written: {reason}{kept}") from error


def keep_numbered(folder: Path, step: int, keep: int) -> None:
    """Keeps model_last.pt as model_step_{step} too, and of these the newest `keep`."""
    if keep:
        link = folder / NUMBERED.format(step)
        link.unlink(missing_ok=True)
        try:
            os.link(folder / LAST, link)  # model_last.pt is replaced, never rewritten
        except OSError:  # a file system without hard links
            with open(folder / LAST, "rb") as last, atomic_write(link) as copy:
                shutil.copyfileobj(last, copy)
        # those of later steps are of a run that was gone back from: not its to keep or remove
        for old in [path for path in numbered(folder) if step_of(path) <= step][:-keep]:
            old.unlink()
        sync_folder(folder)


def numbered(folder: Path) -> list[Path]:
    """The numbered checkpoints of a folder, oldest first."""
    found = folder.glob("model_step_*.pt")
    return sorted((path for path in found if path.stem[11:].isdigit()), key=step_of)


def step_of(path: Path) -> int:
    """The step of a numbered checkpoint."""
    return int(path.stem.removeprefix("model_step_"))


def find_newest(folder: Path) -> Path | None:
    """The checkpoint that --resume auto continues: the last, else a numbered one, else what was
    written later, the best or that from before a decay."""
    named = [folder / LAST, *reversed(numbered(folder))]
    others = [path for path in (folder / BEST, folder / STABLE) if path.exists()]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return next((path for path in (*named, *others) if path.exists()), None)


def remove_all(folder: Path) -> None:
    """Removes the checkpoints of a run that another one overwrites."""
    for path in [folder / LAST, folder / BEST, folder / STABLE, *numbered(folder)]:
        path.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict:
    """The whole file as a dict, its tensors mapped from disk. Code in a file is refused, not run.

    Raises CheckpointError for a file that is absent, damaged or not a checkpoint of this project.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle can ask torch for anything
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint of plain tensors ({type(error).__name__})"
        ) from error
    if type(state) is not dict or not is_sound(state.get("format_version"), int):
        raise CheckpointError(f"{path} is not a checkpoint of this project's train.py")
    if state["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format {state['format_version']}; this code reads {FORMAT_VERSION}"
        )
    state.setdefault("guard", {})  # files of before there was one
    wrong = [key for key, kind in TYPES.items() if not is_sound(state.get(key), kind)]
    if not wrong and not is_guard(state["guard"]):
        wrong = ["guard"]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {', '.join(wrong)} missing or of a wrong type")
    return state


def is_sound(value: object, kind: type) -> bool:
    """Whether a value is of that kind and, if a number, neither negative nor beyond int64."""
    return type(value) is kind and (kind not in LARGEST or 0 <= value <= LARGEST[kind])


def is_guard(values: dict) -> bool:
    """Whether these are the windows and counts that training/guard.py keeps, or nothing."""
    windows = [values.get(name, []) for name in ("loss", "grad_norm")]
    counts = [values.get(name, 0) for name in ("skipped", "in_a_row")]
    lists = all(type(window) is list for window in windows)
    numbers = lists and all(type(x) is float for window in windows for x in window)
    return numbers and all(is_sound(count, int) for count in counts)


def is_plain(x: object, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Whether a value is such a tensor, with all its numbers in the file and in a row."""
    plain = type(x) is Tensor and x.layout is torch.strided and not x.is_nested and x.is_cpu
    return plain and x.dtype is dtype and x.shape == shape and x.is_contiguous()


def model_config(state: dict, path: Path) -> GPTConfig:
    """The architecture that a loaded checkpoint holds. Raises CheckpointError, before memory for
    it is taken, where the tensors in the file are of another."""
    model, low, optimizer = state["model"], state["model_low"], state["optimizer"]
    try:
        config = GPTConfig(**state["model_config"])
        if config.n_layer > len(model):
            raise ModelError(f"{config.n_layer} layers of {len(model)} weights")
        shapes = {name: x.shape for name, x in skeleton(config).state_dict().items()}
    except (TypeError, ValueError, RuntimeError) as error:  # of sizes beyond int64, the last
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} describes no model that can be built: {reason}") from error
    misfit = f"{path} does not fit its own architecture"
    if not set(shapes) == set(model) == set(low) == (set(optimizer) or set(shapes)):
        raise CheckpointError(f"{misfit}: weights are missing or unknown")
    for name, shape in shapes.items():
        moments = optimizer.get(name)
        found = {**(moments if type(moments) is dict else {}), "model": model[name]}
        found["model_low"] = low[name]
        kept = MUON if MUON[0] in found else ADAMW
        for part in ("model", "model_low", *(kept if optimizer else ())):
            if not is_plain(found.get(part), DTYPES[part], () if part == "step" else shape):
                raise CheckpointError(f"{misfit}: {part} of {name} is not as train.py writes it")
    return config


def load_weights(model: GPT, state: dict, path: Path, *, exact: bool) -> None:
    """Fills the model with a checkpoint's weights: float32 if `exact`, else bfloat16 alone."""
    weights = state["model"]
    try:
        if exact:
            low = state["model_low"]
            weights = {name: join_float32(high, low[name]) for name, high in weights.items()}
        model.load_state_dict(weights)
    except (RuntimeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} does not fit its own architecture: {error}") from error


def load_model(path: Path, *, exact: bool = False) -> tuple[GPT, dict]:
    """The model of a checkpoint, ready to be used in evaluation mode, and the rest of the file."""
    state = load_checkpoint(path)
    model = skeleton(model_config(state, path)).to_empty(device="cpu")
    load_weights(model, state, path, exact=exact)
    return model.eval(), state


def open_model(
    checkpoint: Path, pretrained: str | None, *, exact: bool = False
) -> tuple[GPT, str, dict]:
    """A model in evaluation mode, its tokenizer's name, and the rest of the file: the Hugging Face
    model `pretrained` (name or folder), where the rest is empty, or else that of a checkpoint, of
    which `exact` reads the float32 weights, not their bfloat16 half alone."""
    if pretrained is None:
        model, state = load_model(checkpoint, exact=exact)
        return model, state["tokenizer"], state
    model = load_pretrained(pretrained)
    names = {kind.vocab_size: name for name, kind in TOKENIZERS.items()}
    if model.config.vocab_size not in names:
        raise ModelError(
            f"{pretrained} has {model.config.vocab_size} tokens, those of no tokenizer here"
        )
    return model.eval(), names[model.config.vocab_size], {}


def describe(config: GPTConfig) -> dict:
    """A GPTConfig as plain values for the file: its sizes, and what else is not GPT-2's."""
    default = GPTConfig()
    return {
        name: value
        for name, value in asdict(config).items()
        if name in SIZED or value != getattr(default, name)
    }
