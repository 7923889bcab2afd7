"""Names and shapes of weights in Hugging Face's format, without importing transformers.

The functions named _from_hf and _to_hf convert a config.json and the tensors of a file. read_model
reads a folder of transformers, and model_from_hf accounts for each of its tensors. A model that is
not a GPT-2 is a LLaMA, or with QK-norm a Qwen3. Callers pass in the class, because
GPT.from_pretrained also makes subclasses of GPT.
A name with `hf` belongs to transformers, and every other name to this project.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import NOT_IN_RECIPES, GPTConfig
from model.initial_weights import Model, build_without_weights
from utils.errors import UserError, reading
from utils.files import PROJECT, describe_searched_place
from utils.network import HUB, ask

# Names of the fields of a config.json, by the names of the same fields in GPTConfig.
GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
    "block_size": "n_positions",
    "tied": "tie_word_embeddings",
}
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
# Defaults of transformers' GPT2Config and LlamaConfig for fields that a config.json may leave out.
GPT2_DEFAULTS = {"tie_word_embeddings": True}
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
# Values of `activation_function` in the config.json of a GPT-2, by GPTConfig.activation.
GPT2_ACTIVATIONS = {"gelu": "gelu_new", "gelu_exact": "gelu"}
# Fields of config.json with the other names that transformers has for the functions gelu_new, gelu
# and silu, which exports write.
ACTIVATION_ALIASES = {
    "activation_function": {
        "gelu_pytorch_tanh": "gelu_new",
        "gelu_python_tanh": "gelu_new",
        "gelu_accurate": "gelu_new",
        "gelu_fast": "gelu_new",
        "gelu_python": "gelu",
    },
    "hidden_act": {"swish": "silu"},
}
# Fields of config.json with the only value that this project supports. Exports write this value,
# and config_from_hf refuses a file with another one.
GPT2_CONSTANTS = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
LLAMA_CONSTANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "rope_scaling": None,
}

# LLaMA's names of weights, by the names of this project. Both leave out ".weight" and the prefix of
# a block, "model.layers.N." or "transformer.h.N.". This project fuses the weights of a list.
LLAMA_WEIGHTS = {
    "transformer.wte": ["model.embed_tokens"],
    "transformer.ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
    "ln_1": ["input_layernorm"],
    "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.o_proj"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
EMBEDDING = "transformer.wte.weight"
LLAMA_EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # the same name in all formats; files may leave out a tied head
TABLES = (EMBEDDING, HEAD)  # weights with a row for each token
# OpenAI's code computes x @ W, so these matrices are (in, out) there; in nn.Linear, (out, in).
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def differing_fields(config: GPTConfig, other: GPTConfig) -> dict:
    """Return the fields of `config` that differ from `other`, with their values in `config`, such
    as {"norm": "rms", "qk_norm": True}. Sizes and dropout are not compared."""
    differing = {}
    for name, field in vars(config).items():
        if name not in NOT_IN_RECIPES and field != getattr(other, name):
            differing[name] = field
    return differing


def nearest_gpt2(config: GPTConfig) -> GPTConfig:
    """Return the architecture of transformers' GPT-2 that is closest to `config`, apart from sizes:
    with its GELU, biases and head. An export as a GPT-2 allows no other difference."""
    activation = config.activation
    if activation not in GPT2_ACTIVATIONS:  # "gelu" and "gelu_exact"
        activation = "gelu"
    return GPTConfig(activation=activation, bias=config.bias, tied=config.tied)


def as_llama(config: GPTConfig) -> GPTConfig:
    """Return `config` with the fields that are the same in every LLaMA. An export as a LLaMA does
    not allow a `config` in which one of these fields differs."""
    return replace(config, position="rotary", norm="rms", bias=False, activation="swiglu")


def has_gpt2_names(config: GPTConfig) -> bool:
    """Return True if the weights have GPT-2's names in transformers, False for LLaMA's names."""
    return config.position == "learned"


def fill_defaults(hf_config: dict) -> dict:
    """Return the fields of a config.json with transformers' defaults for those that are missing or
    null, and with the names of activations that exports write. Raise ValueError for another
    model_type than gpt2, llama and qwen3."""
    # transformers 5 writes the fields of RoPE as one dict, transformers 4 beside the other fields
    rope = hf_config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        # config_from_hf refuses it, because LLAMA_CONSTANTS allows only None
        hf_config = hf_config | {"rope_scaling": rope}
    model_type = hf_config["model_type"]
    if model_type not in ("gpt2", "llama", "qwen3"):
        raise ValueError(f"model_type {model_type!r}; only gpt2, llama and qwen3 are supported")
    filled: dict = dict(GPT2_DEFAULTS)
    if model_type != "gpt2":
        filled = LLAMA_DEFAULTS | rope  # with the "rope_theta" of transformers 5
    for hf_name, value in hf_config.items():
        if value is not None:
            filled[hf_name] = value
    for hf_name, aliases in ACTIVATION_ALIASES.items():  # "hidden_act": {"swish": "silu"}
        if filled.get(hf_name) in aliases:
            filled[hf_name] = aliases[filled[hf_name]]  # "swish" -> "silu"
    return filled


def config_from_hf(hf_config: dict) -> GPTConfig:
    """Return the GPTConfig of a config.json, such as {"model_type": "gpt2", "n_embd": 768, ...}.
    Raise ValueError, which names the field, if GPTConfig refuses its value or an export would give
    another one. A missing size raises AssertionError, and a missing model_type KeyError: `reading`
    in read_model makes a UserError of each."""
    hf_config = fill_defaults(hf_config)
    is_llama = hf_config["model_type"] != "gpt2"
    hf_names = LLAMA_FIELDS if is_llama else GPT2_FIELDS  # {"n_embd": "hidden_size", ...}
    # {"n_embd": 768, ...}, the fields of GPTConfig. A missing num_key_value_heads gives None, which
    # is also the default of n_kv_head.
    fields: dict = {name: hf_config.get(hf_name) for name, hf_name in hf_names.items()}
    for name in NOT_IN_RECIPES:  # block_size, vocab_size, n_layer, n_head, n_embd, dropout
        if name != "dropout":  # which is for training
            assert fields[name] is not None, f"config.json has no {hf_names[name]}"
    try:
        config = GPTConfig(**fields)
    except UserError as error:  # says "n_head", where a LLaMA's file has "num_attention_heads"
        any_name = rf"\b({'|'.join(hf_names)})\b"
        message = re.sub(any_name, lambda match: hf_names[match[0]], str(error))
        raise ValueError(f"config.json: {message}") from error
    if is_llama:
        # as_llama sets what all LLaMAs have in common, because config.json does not state it
        config = replace(as_llama(config), qk_norm=hf_config["model_type"] == "qwen3")
    elif hf_config.get("activation_function") == GPT2_ACTIVATIONS["gelu_exact"]:
        config = replace(config, activation="gelu_exact")

    # Export the architecture again: if a field differs, this project would ignore its value.
    for hf_name, value in config_to_hf(config).items():
        # the class and the context do not change logits, and dropout is for training
        is_checked = hf_name not in ("architectures", "n_ctx") and "drop" not in hf_name
        if is_checked and hf_config.get(hf_name) not in (value, None):
            if hf_name == "activation_function":
                value = " or ".join(GPT2_ACTIVATIONS.values())
            raise ValueError(  # read_model adds the path
                f"config.json has {hf_name} {hf_config[hf_name]!r}; only {value} is supported"
            )
    return config


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' GPT2LMHeadModel, LlamaForCausalLM or
    Qwen3ForCausalLM. Raise UserError, which names the fields, if no export allows `config`."""
    # {"norm": "rms", ...}; empty if the architecture is a GPT-2
    differing_from_gpt2 = differing_fields(config, nearest_gpt2(config))
    if not differing_from_gpt2:
        hf_config = {hf_name: getattr(config, name) for name, hf_name in GPT2_FIELDS.items()}
        return hf_config | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_ctx": config.block_size,
            "n_inner": config.inner,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "activation_function": GPT2_ACTIVATIONS[config.activation],
            **GPT2_CONSTANTS,
        }
    # empty if the architecture is a LLaMA
    differing_from_llama = differing_fields(config, as_llama(config))
    if differing_from_llama:
        # report the class that the model is closer to
        differing = min(differing_from_gpt2, differing_from_llama, key=len)
        assignments = ", ".join(f"{name}={value}" for name, value in differing.items())
        raise UserError(
            f"there is no class to export a model with {assignments}: export one of "
            "train.py --recipe gpt2, modern or llama"
        )
    # transformers calls a LLaMA with QK-norm Qwen3.
    class_name = "Qwen3" if config.qk_norm else "Llama"
    hf_config = {hf_name: getattr(config, name) for name, hf_name in LLAMA_FIELDS.items()}
    return hf_config | {
        "architectures": [f"{class_name}ForCausalLM"],
        "model_type": class_name.lower(),
        # resolved numbers, because n_inner and n_kv_head may be None
        "intermediate_size": config.inner,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "attention_dropout": config.dropout,
        **LLAMA_CONSTANTS,
    }


