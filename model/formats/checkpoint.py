"""The format of a checkpoint file, how to read it, and how to find the checkpoints of a folder.

    model         weights in bfloat16, under nanoGPT's names: enough to use the model
    model_low     float32 bits minus the bfloat16 half, int16: with model, the float32 weights
    optimizer     optimizer state by parameter name
    step, tokens, best_loss, run_id, ... (step and seed determine all random numbers)
    script, config (options, resolved), model_config, tokenizer, versions
    init_checksum, data_order, val_checksum (checkpoint_entries of train.py and finetune.py)
    checksums     sums of the CRC-32 of the rows of model, model_low and optimizer

A file has plain containers and tensors: torch.load(path, weights_only=True, mmap=True) reads it.
It holds the weights and optimizer state of the whole model, so a run resumes on any number of
processes. training/writer.py writes it.
"""

import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT
from model.initial_weights import build_without_weights
from model.rows import RowIndex, Rows, is_vector
from utils.distributed import ALONE, Process
from utils.errors import UserError, reading
from utils.files import describe_searched_place
from utils.launch import is_main_process

FORMAT_VERSION = 7
LAST = "model_last.pt"
BEST = "model_best.pt"  # lowest validation loss
NUMBERED = "model_step_{:06d}.pt"  # with --keep_last
NUMBERED_NAME = re.compile(r"model_step_(\d{6}|[1-9]\d{6,})\.pt", re.ASCII)  # names by NUMBERED
# Types of the values in optimizer state that are no tensors.
PLAIN_VALUES = (bool, int, float, str, type(None))
# The head of a reward model (finetune.py --method reward), which replaces the head for logits.
REWARD_HEAD = "reward_head.weight"

# A section of a file: leaves by parameter name; in "optimizer", by parameter name, then state name,
# and perhaps further in lists or dicts of the optimizer. A leaf is a Tensor, or in
# training/writer.py an OwnRows: the rows that one process holds. In "optimizer" it may be a plain
# value.
Section = Mapping[str, Any]


class Checkpoint(TypedDict, total=False):
    """Content of a checkpoint file; docs/FORMATS.md describes the keys. It is {} for a model of
    another project. Only files of train.py have `recipe` and `corpus`. Files of convert.py have
    weights, checksums, `script`, `config`, `model_config`, `tokenizer`, and the progress of a run
    at step 0."""

    format_version: int
    versions: dict[str, str]
    """Version of PyTorch that wrote the file: {"torch": "2.9.1"}."""
    model: dict[str, Tensor]
    """Weights by parameter name, rounded to bfloat16."""
    model_low: dict[str, Tensor]
    """By parameter name, int16: the difference of the float32 bits to those of `model`, as integers
    (split_float32). Buffers of other dtypes are whole in `model`, and not here."""
    optimizer: dict[str, dict[str, Any]]
    """Optimizer state by parameter name, then by state name ("exp_avg"); {} before step 1."""
    group_values: dict[str, dict[str, Any]]
    """By parameter name, the values of its optimizer's group that have changed since the start of
    the run, such as a counter; {} for the optimizers of this project."""
    checksums: dict[str, int]
    """For each of model, model_low and optimizer, the sum of the CRC-32 of its rows."""
    script: str
    """The script that wrote the file. train.py and finetune.py resume only their own files, and no
    script resumes a file of convert.py."""
    config: dict
    """Options by name, resolved. convert.py writes only `init_from`, the name of the model."""
    derived: list[str]
    """Names of options in DERIVED (config.py) that no flag set, or only to "auto"."""
    model_config: dict
    """Fields of GPTConfig."""
    tokenizer: str
    """Spec of the tokenizer: see data/tokenizer.py."""
    recipe: dict
    """Fields of Recipe."""
    init_checksum: int | None
    """Checksum of the weights of --init_from; None for random weights."""
    run_id: str
    parent: dict | None
    """For a branch, the run_and_step of the checkpoint in another folder that it resumed; else
    None."""
    step: int
    """Steps done, skipped ones included."""
    tokens: int
    """Tokens of these steps, on all processes; those of finetune.py include padding."""
    position: int
    """Sequences read so far, on all processes; 0 for finetune.py."""
    best_loss: float
    """Lowest validation loss at the time of the save; infinite before the first validation."""
    bad_steps: int
    """Number of non-finite steps in a row, up to this step."""
    scaler: dict
    """State of the GradScaler in float16, else {}."""
    command: list[str]
    working_dir: str
    """Absolute path of the folder in which the command ran: paths of `config` are relative to it.
    """
    data_order: dict
    """Data and options that determine the batch of each step."""
    val_checksum: int | None
    """Checksum of the validation data of best_loss; None without validation."""
    corpus: str
    """Name of the corpus: "FineWeb-Edu", or of a mixture "75 % of a, 25 % of b"."""


