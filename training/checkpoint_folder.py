"""Checkpoints of a folder: what they are called, which one to resume or to use, which to keep."""

import json
import sys
from pathlib import Path

from data.tokenizer import TOKENIZERS, check_vocabulary
from finetuning.chat import CHAT_TEMPLATE
from model.gpt import GPT
from model.huggingface import find_folder, load_pretrained
from training.checkpoint import load_checkpoint, load_model
from utils.cli import given_options
from utils.distributed import is_main
from utils.errors import UserError
from utils.files import link_or_copy, sync_folder

LAST, BEST, NUMBERED = "model_last.pt", "model_best.pt", "model_step_{:06d}.pt"
STABLE = "model_stable.pt"  # --schedule wsd: the last step before the decay


def keep_numbered(folder: Path, step: int, keep: int) -> None:
    """Link model_last.pt as model_step_{step}.pt, and keep the newest `keep` of these."""
    if keep:
        # model_last.pt is replaced, never rewritten
        link_or_copy(folder / LAST, folder / NUMBERED.format(step))
        earlier = [path for path in numbered_checkpoints(folder) if step_of(path) <= step]
        for path in earlier[:-keep]:
            path.unlink()
        sync_folder(folder)


def step_of(path: Path) -> int:
    """Return the step in the name of a numbered checkpoint."""
    return int(path.stem.removeprefix("model_step_"))


def numbered_checkpoints(folder: Path) -> list[Path]:
    """Return the numbered checkpoints of a folder, oldest first."""
    found = folder.glob("model_step_*.pt")
    return sorted((path for path in found if path.stem[11:].isdigit()), key=step_of)


def find_newest(folder: Path) -> Path | None:
    """Return the checkpoint for --resume auto: the last, else the newest numbered one, else the
    later written of best and stable; None if there is none."""
    if (folder / LAST).exists():
        return folder / LAST
    others = [path for path in (folder / STABLE, folder / BEST) if path.exists()]
    others.sort(key=lambda path: path.stat().st_mtime)
    return next(reversed(others + numbered_checkpoints(folder)), None)


def step_of_best(folder: Path) -> int | None:
    """Return the step of the best checkpoint of a folder, None if it holds none that is whole."""
    try:
        return load_checkpoint(folder / BEST)["step"]
    except UserError:
        return None


def checkpoint_folder(path: Path) -> Path:
    """Return the folder of checkpoints that a folder is, or that a run's folder holds."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def find_best(path: Path) -> Path:
    """Return a checkpoint to use: `path` itself, or in a folder the best, else the newest one, and
    print which. A run's folder may hold them in checkpoints/."""
    if not path.is_dir():
        return path
    folder = checkpoint_folder(path)
    found = folder / BEST if (folder / BEST).exists() else find_newest(folder)
    if found is None:
        hint = f"; give a Hugging Face folder by --model {path}" if is_hugging_face(path) else ""
        raise UserError(f"{folder} holds no checkpoint of train.py{hint}")
    if is_main():
        print(f"reading {found}", file=sys.stderr)
    return found


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder holds a config.json and weights as transformers reads them."""
    weights = [*folder.glob("*.safetensors*"), *folder.glob("pytorch_model*")]
    return (folder / "config.json").exists() and bool(weights)


def remove_all(folder: Path) -> None:
    """Remove the checkpoints of a folder for a run that overwrites them."""
    named = [folder / name for name in (LAST, BEST, STABLE)]
    for path in [*named, *numbered_checkpoints(folder)]:
        path.unlink(missing_ok=True)


def refuse_both_sources(args: list[str]) -> None:
    """Raise UserError for a command line with both --checkpoint and --model."""
    if {"checkpoint", "model"} <= given_options(args):
        raise UserError("give --checkpoint (of train.py) or --model (Hugging Face), not both")


def load_hugging_face(name: str) -> GPT:
    """Return the model of a Hugging Face name or folder; raise an error if it cannot be used or is
    of a tokenizer that is unknown here."""
    if Path(name).is_file():
        raise UserError(f"--model {name} is a file: give a checkpoint by --checkpoint")
    folder = Path(name)
    if not is_hugging_face(folder) and find_newest(checkpoint_folder(folder)):
        raise UserError(f"--model {name} holds checkpoints: give it by --checkpoint {name}")
    check_vocabulary(find_folder(name))
    return load_pretrained(name)


def is_chat(saved: dict, pretrained: str | None = None) -> bool:
    """Return whether a checkpoint, or the Hugging Face folder `pretrained` that convert.py made of
    one, is of a model that finetune.py taught to chat."""
    if pretrained is not None:
        try:
            config = json.loads((Path(pretrained) / "tokenizer_config.json").read_text("utf-8"))
        except (OSError, ValueError):  # a name of the hub, or a folder without a tokenizer
            return False
        return type(config) is dict and config.get("chat_template") == CHAT_TEMPLATE
    options = saved.get("finetune")
    return type(options) is dict and options.get("plain") is False


def open_model(
    checkpoint: Path, pretrained: str | None, *, exact: bool = False, rewards: bool = False
) -> tuple[GPT, str, dict]:
    """Return a model in evaluation mode, its tokenizer's name, and the file: find_best(checkpoint),
    or none for the Hugging Face name or folder `pretrained`. Raises UserError for a reward model
    unless `rewards` is set."""
    if pretrained is None:
        path = find_best(checkpoint)
        model, state = load_model(path, exact=exact)
        if model.config.reward_head and not rewards:
            raise UserError(
                f"{path} is a reward model, which rates text and writes none; finetune.py takes it "
                "as --reward"
            )
        return model, state["tokenizer"], state
    model = load_hugging_face(pretrained)
    for name, kind in TOKENIZERS.items():
        if kind.vocab_size == model.config.vocab_size:
            return model.eval(), name, {}
    raise UserError(f"no tokenizer here has the {model.config.vocab_size} tokens of {pretrained}")