def model_from_hf(
    model_class: type[Model],
    hf_weights: dict[str, Tensor],
    config: GPTConfig,
    transposed_suffixes: tuple[str, ...] = TRANSPOSED,
) -> Model:
    """Return the float32 model with transformers' weights of a GPT-2, LLaMA or Qwen3, by name, such
    as "transformer.h.0.attn.c_attn.weight". The matrices of a GPT-2 whose names end in one of the
    `transposed_suffixes` are stored as (in, out): (768, 2304) for this one of 124M.

    Each tensor fills a parameter or a part of one, or is redundant: a tied head, a gain of 1, or no
    weight. An error names any other tensor, and any parameter without a tensor. If the head differs
    from the embedding, the model is untied, even if config.json says tied, as in transformers 5.
    """
    # a copy: each tensor that is used is popped from it, and the others are checked at the end
    hf_weights = dict(hf_weights)
    if config.tied and HEAD in hf_weights:
        embedding_name = EMBEDDING if has_gpt2_names(config) else LLAMA_EMBEDDING
        # safetensors.torch.save_model writes a tied tensor once, under the name of the head
        embedding = hf_weights.setdefault(embedding_name, hf_weights[HEAD])
        if torch.equal(hf_weights[HEAD].float(), embedding.float()):
            del hf_weights[HEAD]
        else:
            config = replace(config, tied=False)

    # weight_to_hf, the export, tells which tensors make up each parameter. A failed assert becomes
    # a UserError, because read_model and load_nanogpt call this function within `reading`.
    model = build_without_weights(model_class, config)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        to_fuse: list[Tensor] = []  # such as queries, keys and values of a LLaMA
        # `parameter` and `expected` are on the device "meta": they have shapes but no content
        for hf_name, expected in weight_to_hf(name, parameter, config, transposed_suffixes).items():
            assert hf_name in hf_weights, f"it has no {hf_name}"
            x = hf_weights.pop(hf_name)
            # Integers are refused: they are quantized weights, whose scales would not be read.
            is_expected = x.shape == expected.shape and x.is_floating_point()
            shapes = f"{list(x.shape)}, not {list(expected.shape)}"
            assert is_expected, f"{hf_name} is {x.dtype} {shapes}"
            to_fuse.append(x.float())
        x = torch.cat(to_fuse)  # one below the other
        # ("mlp.c_fc.weight", ...) of transformers, () of other projects
        if has_gpt2_names(config) and name.endswith(transposed_suffixes):
            x = x.T.contiguous()  # (in, out) -> (out, in)
        if name in TABLES:  # append the padded rows: (V, C) -> (padded V, C)
            x = F.pad(x, (0, 0, 0, config.padded_vocab_size - config.vocab_size))
        weights[name] = x
    # tensors that filled no parameter
    for hf_name, x in hf_weights.items():
        assert is_redundant(hf_name, x, config), f"it has {hf_name}, which this model lacks"
    model.load_state_dict(weights, assign=True)  # replaces the parameters on "meta"
    return model