def split_float32(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into bfloat16, its upper half rounded, and an int16 that restores the rest.
    A reader of a checkpoint may use the bfloat16 half alone.

    The 32 bits, read as an integer, are rounded half up, so that the difference always fits into
    the int16, from -2^15 to 2^15 - 1: 0x3F80C000 gives 0x3F81 and -0x4000. All NaNs become the same
    NaN, because rounding would turn some of them into infinity.
    """
    # `view` reads the 32 bits of each number as an integer
    bits = x.masked_fill(x.isnan(), torch.nan).contiguous().view(torch.int32)  # NaNs become equal
    high = ((bits + 0x8000) >> 16).to(torch.int16)  # 0x8000: half a unit of the upper half
    # the remainder: positive where `high` was rounded down, negative where it was rounded up
    low = (bits - (high.to(torch.int32) << 16)).to(torch.int16)
    return high.view(torch.bfloat16), low


def join_float32(high: Tensor, low: Tensor) -> Tensor:
    """Join the two parts that split_float32 returns into the same float32, bit for bit; every NaN
    becomes the same NaN."""
    # + and not |, because `low` (int16) is negative where `high` was rounded up. int32, because
    # int16 is too short for `<< 16`.
    bits = (high.contiguous().view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
    return bits.view(torch.float32)


class Float32Rows:
    """Rows (model/rows.py) of a float32 weight, whose two halves are in a checkpoint file. Each
    read of rows joins their halves."""

    def __init__(self, high: Tensor, low: Tensor) -> None:
        self.high = high  # bfloat16, mapped from the file
        self.low = low  # int16, mapped from the file
        self.shape = high.shape  # as Rows have one; reads nothing from the file

    def __getitem__(self, rows: RowIndex) -> Tensor:
        return join_float32(self.high[rows], self.low[rows])


def flatten(section: Section) -> dict:
    """Return a flat dict of the tensors of a section, for checksums and file offsets, which go
    tensor by tensor. Its keys join the names, and plain values, such as a counter, are left out.

        {"lm_head.weight": {"exp_avg": a, "factors": [b, c], "count": 3}} gives
        {"lm_head.weight exp_avg": a, "lm_head.weight factors 0": b, "lm_head.weight factors 1": c}
    """
    flat = {}
    for name, value in section.items():
        if isinstance(value, list | tuple):  # such as the two preconditioners of Shampoo
            value = dict(enumerate(value))
        if isinstance(value, dict):
            for inner_name, x in flatten(value).items():
                flat[f"{name} {inner_name}"] = x
        elif not isinstance(value, PLAIN_VALUES):
            flat[name] = value  # a Tensor, or in training/writer.py an OwnRows
    return flat


def sum_rows(name: str, rows: Sequence[int], content: Tensor) -> int:
    """Return the sum of the CRC-32 of some rows of a tensor. `rows` are their indices, `content`
    (r, columns) on the CPU has only these rows. Name and index change the CRC-32 of a row, so that
    the sum changes if two rows are exchanged."""
    crc_of_name = zlib.crc32(name.encode())
    # viewed as uint8, because NumPy has no bfloat16
    row_bytes = content.contiguous().view(torch.uint8).numpy()  # (r, bytes of a row)
    total = 0  # a sum, because processes add up those of their rows
    for index, row in zip(rows, row_bytes, strict=True):
        total += zlib.crc32(row, crc_of_name ^ index)  # the second argument is the start value
    return total


def sum_part(tensors: Mapping[str, Rows], row_part: int, num_parts: int) -> int:
    """Return the sum of the CRC-32 of one of `num_parts` equal parts of the rows of each tensor; a
    vector is one row. Slicing Rows (model/rows.py) reads these rows from the file."""
    total = 0
    for name, x in tensors.items():
        if is_vector(x.shape):  # (n,), (n, 1) or ()
            if row_part == 0:  # each row counts in one part only
                total += sum_rows(name, range(1), x[...].reshape(1, -1))
            continue
        num_rows = x.shape[0]
        start = num_rows * row_part // num_parts
        end = num_rows * (row_part + 1) // num_parts
        total += sum_rows(name, range(start, end), x[start:end])
    return total


def rows_checksum(tensors: Mapping[str, Rows], process: Process = ALONE) -> int:
    """Return the sum of the CRC-32 of all rows of whole tensors. All processes must call it: each
    reads a part of the rows."""
    own_sum = sum_part(tensors, process.data_rank, process.data_parallel)
    # `merge` joins the dicts of all processes, {0: 123, 1: 456}. Processes with the same data_rank
    # (tensor parallelism) have read the same rows, which count once.
    return sum(process.merge({process.data_rank: own_sum}).values())


def verify(
    checkpoint: Checkpoint,
    section: Literal["model", "model_low", "optimizer"],
    process: Process = ALONE,
) -> None:
    """Raise ValueError if the tensors of a section do not have their checksum; the caller's
    reading_checkpoint makes a UserError of it. All processes must call it: each reads a part of the
    rows."""
    if checkpoint["checksums"][section] != rows_checksum(flatten(checkpoint[section]), process):
        raise ValueError(f"the tensors of {section!r} do not have their checksum")


def reading_checkpoint(path: Path) -> AbstractContextManager:
    """Return a context in which any error from a damaged or foreign file becomes a UserError."""
    return reading(path, "a checkpoint of this project")


def load_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a file, with tensors mapped from disk. Code in the file never runs.
    Raises OSError for a missing file, UserError for a damaged file or a file that is not a
    checkpoint of this project."""
    with reading_checkpoint(path):
        # A Checkpoint is a dict: {"format_version": 7, "model": {...}, "step": 4000, ...}.
        # weights_only refuses pickled code; with mmap, tensors are read when they are used.
        checkpoint: Checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        version = checkpoint["format_version"]
        if version != FORMAT_VERSION:
            # format 6 had n-grams
            raise ValueError(
                f"its format is {version}, not {FORMAT_VERSION}; commit 67fa719 opens format 6"
            )
    return checkpoint


def run_and_step(checkpoint: Checkpoint) -> dict:
    """Return the run ID and the step of a checkpoint, which identify it in any folder."""
    return {"run_id": checkpoint["run_id"], "step": checkpoint["step"]}


def check_head(path: Path, checkpoint: Checkpoint, is_reward_model: bool) -> None:
    """Raise UserError for a reward model unless `is_reward_model`, and for any other model if
    `is_reward_model`."""
    has_reward_head = REWARD_HEAD in checkpoint["model"]
    if has_reward_head == is_reward_model:
        return
    description = "no reward model; finetune.py --method reward trains one"
    if has_reward_head:
        description = "a reward model, which rates text and cannot write it"
    raise UserError(f"{path} is {description}")


def open_weights(
    path: Path, checkpoint: Checkpoint, process: Process = ALONE, *, float32: bool = True
) -> tuple[GPTConfig, Mapping[str, Rows]]:
    """Return the architecture of an open checkpoint, and its weights by name, mapped from disk:
    float32, or only their bfloat16 half. Raises UserError if the weights do not have their
    checksums. All processes must call it: each verifies a part of the rows."""
    with reading_checkpoint(path):
        config = GPTConfig(**checkpoint["model_config"])
        high = checkpoint["model"]  # by name, bfloat16; buffers of other dtypes as they are
        verify(checkpoint, "model", process)
        if not float32:
            return config, high
        low = checkpoint["model_low"]  # by name, int16
        verify(checkpoint, "model_low", process)
        weights: dict[str, Rows] = dict(high)  # buffers of other dtypes have no low half
        for name, low_half in low.items():
            weights[name] = Float32Rows(high[name], low_half)  # joins rows when they are read
        return config, weights


def load_model(
    path: Path, model_class: type[GPT] = GPT, *, float32: bool = False
) -> tuple[GPT, Checkpoint]:
    """Return the model of a checkpoint in eval mode, bfloat16 unless `float32`, and the checkpoint.
    Raises UserError for a reward model unless `model_class` is RewardModel, and for any other model
    if it is."""
    checkpoint = load_checkpoint(path)
    # the only class besides GPT is RewardModel
    check_head(path, checkpoint, model_class is not GPT)
    config, weights = open_weights(path, checkpoint, float32=float32)  # Rows by name, verified
    with reading_checkpoint(path):
        model = build_without_weights(model_class, config)  # on "meta": shapes only
        whole_tensors = {name: rows[...] for name, rows in weights.items()}  # reads all rows
        # assign=True, because a model on the device "meta" has no memory to copy into
        model.load_state_dict(whole_tensors, strict=True, assign=True)
    return model.eval(), checkpoint


# the checkpoints of a folder


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Return a folder's numbered checkpoints, the newest first. A file of another name, such as
    model_step_000010_good.pt, is the user's own copy and is left out."""
    paths = [path for path in folder.glob("*.pt") if NUMBERED_NAME.fullmatch(path.name)]
    # sort by length first: NUMBERED pads steps to six digits, and a longer name is a later step
    return sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True)


