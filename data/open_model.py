"""Open a model of any format, together with its tokenizer.

model/formats/ knows what is in a file of weights, data/tokenizer.py what is in one of a tokenizer.
This file stands above both: model/ knows no tokenizers.
"""

from dataclasses import replace
from pathlib import Path

from data.tokenizer import count_tokens, pretrained_tokenizer, read_tokenizer
from model.formats.checkpoint import Checkpoint, find_checkpoint, load_model
from model.formats.huggingface import load_pretrained
from model.formats.huggingface_weights import find_folder
from model.formats.peers import find_tokenizer, load_peer
from model.gpt import GPT
from model.initial_weights import rebuild
from utils.errors import UserError


def open_pretrained(name: str | Path) -> tuple[GPT, str]:
    """Return the model of a file, or of a Hugging Face folder or name, and the spec of its
    tokenizer. Raises UserError for a model of another kind, or whose tokenizer does not fit or is
    not known."""
    # A local path, or the folder of a download from the hub. A file is of nanoGPT, build-nanogpt or
    # llm.c. The model is float32, on the CPU.
    path = find_folder(str(name))
    model = load_peer(path) if path.is_file() else load_pretrained(name)
    num_rows = model.config.vocab_size  # rows of the embedding, padding included
    tokenizer_path = find_tokenizer(path) if path.is_file() else None
    if tokenizer_path is not None:
        tokenizer_spec = read_tokenizer(tokenizer_path)
    else:
        tokenizer_spec = pretrained_tokenizer(path, num_rows)
    num_tokens = count_tokens(tokenizer_spec)
    if num_tokens > num_rows:
        raise UserError(
            f"{name} has a tokenizer of {num_tokens:,} tokens, its model only {num_rows:,}"
        )
    # nanoGPT pads no vocabulary of characters, but its prepare.py may have read another text since.
    if num_tokens < num_rows and tokenizer_path is not None and tokenizer_path.suffix == ".pkl":
        raise UserError(
            f"{tokenizer_path} has {num_tokens:,} characters, the model of {name} {num_rows:,}"
        )
    # Cut off padding, which sampling could draw: some models have 50,304 rows for 50,257 tokens.
    if num_tokens < num_rows:
        model = rebuild(model, replace(model.config, vocab_size=num_tokens))
    return model, tokenizer_spec


def open_model(name: str | Path, *, float32: bool = False) -> tuple[GPT, str, Checkpoint]:
    """Return a model in evaluation mode, its tokenizer's spec, and the content of its checkpoint,
    {} for a model of another project. `name` is a checkpoint of ours, of nanoGPT, build-nanogpt or
    llm.c, a run's folder, or a Hugging Face folder or name. Of our checkpoints only the bfloat16
    half is read, with `float32` all bits.
    """
    path = find_checkpoint(name)
    if path is not None:
        model, checkpoint = load_model(path, float32=float32)
        return model, checkpoint["tokenizer"], checkpoint

    model, tokenizer_spec = open_pretrained(name)  # float32
    return model.eval(), tokenizer_spec, {}