def is_redundant(hf_name: str, x: Tensor, config: GPTConfig) -> bool:
    """Return whether a model computes the same without the tensor `x` of its file."""
    if config.qk_norm and hf_name.endswith("_norm.weight"):
        # Qwen3's QK-norm has gains, but this project's QK-norm has none: all have to be 1.
        return torch.equal(x.float(), torch.ones(config.head_size))
    # Buffers that nanoGPT and older versions of transformers saved, and newer versions ignore:
    # causal mask, value of masked logits, RoPE's radians per token.
    return hf_name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def weight_to_hf(
    name: str, x: Tensor, config: GPTConfig, transposed_suffixes: tuple[str, ...] = TRANSPOSED
) -> dict[str, Tensor]:
    """Return the transformers weights, by name, that are fused in this project's weight `x` with
    the name `name`: for a LLaMA's "transformer.h.3.mlp.c_fc.weight" its two halves of rows,
    "model.layers.3.mlp.gate_proj.weight" and "model.layers.3.mlp.up_proj.weight". The matrices of a
    GPT-2 whose names end in one of the `transposed_suffixes` are returned as (in, out). `x` may be
    on the device "meta", if only shapes are needed."""
    if name in TABLES:
        x = x[: config.vocab_size]  # without padding
    if has_gpt2_names(config):
        return {name: x.T if name.endswith(transposed_suffixes) else x}  # (out, in) -> (in, out)

    # LLaMA has no biases, so all names end in ".weight".
    module_name = name.removesuffix(".weight")
    hf_prefix = ""
    if module_name.startswith("transformer.h."):
        _, _, layer, module_name = module_name.split(".", 3)  # "3", "mlp.c_fc"
        hf_prefix = f"model.layers.{layer}."
    fused_rows = [len(x)]  # number of rows of each fused weight
    if module_name == "attn.c_attn":
        kv_rows = config.num_kv_heads * config.head_size
        fused_rows = [config.n_embd, kv_rows, kv_rows]  # queries, keys, values
    elif module_name == "mlp.c_fc":
        fused_rows = [config.inner, config.inner]  # gate, input
    # An edited model may have others: they keep the name of their module, which
    # refuse_other_weights refuses in an export, and which no file has.
    hf_modules = LLAMA_WEIGHTS.get(module_name, [module_name])  # ["mlp.gate_proj", "mlp.up_proj"]
    hf_weights: dict[str, Tensor] = {}
    for hf_module, hf_x in zip(hf_modules, x.split(fused_rows), strict=True):
        # "model.layers.3.mlp.gate_proj.weight"
        hf_weights[f"{hf_prefix}{hf_module}.weight"] = hf_x
    return hf_weights


