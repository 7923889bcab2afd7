"""The checkpoint file, in the one place that knows its format.

    model         weights in bfloat16, under nanoGPT's names: complete and usable by themselves
    model_low     float32 bits minus the bfloat16 half, int16: both give the float32 weights
    optimizer     state by parameter name
    step, tokens, best_loss, run_id, seed (with the step, all random state there is)
    guard         recent losses and gradient norms, for the detection of spikes
    model_config, tokenizer, train_tokens, train_config, versions, format_version
    checksums     of the tensors of model, model_low and optimizer

Plain containers and tensors: torch.load(path, weights_only=True, mmap=True) reads it. The state is
that of the whole model: a file resumes on any number of processes.
"""

import math
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from model.config import SIZED, GPTConfig
from model.empty import empty_gpt
from model.gpt import GPT
from utils.errors import UserError
from utils.files import atomic_write, check_space

FORMAT_VERSION = 1
NAMES_BY_TYPE = {
    dict: ("model", "model_low", "optimizer", "guard", "model_config", "train_config"),
    int: ("step", "tokens", "seed", "train_tokens"),
    float: ("best_loss",),
    str: ("run_id", "tokenizer"),
}
TYPES = {name: kind for kind, names in NAMES_BY_TYPE.items() for name in names}
LARGEST = {int: 2**63 - 1, float: math.inf}  # upper bound of numbers; the lower one is 0
# optimizer state of a weight, all float32; NorMuon adds the last
ADAMW, MUON = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer", "row_squares")


