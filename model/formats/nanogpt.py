"""Weights from the checkpoints of nanoGPT, build-nanogpt and llm.c.

    nanoGPT         torch.save of "model", "model_args", ...; biases or none; the exact GELU
    build-nanogpt   torch.save of "model", "config", ...; the config is a pickled GPTConfig
    llm.c           256 int32: magic number, version, block size, vocabulary size, layers, heads,
                    channels, rows of the embedding; then the weights (write_model of its
                    train_gpt2.py)

The head is the embedding unless the file has its own. Optimizer state is not read. The files have
no tokenizer: find_tokenizer_file finds it near them, or data/tokenizer.py chooses one by the number
of tokens.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor
from torch.serialization import safe_globals

from model.config import GPTConfig
from model.formats.huggingface_weights import EMBEDDING, model_from_hf
from model.gpt import GPT
from model.initial_weights import build_without_weights
from utils.errors import reading

META = "meta.pkl"  # nanoGPT's file of the characters of a data set, with their ids
LLM_C_MAGIC = 20240326
# Dtype of the weights by version of the file. Older versions have no padded rows.
LLM_C_DTYPES = {3: torch.float32, 5: torch.bfloat16}


def load_nanogpt(path: Path) -> GPT:
    """Return the float32 model of a file. For nanoGPT and build-nanogpt its vocabulary includes
    padded rows, if the file has any. Raises UserError for a damaged or foreign file."""
    # turns any error in the content of the file into a UserError that names the path
    with reading(path, "a checkpoint of this project, nanoGPT, build-nanogpt or llm.c"):
        # uint8 (n,), mapped from disk. Mode "c" is copy on write; torch warns of read-only memory.
        file_bytes = torch.from_numpy(np.memmap(path, mode="c"))
        if file_bytes[:4].view(torch.int32) == LLM_C_MAGIC:
            config, weights = read_llm_c(file_bytes)  # GPTConfig, tensors by name
        else:
            # {"model": {"transformer.wte.weight": (50304, 768), ...}, "model_args": {...}, ...}
            checkpoint = read_torch(path)
            # nanoGPT saves a compiled model with this prefix
            weights = {
                name.removeprefix("_orig_mod."): x for name, x in checkpoint["model"].items()
            }
            # nanoGPT: a dict with GPTConfig's names, {"n_layer": 12, "bias": False, ...}. Its
            # GELU is the exact one.
            if "model_args" in checkpoint:
                config = GPTConfig(**checkpoint["model_args"], activation="gelu_exact")
            else:  # build-nanogpt: attributes with the same names; its GELU is the default, tanh
                config = GPTConfig(**vars(checkpoint["config"]))
        # The names are the same as in transformers' GPT-2, but no matrix is transposed: all are
        # (out, in), as in nn.Linear.
        return model_from_hf(GPT, weights, config, transposed_suffixes=())


def read_torch(path: Path) -> dict[str, Any]:
    """Return the checkpoint in a file of nanoGPT or build-nanogpt, a dict with the file's keys."""
    # With weights_only no code in the file runs. build-nanogpt's script pickles its config as
    # __main__.GPTConfig, which torch.load would refuse, so an empty class replaces it.
    with safe_globals([(SimpleNamespace, "__main__.GPTConfig")]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def find_tokenizer_file(path: Path) -> Path | None:
    """Return the path of the tokenizer of a file that `load_nanogpt` reads, or None if it has none.

    It is a tokenizer.json or nanoGPT's meta.pkl beside the file, or the meta.pkl in data/DATASET of
    any folder above the file, as in nanoGPT's checkout.
    """
    candidates = [path.parent / "tokenizer.json", path.parent / META]
    # "config" has nanoGPT's options; a file of llm.c is not a zip file
    options = read_torch(path).get("config") if is_zipfile(path) else None
    # nanoGPT, except for its older files; forks and scripts may have other options
    if isinstance(options, dict) and isinstance(options.get("dataset"), str):
        folders_above = path.absolute().parents  # /nanoGPT of /nanoGPT/out/ckpt.pt has data/
        candidates += [folder / "data" / options["dataset"] / META for folder in folders_above]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    return None


def read_llm_c(file_bytes: Tensor) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Return the architecture and the weights by name from the bytes of a file of llm.c, uint8
    (n,)."""
    # [20240326, 3, 1024, 50257, 12, 12, 768, 50304] for 124M
    header = file_bytes[:32].view(torch.int32).tolist()
    _, version, block_size, vocab_size, n_layer, n_head, n_embd, padded_vocab_size = header
    assert version in LLM_C_DTYPES, f"version {version} of llm.c"
    # all weights, after a header of 256 int32; the loop below takes them one by one
    remaining = file_bytes[1024:].view(LLM_C_DTYPES[version])  # (n,), float32 or bfloat16
    # with the padded rows of the embedding, which are cut off at the end
    config = GPTConfig(block_size, padded_vocab_size, n_layer, n_head, n_embd)

    # The order of the weights: embeddings, each weight of a block ("ln_1.weight", ...) for all
    # layers, final norm. The weights of a block have the same order as in this project.
    model = build_without_weights(GPT, config)  # for names and shapes
    names = [EMBEDDING, "transformer.wpe.weight"]  # EMBEDDING: "transformer.wte.weight"
    for name_in_block in model.get_submodule("transformer.h.0").state_dict():
        names += [f"transformer.h.{layer}.{name_in_block}" for layer in range(n_layer)]
    names += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    weights: dict[str, Tensor] = {}  # views of `remaining`
    for name in names:
        parameter = model.get_parameter(name)  # on "meta": a shape without content
        weights[name] = remaining[: parameter.numel()].view_as(parameter)
        remaining = remaining[parameter.numel() :]
    # llm.c's train_gpt2.py writes nothing else; `reading` in load_nanogpt makes a UserError of this
    assert len(remaining) == 0, f"{len(remaining):,} values more than the sizes of its header give"
    weights[EMBEDDING] = weights[EMBEDDING][:vocab_size]  # (50304, 768) -> (50257, 768) for 124M
    return replace(config, vocab_size=vocab_size), weights
