"""LLaMA and Qwen3 models to and from Hugging Face's format. A Qwen3 is a LLaMA with QK-norm."""

from dataclasses import replace
from reprlib import repr as brief

import torch
from torch import Tensor

from model.config import GPTConfig
from model.layers import RMS_EPS as EPS
from utils.errors import UserError

# fields of GPTConfig in which every LLaMA differs from GPT-2, and those that it is free to choose
CONSTANTS = {"position": "rotary", "norm": "rms", "bias": False}
CHOICES = ("n_kv_head", "n_inner", "rope_base", "qk_norm", "tied")
# relu2 is exported as a gated ReLU whose gate equals its input: relu(x) * x = relu(x)²
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu"}
FIXED = ("hidden_act", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias")
UNUSED = ("rope_scaling", "use_sliding_window")  # fields that change the architecture if set


MODEL_TYPES = ("llama", "qwen3")
SIZES = {  # fields of LlamaConfig and ours
    "vocab_size": "vocab_size",
    "max_position_embeddings": "block_size",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "num_key_value_heads": "n_kv_head",
    "intermediate_size": "n_inner",
}


def config_from_hf(values: dict) -> GPTConfig:
    """Return the GPTConfig of the config.json of a LLaMA or Qwen3; raise UserError naming a field
    whose value is not supported."""
    if missing := [name for name in SIZES if name not in values]:
        raise UserError(f"config.json lacks {', '.join(missing)}")
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
    act, rope = values.get("hidden_act"), values.get("rope_parameters") or values
    config = GPTConfig(
        **{ours: values[name] for name, ours in SIZES.items()},
        **CONSTANTS,
        activation=activations.get(act, "swiglu") if isinstance(act, str) else "swiglu",
        rope_base=rope.get("rope_theta", 10_000.0),
        qk_norm=values["model_type"] == "qwen3",
        tied=values.get("tie_word_embeddings", False),
    )
    if config.n_kv_head == config.n_head:  # None, as where nothing is given
        config = replace(config, n_kv_head=None)
    if config.n_inner == 4 * config.n_embd:
        config = replace(config, n_inner=None)
    own = config_to_hf(config)
    supported = {name: own[name] for name in FIXED if name in own} | dict.fromkeys(UNUSED)
    values.setdefault("rms_norm_eps", 1e-6)  # the default of transformers
    for name, value in supported.items():
        if values.get(name, value) not in (value, False):
            raise UserError(f"config.json has {name} {brief(values[name])}, not {value}")
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"config.json has rope_type {brief(rope['rope_type'])}, not default")
    return config


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' LlamaForCausalLM; with QK-norm Qwen3ForCausalLM,
    which is a LLaMA otherwise. Raise UserError naming the fields that neither supports."""
    wanted = CONSTANTS | {name: getattr(config, name) for name in CHOICES}
    known = config.activation in ACTIVATIONS
    wanted["activation"] = config.activation if known else "swiglu"
    if misfits := config.differs_from(wanted):
        fields = ", ".join(f"{name}={getattr(config, name)}" for name in misfits)
        unlike = ", ".join(f"{name}={getattr(config, name)}" for name in config.differs_from({}))
        raise UserError(
            f"transformers has no class for this model: no GPT-2 because of {unlike}, and no LLaMA "
            f"because of {fields}"
        )
    architecture, model_type = ("Qwen3", "qwen3") if config.qk_norm else ("Llama", "llama")
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "hidden_act": ACTIVATIONS[config.activation],
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.block_size,
        "rope_theta": config.rope_base,
        "rms_norm_eps": EPS,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }


def weights_from_hf(theirs: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our state dict from tensors with the names and shapes that weights_to_hf gives; raise
    UserError for weights that this architecture lacks."""

    def padded(table: Tensor) -> Tensor:
        rows = config.padded_vocab_size - config.vocab_size
        return torch.cat([table, table.new_zeros(rows, config.n_embd)])

    ours = {
        "transformer.wte.weight": padded(theirs["model.embed_tokens.weight"]),
        "transformer.ln_f.weight": theirs["model.norm.weight"],
    }
    if not config.tied:
        ours["lm_head.weight"] = padded(theirs["lm_head.weight"])
    for layer in range(config.n_layer):
        prefix, name = f"transformer.h.{layer}.", f"model.layers.{layer}.{{}}.weight".format
        qkv = [theirs[name(f"self_attn.{x}_proj")] for x in "qkv"]
        gate, up = theirs[name("mlp.gate_proj")], theirs[name("mlp.up_proj")]
        if config.activation == "relu2" and not torch.equal(gate, up):
            raise UserError(f"layer {layer} has a gated ReLU, which is no squared ReLU")
        norms = [theirs[name(f"self_attn.{x}_norm")] for x in "qk"] if config.qk_norm else []
        if any((norm != 1).any() for norm in norms):
            raise UserError(f"layer {layer} has gains in its QK-norm, which is without them here")
        parts = {
            "attn.c_attn": torch.cat(qkv),
            "attn.c_proj": theirs[name("self_attn.o_proj")],
            "mlp.c_fc": torch.cat([gate, up]) if config.activation == "swiglu" else gate,
            "mlp.c_proj": theirs[name("mlp.down_proj")],
            "ln_1": theirs[name("input_layernorm")],
            "ln_2": theirs[name("post_attention_layernorm")],
        }
        ours |= {f"{prefix}{part}.weight": x for part, x in parts.items()}
    return ours


def weights_to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' LlamaForCausalLM or Qwen3ForCausalLM, without padding
    of the vocabulary."""
    widths = [n * config.head_size for n in (config.n_head, config.kv_heads, config.kv_heads)]
    theirs = {
        "model.embed_tokens.weight": state["transformer.wte.weight"][: config.vocab_size],
        "model.norm.weight": state["transformer.ln_f.weight"],
    }
    if not config.tied:
        theirs["lm_head.weight"] = state["lm_head.weight"][: config.vocab_size]
    for layer in range(config.n_layer):
        ours = f"transformer.h.{layer}."
        q, k, v = state[ours + "attn.c_attn.weight"].split(widths)
        fc = state[ours + "mlp.c_fc.weight"]
        gate, up = fc.chunk(2) if config.activation == "swiglu" else (fc, fc.clone())
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": state[ours + "attn.c_proj.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": state[ours + "mlp.c_proj.weight"],
            "input_layernorm": state[ours + "ln_1.weight"],
            "post_attention_layernorm": state[ours + "ln_2.weight"],
        }
        if config.qk_norm:  # ours has no weights
            parts |= {f"self_attn.{x}_norm": torch.ones(config.head_size) for x in "qk"}
        theirs |= {f"model.layers.{layer}.{name}.weight": x for name, x in parts.items()}
    return theirs