def refuse_other_weights(weights: Iterable[str], config: GPTConfig) -> None:
    """Raise UserError if a model has weights that no GPT-2 or LLaMA has, and name them."""
    known_modules = {"transformer.wpe", *LLAMA_WEIGHTS}  # "lm_head", "mlp.c_fc", ...
    parameters = ["weight"]
    if has_gpt2_names(config):
        parameters.append("bias")
    others: list[str] = []
    for name in weights:
        module_name, _, parameter = name.rpartition(".")  # "transformer.h.3.mlp.c_fc", "weight"
        if module_name.startswith("transformer.h."):
            module_name = module_name.split(".", 3)[-1]  # "mlp.c_fc"
        if module_name not in known_modules or parameter not in parameters:
            others.append(name)
    if others:
        raise UserError(f"no other program has a place for the weights {', '.join(others)}")


def weights_to_hf(weights: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' GPT2LMHeadModel, LlamaForCausalLM or Qwen3ForCausalLM,
    without the padded vocabulary. Raise UserError for weights that none of them has."""
    refuse_other_weights(weights, config)
    hf_weights: dict[str, Tensor] = {}
    for name, x in weights.items():
        hf_weights |= weight_to_hf(name, x, config)  # several for a fused weight of a LLaMA
        # GPT2LMHeadModel has biases in all layers but the head: zeros for a model without biases
        is_norm_or_linear = name.startswith(("transformer.h.", "transformer.ln_f."))
        if has_gpt2_names(config) and not config.bias and is_norm_or_linear:
            hf_weights[name.removesuffix("weight") + "bias"] = torch.zeros(len(x))  # (out,)
    if config.qk_norm:  # Qwen3's QK-norm has gains, this project's QK-norm has none
        for layer in range(config.n_layer):
            for norm in ("q_norm", "k_norm"):
                gain = torch.ones(config.head_size)
                hf_weights[f"model.layers.{layer}.self_attn.{norm}.weight"] = gain
    return hf_weights


# cached, because open_pretrained and read_model both ask for the same name
@cache
def find_or_download(model_name: str) -> Path:
    """Return the folder or file `model_name`. If there is none, return the folder of the Hugging
    Face hub's repository `model_name`, after a download if the hub's cache does not have it."""
    path = Path(model_name)
    if path.exists():
        return path
    place = describe_searched_place(path)  # " in /tmp, but there is /clone/runs/demo"
    parent = path.parent  # "runs" of runs/demo; Path() of gpt2
    # a folder here, or of the project when a script is started elsewhere, and no OWNER of the hub
    if parent != Path() and (parent.is_dir() or (PROJECT / parent).is_dir()):
        raise UserError(f"there is no {model_name}{place}")
    # imported here, because only repositories of the hub need it
    from huggingface_hub import snapshot_download

    # skip weights in other formats, which many repositories also hold
    patterns = ["*.json", "*.jinja", "*.txt", "tokenizer.model", "*.safetensors"]
    try:
        # First a small file, to notice a silent hub: `ask` raises TimeoutError. Weights may take
        # any time.
        ask(HUB, partial(snapshot_download, model_name, allow_patterns="config.json"))
        download = partial(snapshot_download, model_name, allow_patterns=patterns)
        return Path(ask(HUB, download, limit=None))  # the folder in the hub's cache
    # no such name, or no network; a TimeoutError is an OSError
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model_name} is no folder or file{place}, and the Hugging Face hub did not provide a "
            "model of that name; check the name and the network"
        ) from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors, by transformers' names, of a folder's model.safetensors, or of the
    several files that its index names."""
    from safetensors.torch import load_file  # here, because training does not need it

    # A folder may have both a single file and an index, after an export over a larger model. Like
    # transformers, read the single file then.
    file_names = ["model.safetensors"]
    index_path = folder / "model.safetensors.index.json"
    if not (folder / file_names[0]).is_file() and index_path.is_file():
        # maps each tensor to its file, such as model-00001-of-00003.safetensors
        file_of_tensor = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        file_names = sorted(set(file_of_tensor.values()))
    hf_weights: dict[str, Tensor] = {}
    for file_name in file_names:
        # Also raised for a folder with only pytorch_model.bin, a format that this project does not
        # read. `reading` in read_model makes a UserError of it, which names the folder.
        if not (folder / file_name).is_file():
            raise ValueError(f"it has no {file_name}")
        hf_weights |= load_file(folder / file_name)  # tensors by name
    return hf_weights


def read_model(model_class: type[Model], model_name: str | Path) -> Model:
    """Return the float32 model of a Hugging Face name ("gpt2", "user/model") or folder: a GPT-2,
    LLaMA or Qwen3 as save_pretrained writes it. Raise UserError, which names the reason, for any
    other model, and FileNotFoundError for a folder without a config.json."""
    folder = find_or_download(str(model_name))  # here, or in the hub's cache
    # turns any error in the content of the files into a UserError that names the folder
    with reading(model_name, "a GPT-2, LLaMA or Qwen3 of Hugging Face's format"):
        config = config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        hf_weights = read_weights(folder)
        # OpenAI's files on the hub have the names of GPT2Model, without GPT2LMHeadModel's prefix
        has_prefix = any(hf_name.startswith("transformer.") for hf_name in hf_weights)
        if has_gpt2_names(config) and not has_prefix:
            hf_weights = {f"transformer.{hf_name}": x for hf_name, x in hf_weights.items()}
        return model_from_hf(model_class, hf_weights, config)
