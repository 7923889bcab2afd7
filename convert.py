"""Convert between this project's checkpoints and Hugging Face folders.

    python convert.py --checkpoint checkpoints/model_best.pt --out exported/
    python convert.py --model gpt2 --out checkpoints/gpt2.pt

The exported folder (GPT-2, LLaMA or Qwen3) loads with transformers' AutoModelForCausalLM and
AutoTokenizer, in float32 with every bit of the weights. An imported GPT-2 can be sampled, scored
and resumed.
"""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from config import TrainConfig, recipe_of
from data.tokenizer import load_tokenizer, save_tokenizer
from finetuning.chat import CHAT_TEMPLATE
from model.huggingface import save_pretrained
from training import checkpoint as ckpt
from training.checkpoint_folder import is_chat, open_model
from training.state import TrainState
from utils.cli import run
from utils.errors import UserError


@dataclass
class ConvertConfig:
    """Convert between this project's checkpoints and Hugging Face folders."""

    out: Path
    """Output path: a folder with --checkpoint, a .pt file with --model."""
    checkpoint: Path | None = None
    """Checkpoint to export for transformers, or a folder: its best one, else its newest."""
    model: str | None = None
    """Hugging Face name (gpt2) or folder to import."""


def export_checkpoint(config: ConvertConfig) -> None:
    """Write a checkpoint as a folder for transformers."""
    model, name, saved = open_model(config.checkpoint, None, exact=True)
    tokenizer, template = load_tokenizer(name), CHAT_TEMPLATE if is_chat(saved) else None
    try:
        save_pretrained(model, config.out)
        save_tokenizer(tokenizer, config.out, model.config.block_size, template)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{config.out} could not be written whole: {reason}; choose another --out"
        ) from error


def import_model(config: ConvertConfig) -> None:
    """Write a Hugging Face model as a checkpoint at step 0, without optimizer state."""
    if config.out.suffix != ".pt":
        raise UserError(f"--out {config.out} must end in .pt with --model")
    model, tokenizer, _ = open_model(config.out, config.model)
    shape = ckpt.config_values(model.config)
    names = ("n_layer", "n_head", "n_embd", "block_size")
    settings = TrainConfig(recipe=recipe_of(model.config), **{name: shape[name] for name in names})
    state = ckpt.assemble(
        model.state_dict(),
        optimizer={},
        seed=settings.seed,
        model_config=shape,
        tokenizer=tokenizer,
        train_tokens=0,
        train_config=settings.to_dict(),
        **TrainState.start(settings, None).to_checkpoint(),
    )
    config.out.parent.mkdir(parents=True, exist_ok=True)
    ckpt.save_checkpoint(config.out, state)


def main(config: ConvertConfig) -> None:
    if (config.checkpoint is None) == (config.model is None):
        raise UserError("give one of --checkpoint (to a folder) and --model (to a .pt file)")
    if config.out.exists():
        raise UserError(f"--out {config.out} exists already; choose another path")
    (export_checkpoint if config.model is None else import_model)(config)
    print(f"wrote {config.out}")


if __name__ == "__main__":
    run(main, ConvertConfig)
