"""Convert checkpoints of this project to and from the formats of other projects.

    python convert.py --checkpoint checkpoints/model_best.pt --out exported/
    python convert.py --checkpoint checkpoints/model_best.pt --out ckpt.pt --format nanogpt
    python convert.py --model gpt2 --out checkpoints/gpt2.pt       # or ckpt.pt, gpt2_124M.bin

The exported folder (GPT-2, LLaMA or Qwen3) loads with transformers' AutoModelForCausalLM and
AutoTokenizer. It holds the weights in float32, with every bit, and a model card.
"""

import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch

from data.export_tokenizer import save_tokenizer
from data.open_model import open_model
from data.tokenizer import CHAT_TEMPLATE, load_tokenizer
from finetuning.chat import is_chat
from model.config import NOT_IN_RECIPES
from model.formats.checkpoint import Checkpoint, find_checkpoint
from model.formats.huggingface import refuse_another_architecture, save_pretrained
from model.formats.huggingface_weights import (
    EMBEDDING,
    HEAD,
    differing_fields,
    nearest_gpt2,
    refuse_other_weights,
)
from model.gpt import GPT
from training.parallel.own_rows import copy_state
from training.run import Progress
from training.writer import save_checkpoint
from utils.cli import start_script
from utils.distributed import ALONE
from utils.errors import UserError, writing
from utils.files import atomic_write

