"""Weights from and to Hugging Face's format, without importing transformers.

The functions named _from_hf and _to_hf map dicts to dicts; load_pretrained and save_pretrained read
and write folders of transformers. A model that is no GPT-2 is a LLaMA, with QK-norm a Qwen3.
"""

import json
import textwrap
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT, build_without_weights
from utils.errors import UserError, is_of_machine

# fields of GPTConfig, and of transformers' GPT2Config and LlamaConfig
GPT2_FIELDS = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")}
GPT2_FIELDS["block_size"] = "n_positions"
LLAMA_FIELDS = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_kv_head": "num_key_value_heads",
    "n_inner": "intermediate_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
# fields of config.json with the only value that is supported here
GPT2_CONSTANTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
LLAMA_CONSTANTS = dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False)
LLAMA_CONSTANTS["rope_scaling"] = None
# fields of GPTConfig that every LLaMA has
LLAMA = {"position": "rotary", "norm": "rms", "bias": False, "ngrams": 1}
MAX_TOKENS = 65_535  # ids of shards have 16 bits
LLAMA_WEIGHTS = {  # our names, each with those of the weights that it stacks
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.gate_proj mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
TABLES = ("transformer.wte.weight", "lm_head.weight")  # with a row for each token
# OpenAI's code multiplies x @ W, so it stores the matrices of a block as (in, out); ours (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
GPT2_COPIES = (".attn.bias", ".attn.masked_bias", "lm_head.weight")  # causal masks, tied head


def config_from_hf(values: dict) -> GPTConfig:
    """Return the GPTConfig of a config.json; raise UserError naming a value that would give another
    config.json if the model was exported again."""
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        values = {**values, "rope_scaling": rope}
    names, fields = GPT2_FIELDS, {}
    if values["model_type"] in ("llama", "qwen3"):
        given = {name: value for name, value in values.items() if value is not None}
        values = {**LLAMA_DEFAULTS, **rope, **given}
        names, fields = LLAMA_FIELDS, {**LLAMA, "activation": "swiglu"}
        fields["qk_norm"] = values["model_type"] == "qwen3"
    if values["vocab_size"] > MAX_TOKENS:
        raise UserError(f"it has {values['vocab_size']:,} tokens, more than {MAX_TOKENS:,}")
    config = GPTConfig(**fields, **{ours: values.get(theirs) for ours, theirs in names.items()})
    for name, value in config_to_hf(config).items():
        checked = name not in ("architectures", "n_ctx") and "drop" not in name
        if checked and values.get(name) not in (value, None):
            raise UserError(f"config.json has {name} {values[name]!r}; only {value} is supported")
    return config


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' GPT2LMHeadModel, LlamaForCausalLM or
    Qwen3ForCausalLM; raise UserError naming the fields that none of them supports."""
    if config.is_gpt2:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{theirs: getattr(config, ours) for ours, theirs in GPT2_FIELDS.items()},
            "n_ctx": config.block_size,
            "n_inner": config.inner,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
            **GPT2_CONSTANTS,
        }
    # relu2 becomes a gated ReLU whose gate equals its input: relu(x) * x = relu(x)²
    activation = "relu2" if config.activation == "relu2" else "swiglu"
    if misfits := config.differences(replace(config, **LLAMA, activation=activation)):
        fields = ", ".join(f"{name}={value}" for name, value in misfits.items())
        raise UserError(
            f"transformers has no class for this model: it is no GPT-2, and no LLaMA with {fields}"
        )
    name = "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_act": "relu" if activation == "relu2" else "silu",
        **{theirs: getattr(config, ours) for ours, theirs in LLAMA_FIELDS.items()},
        "intermediate_size": config.inner,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "attention_dropout": config.dropout,
        **LLAMA_CONSTANTS,
    }


def names_in_hf(name: str, config: GPTConfig) -> list[str]:
    """Return the names under which transformers has the parts of our weight `name`."""
    if config.is_gpt2:
        return [name]
    name, prefix = name.removesuffix(".weight"), ""
    if ".h." in name:
        _, _, layer, name = name.split(".", 3)
        prefix = f"model.layers.{layer}."
    return [f"{prefix}{part}.weight" for part in LLAMA_WEIGHTS[name].split()]


def weights_from_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our float32 state dict, made from that of transformers' GPT-2, LLaMA or Qwen3."""
    if config.is_gpt2:  # names of a GPT2Model lack the prefix
        state = {
            f"transformer.{name.removeprefix('transformer.')}": x
            for name, x in state.items()
            if not name.endswith(GPT2_COPIES)
        }
    state, ours = dict(state), {}
    for name in build_without_weights(config).state_dict():
        x = torch.cat([state.pop(part).float() for part in names_in_hf(name, config)])
        if config.is_gpt2 and name.endswith(TRANSPOSED):
            x = x.T.contiguous()
        if name in TABLES:
            x = F.pad(x, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
        ours[name] = x
    for name, x in state.items():  # gains of QK-norm, which ours does not have
        is_one = config.qk_norm and name.endswith("_norm.weight") and (x == 1).all()
        assert is_one, f"{name} is not supported"
    return ours


def weights_to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM,
    without padding of the vocabulary."""
    theirs, kv_rows = {}, config.kv_heads * config.head_size
    rows = {2: [config.inner] * 2, 3: [config.n_embd, kv_rows, kv_rows]}  # of parts in a stack
    for name, x in state.items():
        if name in TABLES:
            x = x[: config.vocab_size]
        if config.is_gpt2 and name.endswith(TRANSPOSED):
            x = x.T
        if config.activation == "relu2" and "c_fc" in name:
            x = torch.cat([x, x])
        names = names_in_hf(name, config)
        theirs |= zip(names, x.split(rows.get(len(names), len(x))), strict=True)
    for layer in range(config.n_layer if config.qk_norm else 0):
        for part in "qk":
            gain = torch.ones(config.head_size)
            theirs[f"model.layers.{layer}.self_attn.{part}_norm.weight"] = gain
    return theirs


@cache
def find_folder(name: str) -> Path:
    """Return the folder `name`, or download the hub repository of that name if it is not cached."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import errors, snapshot_download

    try:
        patterns = ["*.json", "*.jinja", "merges.txt", "*.safetensors"]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{name} is no folder, its model is not in the cache, and there is no network to the "
            "Hugging Face hub; go online, or give a folder"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise UserError(
            f"{name} is no folder, and the Hugging Face hub did not provide a model of that name "
            f"({type(error).__name__}); check the name"
        ) from error
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the .safetensors files of a folder."""
    from safetensors.torch import load_file  # not needed for training

    paths = [*folder.glob("model.safetensors"), *folder.glob("model-*.safetensors")]
    assert paths, "it has no model.safetensors"
    return {name: x for path in paths for name, x in load_file(path).items()}


def load_pretrained(name_or_folder: str | Path) -> GPT:
    """Return the model of a Hugging Face name ("gpt2", "user/model") or folder: a GPT-2, LLaMA or
    Qwen3 of a shape that save_pretrained writes; raise UserError naming what does not fit."""
    folder = find_folder(str(name_or_folder))
    try:
        config = config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model = build_without_weights(config)
        model.load_state_dict(weights_from_hf(read_weights(folder), config), assign=True)
    except Exception as error:
        if is_of_machine(error):
            raise
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        reason = textwrap.shorten(f"{kind}{error}", 300)
        raise UserError(
            f"{name_or_folder} is damaged or not a GPT-2, LLaMA or Qwen3: {reason}"
        ) from error
    return model


def save_pretrained(
    model: GPT, folder: str | Path, eot: int | None = None, end_ids: Collection[int] = ()
) -> None:
    """Write config.json, generation_config.json and model.safetensors, which transformers'
    AutoModelForCausalLM loads; `eot` is the id of end of text, the last one if not given, and
    generation ends at it and at `end_ids`. Raises UserError for a model that is neither a GPT-2 nor
    in the shape of a LLaMA or Qwen3."""
    from safetensors.torch import save_file

    folder, config = Path(folder), model.config
    eot = config.vocab_size - 1 if eot is None else eot
    ends = {"bos_token_id": eot, "eos_token_id": eot}
    values = config_to_hf(config) | {"dtype": "float32", **ends}
    weights = {
        name: x.detach().cpu().contiguous()
        for name, x in weights_to_hf(model.state_dict(), config).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    generation = ends | {"pad_token_id": eot, "do_sample": True}
    others = sorted(set(end_ids) - {eot})
    if others:
        generation["eos_token_id"] = [eot, *others]
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # as the others
