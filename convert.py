"""Convert between this project's checkpoints and Hugging Face folders.

    python convert.py --checkpoint checkpoints/model_best.pt --out exported/
    python convert.py --model gpt2 --out checkpoints/gpt2.pt

The exported folder (GPT-2, LLaMA or Qwen3) loads with transformers' AutoModelForCausalLM and
AutoTokenizer, in float32 with every bit of the weights, and has a model card.
"""

import json
import math
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from config import Recipe, TrainConfig
from data.file_tokenizer import CHAT_TEMPLATE, save_tokenizer
from data.tokenizer import load_tokenizer
from evaluation.table import format_table
from evaluation.tasks import Result
from finetuning.chat import is_chat
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained
from training.checkpoint import assemble, find_checkpoint, open_model
from training.saver import save_checkpoint
from training.state import TrainState
from utils.cli import run
from utils.errors import UserError

CARD = Path(__file__).parent / "scripts" / "model_card.md"  # a template


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
    model, spec, saved = open_model(config.checkpoint, exact=True)
    tokenizer = load_tokenizer(spec)
    save_pretrained(model, config.out, tokenizer.eot, tokenizer.end_ids)
    template = tokenizer.chat_template
    if template is None and is_chat(saved, config.checkpoint, spec):
        template = CHAT_TEMPLATE
    save_tokenizer(tokenizer, config.out, model.config.block_size, template)
    card = model_card(model, tokenizer.name, saved, find_checkpoint(config.checkpoint))
    (config.out / "README.md").write_text(card, encoding="utf-8")
    print(f"on the hub: hf upload USER/NAME {config.out}")
    if model.config.activation == "relu2":
        print("note: only transformers runs ReLU²; llama.cpp and vLLM compute another function")


def model_card(model: GPT, tokenizer: str, saved: dict, path: Path) -> str:
    """Return the README.md of a model: what it is, how it was trained, its scores, how to load it.
    Scores are those of evaluate.py for this checkpoint, beside it, or in logs."""
    shape, options, best = model.config, saved["config"], saved["best_loss"]
    commit = subprocess.getstatusoutput(f"git -C {CARD.parent} rev-parse --short HEAD")
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "shape": f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, "
        f"context {shape.block_size}, {shape.vocab_size:,} tokens ({tokenizer})",
        "trained by": f"{saved['script']}, {options.get('method') or options.get('recipe')}",
        "began from": options.get("init_from") or "random weights",
        "data": saved.get("corpus") or options.get("data"),
        "steps": f"{saved['step']:,}, {saved['tokens']:,} tokens",
        "lowest validation loss": f"{best:.4f} nats" if best < math.inf else None,
        "commit of the code": commit[1] if commit[0] == 0 else None,
    }
    scores = ""
    for folder in (path.parent, Path(options["log_dir"]), Path("logs")):
        if (file := folder / "evaluation.json").is_file() and file.stat().st_size:
            found = json.loads(file.read_text())
            if (found.get("run_id"), found.get("step")) == (saved["run_id"], saved["step"]):
                results = [Result(**result) for result in found["results"]]
                scores = f"## Scores\n\n```\n{format_table(results, shape.size or 'gpt2')}\n```\n\n"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    name = path.resolve().parent.parent.name
    return CARD.read_text().format(name=name, table=table, scores=scores)


def import_model(config: ConvertConfig) -> None:
    """Write a Hugging Face model as a checkpoint at step 0, without optimizer state."""
    if config.out.suffix != ".pt":
        raise UserError(f"--out {config.out} must end in .pt with --model")
    model, tokenizer, _ = open_model(config.model, exact=True)
    sizes = {k: getattr(model.config, k) for k in ("n_layer", "n_head", "n_embd", "block_size")}
    recipe = Recipe(model=model.config.differences(GPTConfig()))
    options = TrainConfig(recipe=str(recipe), **sizes)
    state = assemble(
        model.state_dict(),
        optimizer={},
        script="train.py",
        config=options.to_dict(),
        model_config=asdict(model.config),
        tokenizer=tokenizer,
        train_tokens=0,
        **TrainState.start(None).to_checkpoint(),
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
