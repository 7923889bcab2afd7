"""Convert between this project's checkpoints and those of others.

    python convert.py --checkpoint checkpoints/model_best.pt --out exported/
    python convert.py --checkpoint checkpoints/model_best.pt --out ckpt.pt --format nanogpt
    python convert.py --model gpt2 --out checkpoints/gpt2.pt       # or ckpt.pt, gpt2_124M.bin

The exported folder (GPT-2, LLaMA or Qwen3) loads with transformers' AutoModelForCausalLM and
AutoTokenizer, in float32 with every bit of the weights, and has a model card.
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch

from data.export_tokenizer import save_tokenizer
from data.open_model import open_model
from data.tokenizer import CHAT_TEMPLATE, load_tokenizer
from finetuning.chat import is_chat
from model.config import SIZED
from model.formats.checkpoint import find_checkpoint
from model.formats.huggingface import save_pretrained
from model.formats.huggingface_weights import EMBEDDING, HEAD, differences, nearest_gpt2
from model.gpt import GPT
from training.parallel.own_rows import copy_state
from training.run import Progress
from training.writer import save_checkpoint
from utils.cli import start_script
from utils.distributed import ALONE
from utils.errors import UserError, writing
from utils.files import atomic_write

CARD = Path(__file__).parent / "scripts" / "model_card.md"  # a template for str.format
# example code of the model card that makes the inputs of the model
TEXT_INPUTS = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
CHAT_INPUTS = """\
messages = [{"role": "user", "content": "What is 2+3?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""


@dataclass
class ConvertOptions:
    """Convert between this project's checkpoints and those of others."""

    out: Path
    """Output path: a folder with --checkpoint; a .pt file with --model or --format nanogpt."""
    checkpoint: Path | None = None
    """Checkpoint to export, or a folder: its best one, else its newest."""
    model: str | None = None
    """Model to import: a Hugging Face name (gpt2) or folder, or a checkpoint of nanoGPT,
    build-nanogpt or llm.c."""
    format: Literal["huggingface", "nanogpt"] = "huggingface"
    """Format of --checkpoint's export: a folder for transformers, or a ckpt.pt for nanoGPT."""


def export_checkpoint(checkpoint_path: Path, out: Path, is_for_nanogpt: bool) -> None:
    """Write a checkpoint as a folder for transformers: weights, tokenizer and model card; or as a
    file for nanoGPT."""
    path = find_checkpoint(checkpoint_path)
    if path is None:
        raise UserError(
            f"--checkpoint {checkpoint_path} is no checkpoint of this project: see --model"
        )
    # float32 takes all bits of the weights; the default takes only their bfloat16 half.
    model, tokenizer_spec, checkpoint = open_model(path, float32=True)
    if is_for_nanogpt:
        nanogpt_checkpoint = to_nanogpt(model)
        with writing(out), atomic_write(out) as file:  # UserError where the disk is full
            torch.save(nanogpt_checkpoint, file)
        return
    tokenizer = load_tokenizer(tokenizer_spec)

    # transformers' `generate` stops at the end ids, which go to generation_config.json.
    # config.json holds one BOS id; only the tokenizer can write several.
    bos = tokenizer.start_ids[0]
    save_pretrained(model, out, tokenizer.eot, tokenizer.end_ids, bos)

    # A model that came with a chat template keeps it; another chat model has learned this
    # project's format, and a model of plain text has none.
    chat_template = tokenizer.chat_template  # Jinja, or None
    if chat_template is None and is_chat(checkpoint, tokenizer_spec):
        chat_template = CHAT_TEMPLATE
    # transformers warns of a text longer than block_size, the context.
    save_tokenizer(tokenizer, out, model.config.block_size, chat_template)

    # options of the run that wrote the checkpoint, by the names of their flags
    options = checkpoint["config"]
    weights_from = Path(options["init_from"] or "random weights")  # a path or a name of the hub
    if weights_from.parent.name == "checkpoints":  # RUN/checkpoints/model_best.pt becomes RUN
        weights_from = weights_from.resolve().parent.parent
    # The template also reads fields of `model_config` and entries of `checkpoint`, as the step.
    card = CARD.read_text(encoding="utf-8").format(
        name=out.name,
        num_parameters=model.num_parameters(),
        model_config=model.config,
        tokenizer=tokenizer.name,
        checkpoint=checkpoint,
        # finetune.py's options have a method, train.py's a recipe, those of an import neither
        method=options.get("method") or options.get("recipe", "not recorded"),
        weights_from=weights_from.name,  # readers of the card do not have the folder
        # train.py names its corpus, which may be a mixture; finetune.py reads one file
        data=checkpoint.get("corpus") or Path(options.get("data", "not recorded")).name,
        # best_loss is infinite before the first validation
        best_loss=f"{checkpoint['best_loss']:.4f}".replace("inf", "none yet"),
        inputs=TEXT_INPUTS if chat_template is None else CHAT_INPUTS,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    print(f"on the hub: hf upload USER/NAME {out}")


def to_nanogpt(model: GPT) -> dict:
    """Return what nanoGPT's sample.py reads from a ckpt.pt, in float32. Raises UserError for an
    architecture that nanoGPT lacks.

    nanoGPT computes the exact GELU, also where `model` computes the tanh approximation.
    """
    model_config = model.config
    # The activation may be any GELU, with or without biases; nanoGPT's head is always tied.
    misfits = differences(model_config, replace(nearest_gpt2(model_config), tied=True))
    if misfits:
        raise UserError(f"nanoGPT has no model that differs from GPT-2 in {', '.join(misfits)}")
    weights = model.state_dict()  # parameter names are nanoGPT's
    # Drop the rows of padding, which nanoGPT would sample.
    weights[EMBEDDING] = weights[EMBEDDING][: model_config.vocab_size]
    weights[HEAD] = weights[EMBEDDING]  # tied: one tensor under both names
    # the fields of nanoGPT's GPTConfig
    model_args = {name: getattr(model_config, name) for name in (*SIZED, "bias")}
    return {"model": weights, "model_args": model_args}


def import_model(model_name: str, out: Path) -> None:
    """Write a model (of another project) as a checkpoint, from which --init_from begins a run."""
    # float32 takes all bits of the weights, also if `model_name` is a checkpoint of this project.
    model, tokenizer_spec, _ = open_model(model_name, float32=True)
    entries = {
        "script": "convert.py",  # so --resume, which continues a run, refuses the file
        "config": {"init_from": model_name},
        "model_config": asdict(model.config),
        "tokenizer": tokenizer_spec,
        # step 0, with a run_id of its own: in its folder no run may write over the file
        **asdict(Progress()),
        "best_loss": math.inf,
    }
    # All rows of the weights, as this process is ALONE; the optimizer state is empty, as there are
    # no optimizers.
    weights, optimizer_state = copy_state(model, [], ALONE)
    save_checkpoint(out, weights, optimizer_state, entries)


def main(options: ConvertOptions) -> None:
    if (options.checkpoint is None) == (options.model is None):  # both or neither
        raise UserError("give one of --checkpoint (to a folder) and --model (to a .pt file)")
    is_import = options.model is not None
    is_for_nanogpt = options.format == "nanogpt"
    if is_import and is_for_nanogpt:
        raise UserError("--format nanogpt writes a --checkpoint: import the --model first")
    if (is_import or is_for_nanogpt) and options.out.suffix != ".pt":
        raise UserError(f"--out {options.out} must end in .pt: it is a file")
    if options.out.exists():
        raise UserError(f"--out {options.out} exists already; choose another path")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.model is not None:
        import_model(options.model, options.out)
    elif options.checkpoint is not None:  # always true: one of the two was given
        export_checkpoint(options.checkpoint, options.out, is_for_nanogpt)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    start_script(main, ConvertOptions)
