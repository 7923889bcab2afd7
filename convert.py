"""Convert between this project's checkpoints and Hugging Face folders: to a GPT-2, LLaMA or
Qwen3, from a GPT-2.

    python convert.py --checkpoint checkpoints/model_best.pt --out exported/
    python convert.py --model gpt2 --out checkpoints/gpt2.pt

A folder so written loads with transformers' AutoModelForCausalLM and AutoTokenizer, in float32 with
every bit of the weights; a .pt file can be sampled, scored and resumed.
"""

import math
import uuid

from safetensors import SafetensorError

from config import ConfigError, ConvertConfig, TrainConfig
from data.tokenizer import load_tokenizer
from model.huggingface import save_pretrained
from training import checkpoint as ckpt
from utils.cli import run


def to_folder(config: ConvertConfig) -> None:
    """A checkpoint as a folder for transformers."""
    model, saved = ckpt.load_model(config.checkpoint, exact=True)
    try:
        save_pretrained(model, config.out, load_tokenizer(saved["tokenizer"]))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{config.out} could not be written whole: {error}") from error


def to_checkpoint(config: ConvertConfig) -> None:
    """A Hugging Face model as a checkpoint at step 0, without optimizer state."""
    if config.out.suffix != ".pt":
        raise ConfigError(f"--out {config.out} must end in .pt with --model")
    model, tokenizer, _ = ckpt.open_model(config.out, config.model)
    shape = ckpt.describe(model.config)
    names = ("n_layer", "n_head", "n_embd", "block_size")
    settings = TrainConfig(**{name: shape[name] for name in names})
    state = ckpt.assemble(
        model.state_dict(),
        optimizer={},
        step=0,
        tokens=0,
        best_loss=math.inf,
        seed=settings.seed,
        run_id=uuid.uuid4().hex,
        model_config=shape,
        tokenizer=tokenizer,
        train_tokens=0,
        train_config=settings.to_dict(),
        guard={},
    )
    ckpt.save_checkpoint(config.out, state)


def main(config: ConvertConfig) -> None:
    if (config.checkpoint is None) == (config.model is None):
        raise ConfigError("give one of --checkpoint (to a folder) and --model (to a .pt file)")
    if config.out.exists():
        raise ConfigError(f"--out {config.out} exists already; remove it or give another")
    (to_folder if config.model is None else to_checkpoint)(config)
    print(f"wrote {config.out}")


if __name__ == "__main__":
    run(main, ConvertConfig)
