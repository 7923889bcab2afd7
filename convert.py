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

from config.options import DERIVED, TrainConfig, resolve_from_recipe
from config.recipes import Recipe
from data.export_tokenizer import save_tokenizer
from data.file_tokenizer import CHAT_TEMPLATE
from data.tokenizer import load_tokenizer
from evaluation.table import format_table
from evaluation.tasks import Result
from finetuning.chat import is_chat
from model.gpt import GPT
from model.huggingface import save_pretrained
from training.checkpoint import assemble, find_checkpoint, open_model
from training.run import TrainState
from training.saver import save_checkpoint
from utils.cli import start_script
from utils.errors import UserError

CARD = Path(__file__).parent / "scripts" / "model_card.md"  # a template
# how its example makes the inputs of a model
TEXT_INPUTS = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
CHAT_INPUTS = """\
messages = [{"role": "user", "content": "What is 2+3?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""


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
    path = find_checkpoint(config.checkpoint)
    if path is None:
        raise UserError(f"--checkpoint {config.checkpoint} is no checkpoint of this project")
    model, spec, saved = open_model(path, exact=True)
    export(model, spec, saved, path, config.out)
    print(f"on the hub: hf upload USER/NAME {config.out}")
    if model.config.activation == "relu2":
        print("note: only transformers runs ReLU²; llama.cpp and vLLM compute another function")


def export(model: GPT, spec: str, saved: dict, checkpoint: Path, out: Path) -> None:
    """Write weights, tokenizer and model card into the folder `out`."""
    tokenizer = load_tokenizer(spec)
    save_pretrained(model, out, tokenizer.eot, tokenizer.end_ids)
    template = tokenizer.chat_template
    if template is None and is_chat(saved, str(checkpoint), spec):
        template = CHAT_TEMPLATE
    save_tokenizer(tokenizer, out, model.config.block_size, template)
    card = model_card(model, tokenizer.name, saved, checkpoint, template is not None)
    (out / "README.md").write_text(card, encoding="utf-8")


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder's repository, None outside of one or without git."""
    command = ["git", "-C", folder, "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def public_name(source: str) -> str:
    """Return a name on the hub or a relative path as it is, of an absolute path the last part, of a
    checkpoint the name of its run: the folders of this machine say nothing to others."""
    path = Path(source)
    if path.suffix == ".pt":
        return path.resolve().parent.parent.name
    return path.name if path.is_absolute() else source


def read_scores(checkpoint: Path, saved: dict) -> list[Result]:
    """Return the results that evaluate.py has written beside a checkpoint, for its very step."""
    results = []
    for path in sorted(checkpoint.parent.glob(f"{checkpoint.stem}_*.json")):
        scores = json.loads(path.read_text() or "{}")  # empty while it is being scored
        if (scores.get("run_id"), scores.get("step")) == (saved["run_id"], saved["step"]):
            results += [Result(**row) for row in scores["results"]]
    return results


def model_card(model: GPT, tokenizer: str, saved: dict, path: Path, is_chat: bool) -> str:
    """Return the README.md of a model: what it is, how it was trained, its scores, how to load it.
    Scores are those that evaluate.py has written beside the checkpoint."""
    shape, options, best = model.config, saved["config"], saved["best_loss"]
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "shape": f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, "
        f"context {shape.block_size}, {shape.vocab_size:,} tokens ({tokenizer})",
        "trained by": f"{saved['script']}, {options.get('method') or options.get('recipe')}",
        "began from": public_name(options.get("init_from") or "random weights"),
        "data": saved.get("corpus") or public_name(options.get("data") or ""),
        "steps": f"{saved['step']:,}, {saved['tokens']:,} tokens",
        "lowest validation loss": f"{best:.4f} nats" if best < math.inf else None,
        "commit of the code": commit_of(CARD.parent),
    }
    scores = ""
    if results := read_scores(path, saved):
        scores = f"## Scores\n\n```\n{format_table(results, shape.size or 'gpt2')}\n```\n\n"
    return CARD.read_text(encoding="utf-8").format(
        name=path.resolve().parent.parent.name,
        table="\n".join(f"| {name} | {value} |" for name, value in rows.items() if value),
        scores=scores,
        inputs=CHAT_INPUTS if is_chat else TEXT_INPUTS,
    )


def import_model(config: ConvertConfig) -> None:
    """Write a Hugging Face model as a checkpoint at step 0, without optimizer state."""
    if config.out.suffix != ".pt":
        raise UserError(f"--out {config.out} must end in .pt with --model")
    model, tokenizer, _ = open_model(config.model, exact=True)
    recipe = Recipe()
    # init_from: a run that resumes the file takes the architecture of its weights
    options = TrainConfig(init_from=config.model, block_size=model.config.block_size)
    options = resolve_from_recipe(options, recipe)
    state = assemble(
        model.state_dict(),
        optimizer={},
        script="train.py",
        config=options.to_dict(),
        derived=DERIVED,
        recipe=asdict(recipe),
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
    start_script(main, ConvertConfig)