def existing_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder: the last, the numbered ones, the best. This is not always
    the order of their steps: the best may be of any step."""
    paths = [folder / LAST, *numbered_checkpoints(folder), folder / BEST]
    return [path for path in paths if path.exists()]


def step_of(path: Path) -> int:
    """Return the step of the checkpoint in a file."""
    return load_checkpoint(path)["step"]


def find_newest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from a folder, or None if the folder has no checkpoint. It is
    the one of the latest step: after a kill, that may be the best one."""
    # of equal steps the first that existing_checkpoints lists, such as model_last.pt
    return max(existing_checkpoints(folder), key=step_of, default=None)


def find_checkpoint_folder(path: Path) -> Path:
    """Return the folder of checkpoints in a run's folder (--run_dir); return any other folder
    unchanged."""
    folder = path / "checkpoints"
    return folder if folder.is_dir() else path


def is_own_checkpoint(path: Path) -> bool:
    """Return True for a file that begins like a checkpoint of this project."""
    with open(path, "rb") as file:
        beginning = file.read(1024)
    # The file is a zip file that begins with the pickled dict, whose first key is format_version.
    # Pickle writes a string as X, its length (14) in four bytes, and the text.
    return b"X\x0e\0\0\0format_version" in beginning


def find_checkpoint(model_name: str | Path) -> Path | None:
    """Return the path of the checkpoint that `model_name`, a file or folder, stands for. Return
    None for a model of another project: a file, a Hugging Face folder, or a name of the hub, which
    is a str: a Path must exist.

    A folder stands for its best checkpoint, else the newest, else a checkpoint with any other name,
    such as a file of convert.py; the main process prints which one. Raises UserError for a folder
    without a model.
    """
    path = Path(model_name)
    if path.is_file():
        return path if is_own_checkpoint(path) else None
    if not path.is_dir():
        if isinstance(model_name, Path):
            # describe_searched_place: " in /tmp, but there is /clone/runs/demo"
            raise UserError(f"there is no {path}{describe_searched_place(path)}")
        # A missing .pt is a misspelled checkpoint and not a name of the hub: load_checkpoint will
        # raise OSError for it.
        return path if path.suffix == ".pt" else None
    folder = find_checkpoint_folder(path)
    # in order of preference
    candidates = [folder / BEST, *existing_checkpoints(folder), *sorted(folder.glob("*.pt"))]
    for file in candidates:
        if file.exists() and is_own_checkpoint(file):
            if is_main_process():  # prints to stderr, because stdout is for results
                # step 0: a run that has just begun, or a file of convert.py
                print(f"reading {file}, of step {step_of(file):,}", file=sys.stderr)
            return file
    # This config.json is of Hugging Face: a run has its config.json in logs/.
    if (path / "config.json").exists():
        return None
    raise UserError(
        f"{folder} holds no checkpoint{describe_other_runs()} and no model of Hugging Face's "
        "format; for a model of nanoGPT, build-nanogpt or llm.c, give the path of the file"
    )


def describe_other_runs() -> str:
    """Return the runs below runs/ that have checkpoints, to insert into a message:
    ", but runs/a runs/b,", or "" if there is none."""
    folders = Path("runs").rglob("checkpoints")
    run_folders = sorted(str(x.parent) for x in folders if existing_checkpoints(x))
    return f", but {' '.join(run_folders)}," if run_folders else ""