CARD = Path(__file__).parent / "scripts" / "model_card.md"  # a template for str.format
# lines of the model card's example that make the inputs of the model
TEXT_INPUTS = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
CHAT_INPUTS = """\
messages = [{"role": "user", "content": "What is 2+3?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""


@dataclass
class ConvertOptions:
    """Export a checkpoint of this project by --checkpoint, or import another model by --model."""

    out: Path
    """Path to write: a folder for --checkpoint, a .pt file for --model and --format nanogpt."""
    checkpoint: Path | None = None
    """Checkpoint to export, or a folder: takes its best checkpoint, else its newest."""
    model: str | None = None
    """Model to import: a Hugging Face name (gpt2) or folder, or a checkpoint of nanoGPT,
    build-nanogpt or llm.c."""
    format: Literal["huggingface", "nanogpt"] = "huggingface"
    """Format of the export. huggingface: a folder for transformers; nanogpt: a ckpt.pt, of --model,
    too."""
    overwrite: bool = False
    """Replace the files of an earlier export or import at --out."""


def origin_of_weights(checkpoint: Checkpoint) -> str:
    """Return the name of what the run of a checkpoint began with, for the model card: a run, a
    file, a model of the hub, or "random weights". Readers of the card do not have the folders of a
    path."""
    weights_from = Path(checkpoint["config"]["init_from"] or "random weights")
    # RUN/checkpoints, or a file in it, becomes RUN. A relative path begins in working_dir, which
    # not all checkpoints have. abspath, because the parent of a bare "checkpoints" has no name.
    if "checkpoints" in (weights_from.name, weights_from.parent.name):
        weights_from = Path(os.path.abspath(Path(checkpoint.get("working_dir", "")) / weights_from))
        if weights_from.name != "checkpoints":  # a file in the folder
            weights_from = weights_from.parent
        weights_from = weights_from.parent
    return weights_from.name


def export_checkpoint(checkpoint_path: Path, out: Path) -> None:
    """Write a checkpoint of this project as a folder for transformers, with weights, tokenizer and
    model card."""
    path = find_checkpoint(checkpoint_path)
    if path is None:
        raise UserError(
            f"--checkpoint {checkpoint_path} is no checkpoint of this project; --model imports one"
        )
    # float32=True reads all bits of the weights; the default reads only their bfloat16 half.
    model, tokenizer_spec, checkpoint = open_model(path, float32=True)  # spec: "gpt2", or JSON
    tokenizer = load_tokenizer(tokenizer_spec)

    # end_ids go to generation_config.json: transformers' `generate` stops at them. config.json
    # holds a single BOS id, although a tokenizer can write several. save_pretrained raises
    # UserError, before it writes, if the logits of transformers differ.
    bos = tokenizer.start_ids[0]
    save_pretrained(model, out, tokenizer.eot, tokenizer.end_ids, bos)

    # A model that came with a chat template keeps it. Any other chat model has learned this
    # project's format. A model of plain text gets no template.
    chat_template = tokenizer.chat_template  # Jinja, a dict of several by name, or None
    if chat_template is None and is_chat(checkpoint, tokenizer_spec):
        chat_template = CHAT_TEMPLATE
    # Writes tokenizer.json and tokenizer_config.json into `out`. block_size lets transformers warn
    # of a text longer than the context.
    save_tokenizer(tokenizer, out, model.config.block_size, chat_template)

    # options of the run that wrote the checkpoint, by flag: {"init_from": "gpt2", "method": "sft"}
    options = checkpoint["config"]
    # CARD is the template of README.md. It also reads fields of `model_config`, and entries of
    # `checkpoint` such as "step".
    card = CARD.read_text(encoding="utf-8").format(
        name=out.name,
        num_parameters=model.num_parameters(),
        model_config=model.config,
        tokenizer=tokenizer.name,
        checkpoint=checkpoint,
        # finetune.py records a method, train.py a recipe, and `convert.py --model` neither
        method=options.get("method") or options.get("recipe", "not recorded"),
        weights_from=origin_of_weights(checkpoint),
        # train.py records the name of its corpus or mixture, finetune.py the path of one file
        data=checkpoint.get("corpus") or Path(options.get("data", "not recorded")).name,
        # best_loss is infinite without a validation, as always after grpo
        best_loss=f"{checkpoint['best_loss']:.4f}".replace("inf", "none yet"),
        inputs=TEXT_INPUTS if chat_template is None else CHAT_INPUTS,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    print(f"on the hub: hf upload USER/NAME {out}")


def to_nanogpt(model: GPT) -> dict:
    """Return the content of a ckpt.pt for nanoGPT's sample.py: float32 weights and the fields of
    its config. Raise UserError for an architecture or weights that nanoGPT lacks.

    nanoGPT computes the exact GELU, even if `model` computes the tanh approximation.
    """
    model_config = model.config
    # {"norm": "rms", ...}: fields with a value that nanoGPT lacks, sizes apart. nanoGPT allows
    # either GELU here, biases or none, and only a tied head.
    differing = differing_fields(model_config, replace(nearest_gpt2(model_config), tied=True))
    if differing:
        raise UserError(f"nanoGPT has no model that differs from GPT-2 in {', '.join(differing)}")
    weights = model.state_dict()  # its parameter names are the same as nanoGPT's
    refuse_other_weights(weights, model_config)
    # UserError if the logits differ from those of transformers' GPT-2, which computes the same as
    # nanoGPT's but takes the GELU of `model`
    refuse_another_architecture(model)
    # Drop the padding of the vocabulary: nanoGPT would sample these ids.
    weights[EMBEDDING] = weights[EMBEDDING][: model_config.vocab_size]  # (50257, C) of GPT-2
    weights[HEAD] = weights[EMBEDDING]  # tied: one tensor under both names
    # the fields of nanoGPT's GPTConfig: NOT_IN_RECIPES (block_size, n_layer, n_embd, ...) and bias
    model_args = {name: getattr(model_config, name) for name in (*NOT_IN_RECIPES, "bias")}
    return {"model": weights, "model_args": model_args}


def import_model(model_name: str, out: Path) -> None:
    """Write a model, usually of another project, as a checkpoint of this project, so that
    --init_from can start runs from it."""
    # float32=True reads all bits of the weights, even if `model_name` is a checkpoint of ours.
    model, tokenizer_spec, _ = open_model(model_name, float32=True)
    entries = {
        "script": "convert.py",  # --resume refuses the file: it continues runs only
        "config": {"init_from": model_name},
        "model_config": asdict(model.config),
        "tokenizer": tokenizer_spec,
        # Step 0 and a new run_id: without --overwrite no run replaces even a model_last.pt.
        **asdict(Progress()),
        "best_loss": math.inf,  # no validation yet
    }
    # ALONE is a single process, so `weights` has copies of all rows: by parameter name an OwnRows,
    # the rows of a tensor and their indices.
    weights, optimizer_state = copy_state(model, {}, ALONE)  # {}: no optimizer state
    save_checkpoint(out, weights, optimizer_state, entries)


def main(options: ConvertOptions) -> None:
    model_name = options.model or options.checkpoint
    if model_name is None or (options.model and options.checkpoint):
        raise UserError("give either --checkpoint (to export it) or --model (to import it)")
    is_for_nanogpt = options.format == "nanogpt"
    if (options.model or is_for_nanogpt) and options.out.suffix != ".pt":
        raise UserError(f"--out {options.out} must end in .pt: the output is a file")
    if options.out.exists() and not options.overwrite:
        raise UserError(f"--out {options.out} exists already: choose another path, or --overwrite")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if is_for_nanogpt:
        # float32=True reads all bits of the weights. nanoGPT's file has no place for a tokenizer.
        model, _, _ = open_model(model_name, float32=True)
        nanogpt_checkpoint = to_nanogpt(model)  # {"model": {...}, "model_args": {...}}
        with writing(options.out), atomic_write(options.out) as file:  # the disk may be full
            torch.save(nanogpt_checkpoint, file)
    elif options.model is not None:
        import_model(options.model, options.out)
    else:
        export_checkpoint(Path(model_name), options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    start_script(main, ConvertOptions)
