"""Convert between this project's checkpoints and Hugging Face folders.

    python convert.py --checkpoint checkpoints/model_best.pt --out exported/
    python convert.py --model gpt2 --out checkpoints/gpt2.pt

The exported folder (GPT-2, LLaMA or Qwen3) loads with transformers' AutoModelForCausalLM and
AutoTokenizer, in float32 with every bit of the weights. An imported model can be sampled, scored
and trained from by --init_from.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from config import TrainConfig, recipe_of
from data.file_tokenizer import save_tokenizer
from data.tokenizer import load_tokenizer
from finetuning.chat import CHAT_TEMPLATE, is_chat
from model.huggingface import save_pretrained
from training.checkpoint import assemble, open_model
from training.saver import save_checkpoint
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
    model, name, saved = open_model(config.checkpoint, exact=True)
    save_pretrained(model, config.out)
    template = CHAT_TEMPLATE if is_chat(saved, config.checkpoint) else None
    save_tokenizer(load_tokenizer(name), config.out, model.config.block_size, template)
    if model.config.activation == "relu2":
        print("note: only transformers runs ReLU²; llama.cpp and vLLM compute another function")


def import_model(config: ConvertConfig) -> None:
    """Write a Hugging Face model as a checkpoint at step 0, without optimizer state."""
    if config.out.suffix != ".pt":
        raise UserError(f"--out {config.out} must end in .pt with --model")
    model, tokenizer, _ = open_model(config.model, exact=True)
    sizes = {k: getattr(model.config, k) for k in ("n_layer", "n_head", "n_embd", "block_size")}
    options = TrainConfig(recipe=recipe_of(model.config), **sizes)
    state = assemble(
        model.state_dict(),
        optimizer={},
        script="train.py",
        config=options.to_dict(),
        model_config=asdict(model.config),
        tokenizer=tokenizer,
        train_tokens=0,
        **TrainState.start(None, None).to_checkpoint(),
    )
    config.out.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(config.out, state)


def main(config: ConvertConfig) -> None:
    if (config.checkpoint is None) == (config.model is None):
        raise UserError("give one of --checkpoint (to a folder) and --model (to a .pt file)")
    if config.out.exists():
        raise UserError(f"--out {config.out} exists already; choose another path")
    (export_checkpoint if config.model is None else import_model)(config)
    print(f"wrote {config.out}")


if __name__ == "__main__":
    run(main, ConvertConfig)
