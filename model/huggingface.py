"""Weights from and to Hugging Face's format, without importing transformers.

The functions named _from_hf and _to_hf map dicts to dicts; load_pretrained and save_pretrained read
and write the folders that transformers' from_pretrained and save_pretrained use.
"""

import contextlib
import json
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model import llama
from model.config import GPTConfig
from model.empty import empty_gpt, with_context
from model.gpt import GPT
from utils.errors import UserError

# OpenAI's code multiplies x @ W, so it stores the matrices of a block as (in, out); ours (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files hold
TABLES = ("transformer.wte.weight", "lm_head.weight")  # with a row for each token
# fields of transformers' GPT2Config with the only value that is supported here
GPT2_CONSTANTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
SIZES = {  # fields of GPT2Config and ours
    "n_positions": "block_size",
    **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
}


def config_from_hf(values: dict) -> GPTConfig:
    """Return the GPTConfig of a config.json; raise UserError naming a value that would give another
    config.json if the model was exported again."""
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        values["rope_scaling"] = rope
    values = {"rms_norm_eps": 1e-6, **rope, **values}  # the default of transformers
    if values["model_type"] in llama.MODEL_TYPES:
        config = llama.config_from_hf(values)
    else:
        config = GPTConfig(**{ours: values[name] for name, ours in SIZES.items()})
    for name, value in config_to_hf(config).items():
        checked = name not in ("architectures", "n_ctx") and "drop" not in name
        if checked and values.get(name) not in (value, None):
            raise UserError(f"config.json has {name} {values[name]!r}; only {value} is supported")
    return config


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' GPT2LMHeadModel, LlamaForCausalLM or
    Qwen3ForCausalLM; raise UserError for a model that is none of these."""
    if not config.is_gpt2:
        return llama.config_to_hf(config)
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, ours) for name, ours in SIZES.items()},
        "n_ctx": config.block_size,
        "n_inner": config.inner,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        **GPT2_CONSTANTS,
    }


def only_transformers_runs(config: GPTConfig) -> bool:
    """Return whether an exported model has a gated ReLU. Other servers know SiLU alone for a Qwen3
    or LLaMA, and compute another function without a word."""
    return config.activation == "relu2"


def weights_from_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our float32 state dict, made from that of transformers' GPT2LMHeadModel, GPT2Model,
    LlamaForCausalLM or Qwen3ForCausalLM."""
    state = {name: x.float() for name, x in state.items() if not name.endswith(MASKS)}
    if config.is_gpt2:
        state.pop("lm_head.weight", None)  # tied
        state = {
            f"transformer.{name.removeprefix('transformer.')}": (
                x.T.contiguous() if name.endswith(TRANSPOSED) else x
            )
            for name, x in state.items()
        }
    else:
        state = llama.weights_from_hf(state, config)
    padding = (0, 0, 0, config.padded_vocab_size - config.vocab_size)
    return {name: F.pad(x, padding) if name in TABLES else x for name, x in state.items()}


def weights_to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM,
    without padding of the vocabulary."""
    state = {name: x[: config.vocab_size] if name in TABLES else x for name, x in state.items()}
    if not config.is_gpt2:
        return llama.weights_to_hf(state, config)
    return {name: x.T if name.endswith(TRANSPOSED) else x for name, x in state.items()}


@cache
def find_folder(name: str) -> Path:
    """Return the folder `name`, or download the hub repository of that name if it is not cached."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin*"])
    except Exception as error:
        raise UserError(
            f"{name} is no folder, and the Hugging Face hub did not provide a model of that name "
            f"({type(error).__name__}); check the name, or go online"
        ) from error
    return folder


@contextlib.contextmanager
def readable(name: str | Path) -> Iterator[None]:
    """Turn any error of reading the model `name` into a UserError that names it."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = textwrap.shorten(f"{kind}{error}", 300)
        raise UserError(f"{name} is damaged or not a GPT-2, LLaMA or Qwen3: {reason}") from error


def read_config(folder: Path) -> GPTConfig:
    """Return the architecture in a folder's config.json; raise UserError if it is unsupported."""
    with readable(folder):
        return config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, from the files that transformers would read: whole or listed
    in an index, .safetensors before .bin."""
    from safetensors.torch import load_file  # not needed for training

    names = ("model.safetensors", "pytorch_model.bin")
    files = [f"{name}{suffix}" for name in names for suffix in ("", ".index.json")]
    found = next((folder / x for x in files if (folder / x).exists()), folder / files[0])
    parts = {found.name}
    if found.suffix == ".json":
        parts = set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values())
    state: dict[str, Tensor] = {}
    for path in (folder / name for name in sorted(parts)):
        if path.suffix == ".safetensors":
            state |= load_file(path)
        else:
            state |= torch.load(path, map_location="cpu", weights_only=True)
    return state


def load_pretrained(
    name_or_folder: str | Path, block_size: int | None = None, dropout: float = 0.0
) -> GPT:
    """Return the model of a Hugging Face name ("gpt2", "gpt2-xl", "user/model") or folder: a GPT-2,
    or a LLaMA or Qwen3 of the shapes that save_pretrained writes.

    A smaller `block_size` keeps the first positions. Raises UserError naming what does not fit.
    """
    folder = find_folder(str(name_or_folder))
    config = read_config(folder)
    if block_size is not None and block_size > config.block_size:
        most = config.block_size
        raise UserError(f"{name_or_folder} has {most} positions, fewer than {block_size}")
    with readable(name_or_folder):
        model = empty_gpt(config)
        model.load_state_dict(weights_from_hf(read_weights(folder), config), assign=True)
    config = replace(config, block_size=block_size or config.block_size, dropout=dropout)
    return with_context(model, config)


def save_pretrained(model: GPT, folder: str | Path) -> None:
    """Write config.json and model.safetensors, which transformers' AutoModelForCausalLM loads;
    raise UserError for a model that is neither a GPT-2 nor in the shape of a LLaMA or Qwen3."""
    from safetensors.torch import save_file

    folder, config, eot = Path(folder), model.config, model.config.vocab_size - 1
    values = config_to_hf(config)
    values |= {"dtype": "float32", "bos_token_id": eot, "eos_token_id": eot}
    weights = {
        name: x.detach().cpu().contiguous()
        for name, x in weights_to_hf(model.state_dict(), config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
