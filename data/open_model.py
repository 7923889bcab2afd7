"""Open a model of any format, together with its tokenizer.

model/formats/ reads files of weights, data/tokenizer.py reads files of tokenizers. This file joins
the two, because model/ does not know tokenizers.
"""

from dataclasses import replace
from pathlib import Path

from data.tokenizer import pretrained_tokenizer_spec, read_tokenizer_spec, vocab_size_of
from model.formats.checkpoint import Checkpoint, find_checkpoint, load_model
from model.formats.huggingface import load_pretrained
from model.formats.huggingface_weights import find_or_download
from model.formats.nanogpt import find_tokenizer_file, load_nanogpt
from model.gpt import GPT
from model.initial_weights import rebuild
from utils.errors import UserError


def open_pretrained(name: str | Path) -> tuple[GPT, str]:
    """Return a model, in float32 on the CPU, and the spec of its tokenizer. `name` is a file of
    nanoGPT, build-nanogpt or llm.c, or a Hugging Face folder or name. Raises UserError for a model
    of another kind, or if its tokenizer does not fit or is unknown."""
    # a local file or folder, or the folder of a download from the hub
    path = find_or_download(str(name))
    tokenizer_path: Path | None = None
    if path.is_file():  # the other projects write one file, Hugging Face a folder
        model = load_nanogpt(path)
        # tokenizer.json or meta.pkl beside the file, or nanoGPT's data/DATASET/meta.pkl, or None
        tokenizer_path = find_tokenizer_file(path)
    else:
        # by `name`, so that messages have it and not the folder of the hub's cache
        model = load_pretrained(name)
    declared_vocab_size = model.config.vocab_size  # 50257 of OpenAI's GPT-2, 50304 of nanoGPT's
    if tokenizer_path is not None:
        tokenizer_spec = read_tokenizer_spec(tokenizer_path)
    else:
        # by the files of the folder; without any, by the size: "gpt2" for 50257 and 50304
        tokenizer_spec = pretrained_tokenizer_spec(path, declared_vocab_size)
    tokenizer_vocab_size = vocab_size_of(tokenizer_spec)
    is_smaller = tokenizer_vocab_size < declared_vocab_size
    # nanoGPT does not pad a vocabulary of characters. Fewer characters mean that its prepare.py has
    # read another text since the training.
    is_meta_pkl = tokenizer_path is not None and tokenizer_path.suffix == ".pkl"
    if tokenizer_vocab_size > declared_vocab_size or (is_smaller and is_meta_pkl):
        raise UserError(
            f"{tokenizer_path or name} has {tokenizer_vocab_size:,} tokens, the model of {name} "
            f"{declared_vocab_size:,}"
        )
    if is_smaller:  # cut off the rows of padding, because sampling could draw their ids
        model = rebuild(model, replace(model.config, vocab_size=tokenizer_vocab_size))
    return model, tokenizer_spec


def open_model(name: str | Path, *, float32: bool = False) -> tuple[GPT, str, Checkpoint]:
    """Return a model in evaluation mode, the spec of its tokenizer, and the content of its
    checkpoint ({} for a model of another project). `name` is a checkpoint of this project, nanoGPT,
    build-nanogpt or llm.c, the folder of a run, or a Hugging Face folder or name. From a checkpoint
    of this project, read only the bfloat16 half of the weights, or with `float32` all bits.
    """
    path = find_checkpoint(name)  # None for a model of another project
    if path is not None:
        model, checkpoint = load_model(path, float32=float32)  # bfloat16 or float32
        return model, checkpoint["tokenizer"], checkpoint

    model, tokenizer_spec = open_pretrained(name)  # float32
    return model.eval(), tokenizer_spec, {}