def split_float32(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into bfloat16, rounded half up, and the int16 difference of the bits. Rounding
    them as an integer keeps the difference within int16, infinities and NaNs included."""
    bits = x.contiguous().view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
    return high.view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """Join what split_float32 split, bit for bit."""
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


def assemble(weights: dict[str, Tensor], **rest: object) -> dict:
    """Return the content of a file from float32 `weights` on the CPU and the other TYPES."""
    halves = {name: split_float32(weight) for name, weight in weights.items()}
    state = {
        "format_version": FORMAT_VERSION,
        "versions": {"torch": str(torch.__version__)},
        "model": {name: high for name, (high, _) in halves.items()},
        "model_low": {name: low for name, (_, low) in halves.items()},
        **rest,
    }
    assert set(TYPES) <= set(state), set(TYPES) - set(state)
    state["checksums"] = {
        part: checksum(state[part]) for part in ("model", "model_low", "optimizer")
    }
    return state


def checksum(tensors: dict) -> int:
    """Return a number that any flipped bit of the tensors changes: for each, the sum of its 64-bit
    words, at the rate of memory. An optimizer's state is a dict of dicts."""
    total = 0
    for x in tensors.values():
        if isinstance(x, dict):
            part = checksum(x)
        else:
            data = x.contiguous().view(-1).view(torch.uint8)
            words, rest = data.split((len(data) // 8 * 8, len(data) % 8))
            part = int(words.view(torch.int64).sum()) + int(rest.sum())
        total = (31 * total + part) % 2**63
    return total


def verify(state: dict, path: Path, *parts: str) -> None:
    """Raise UserError if the tensors of a part, which model_config has checked, are not those
    that were written. Files from before there were checksums pass."""
    checksums = state.get("checksums", {})
    for part in parts:
        if part in checksums and checksums[part] != checksum(state[part]):
            raise UserError(
                f"{path} is damaged: the tensors of {part!r} do not have their checksum; use "
                "another checkpoint"
            )


def save_checkpoint(path: Path, state: dict) -> None:
    """Write a file atomically: `path` is the old file or the whole new one. Raises UserError
    if it cannot be written, also where its folder is gone; a disk that is too full is found before.
    """
    moments = [x for values in state["optimizer"].values() for x in values.values()]
    tensors = [*state["model"].values(), *state["model_low"].values(), *moments]
    try:
        path.with_name(path.name + ".tmp").unlink(missing_ok=True)  # left by a killed run
        check_space(path.parent, sum(1000 + x.nbytes for x in tensors), path.name)
        with atomic_write(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError, UserError) as error:  # a full disk is a RuntimeError to torch
        kept = "; the one before it is untouched" if path.exists() else ""
        reason = failure_reason(error, path.parent)
        raise UserError(f"{path} could not be written: {reason}{kept}") from error


def failure_reason(error: Exception, folder: Path) -> str:
    """Return why a file could not be written to a folder. PyTorch raises an error of its own while
    it handles that of the system."""
    if not folder.is_dir():
        return f"the folder {folder} was moved or removed; move it back"
    if isinstance(error, UserError):
        return str(error)
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.strerror):
        cause = cause.__context__
    return cause.strerror if cause else "the file is too large for its disk, or the disk is full"


def load_checkpoint(path: Path) -> dict:
    """Return the file as a dict with tensors mapped from disk; code in it is never run. Raises
    UserError for a file that is absent, damaged or not a checkpoint of this project."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path}; train one, or give another path")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle can ask torch for anything
        raise UserError(
            f"{path} is damaged or not a checkpoint of plain tensors ({type(error).__name__}); "
            f"name another one of {path.parent}, if it holds one"
        ) from error
    if type(state) is not dict or not is_valid(state.get("format_version"), int):
        raise UserError(
            f"{path} is not a checkpoint of this project's train.py; of other projects, Hugging "
            "Face folders can be read: --init_from FOLDER, --model FOLDER"
        )
    if state["format_version"] != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {state['format_version']}; this code reads {FORMAT_VERSION}"
        )
    guard = state.setdefault("guard", {})  # older files have none
    wrong = [key for key, kind in TYPES.items() if not is_valid(state.get(key), kind)]
    wrong += ["checksums"] * (type(state.get("checksums", {})) is not dict)
    if wrong or not is_guard_state(guard):
        wrong = ", ".join(wrong or ["guard"])
        raise UserError(f"{path} is damaged: {wrong} missing or of a wrong type")
    return state


def is_valid(value: object, kind: type) -> bool:
    """Return whether a value is of that type and, if a number, not negative or beyond int64."""
    return type(value) is kind and (kind not in LARGEST or 0 <= value <= LARGEST[kind])


def is_guard_state(values: dict) -> bool:
    """Return whether these are windows and counts of training/guard.py, or nothing."""
    windows = [values.get(name, []) for name in ("loss", "grad_norm")]
    counts = [values.get(name, 0) for name in ("skipped", "in_a_row")]
    floats = all(type(w) is list and all(type(x) is float for x in w) for w in windows)
    return floats and all(is_valid(count, int) for count in counts)


def is_plain_tensor(x: object, dtype: torch.dtype, shape: torch.Size) -> bool:
    """Return whether a value is a contiguous dense tensor of that dtype and shape."""
    plain = type(x) is Tensor and x.layout is torch.strided and not x.is_nested and x.is_cpu
    return plain and x.dtype is dtype and x.shape == shape and x.is_contiguous()


def model_config(state: dict, path: Path) -> GPTConfig:
    """Return the architecture of a loaded checkpoint. Raises UserError, before memory for it
    is taken, unless weights and optimizer state have its names, shapes and dtypes."""
    model, low, optimizer = state["model"], state["model_low"], state["optimizer"]
    try:
        config = GPTConfig(**state["model_config"])
        if config.n_layer > len(model):
            raise UserError(f"{config.n_layer} layers of {len(model)} weights")
        shapes = {name: x.shape for name, x in empty_gpt(config).state_dict().items()}
    except (TypeError, ValueError, RuntimeError) as error:  # of sizes beyond int64, the last
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path} describes no model that can be built: {reason}") from error
    misfit = f"{path} does not fit its own architecture"
    if not set(shapes) == set(model) == set(low) == (set(optimizer) or set(shapes)):
        raise UserError(f"{misfit}: weights are missing or unknown")
    for name, shape in shapes.items():
        parts = {"model": (model[name], torch.bfloat16), "model_low": (low[name], torch.int16)}
        if optimizer:
            moments = optimizer[name] if type(optimizer[name]) is dict else {}
            kept = MUON[: len(moments)] if MUON[0] in moments else ADAMW
            parts |= {key: (moments.get(key), torch.float32) for key in kept}
        shapes_by_part = {"step": torch.Size(), "row_squares": torch.Size((*shape[:1], 1))}
        for part, (x, dtype) in parts.items():
            if not is_plain_tensor(x, dtype, shapes_by_part.get(part, shape)):
                raise UserError(f"{misfit}: {part} of {name} is not as train.py writes it")
    return config


def load_weights(model: GPT, state: dict, *, exact: bool) -> None:
    """Load weights of a checkpoint that model_config has checked: float32 if `exact`, else their
    bfloat16 half."""
    weights, low = state["model"], state["model_low"]
    if exact:
        weights = {name: join_float32(high, low[name]) for name, high in weights.items()}
    model.load_state_dict(weights)


def load_model(path: Path, *, exact: bool = False) -> tuple[GPT, dict]:
    """Return the model of a checkpoint in evaluation mode, and the whole file."""
    state = load_checkpoint(path)
    model = empty_gpt(model_config(state, path)).to_empty(device="cpu")
    verify(state, path, "model", *(["model_low"] if exact else []))
    load_weights(model, state, exact=exact)
    return model.eval(), state


def config_values(config: GPTConfig) -> dict:
    """Return a GPTConfig as plain values: its sizes, and the fields that differ from GPT-2's."""
    values, default = asdict(config), asdict(GPTConfig())
    return {name: x for name, x in values.items() if name in SIZED or x != default[name]}
