"""LLaMA and Qwen3 models to and from Hugging Face's format. A Qwen3 is a LLaMA with QK-norm."""

import torch
from torch import Tensor

from model.config import GPTConfig
from model.layers import RMS_EPS
from utils.errors import UserError

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
# fields of GPTConfig in which every LLaMA differs from GPT-2, and those that it is free to choose
CONSTANTS = {"position": "rotary", "norm": "rms", "bias": False}
CHOICES = ("n_kv_head", "n_inner", "rope_base", "qk_norm", "tied")
# relu2 becomes a gated ReLU whose gate equals its input: relu(x) * x = relu(x)²
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu"}


def config_from_hf(values: dict) -> GPTConfig:
    """Return the GPTConfig of the config.json of a LLaMA or Qwen3."""
    sizes = {ours: values[name] for name, ours in SIZES.items()}
    if sizes["n_kv_head"] == sizes["n_head"]:
        sizes["n_kv_head"] = None  # as where it is not given
    if sizes["n_inner"] == 4 * sizes["n_embd"]:
        sizes["n_inner"] = None
    return GPTConfig(
        **sizes,
        **CONSTANTS,
        activation="swiglu",
        rope_base=values.get("rope_theta", 10_000.0),
        qk_norm=values["model_type"] == "qwen3",
        tied=values.get("tie_word_embeddings", False),
    )


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' LlamaForCausalLM; with QK-norm Qwen3ForCausalLM.
    Raise UserError naming the fields that neither supports."""
    wanted = CONSTANTS | {name: getattr(config, name) for name in CHOICES}
    wanted["activation"] = config.activation if config.activation in ACTIVATIONS else "swiglu"
    if misfits := config.differs_from(wanted):
        fields = ", ".join(f"{name}={getattr(config, name)}" for name in misfits)
        raise UserError(
            f"transformers has no class for this model: it is no GPT-2, and no LLaMA with {fields}"
        )
    name = "Qwen3" if config.qk_norm else "Llama"
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": name.lower(),
        "hidden_act": ACTIVATIONS[config.activation],
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "intermediate_size": config.inner,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "rope_theta": config.rope_base,
        "rope_scaling": None,
        "rms_norm_eps": RMS_EPS,
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_sliding_window"), False),
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }


def weight_names(config: GPTConfig) -> dict[str, dict[str, int]]:
    """Return our names of the weights, each with the names and rows of the ones that it stacks."""
    C, K = config.n_embd, config.kv_heads * config.head_size
    block = {
        "attn.c_attn": {"self_attn.q_proj": C, "self_attn.k_proj": K, "self_attn.v_proj": K},
        "attn.c_proj": {"self_attn.o_proj": C},
        "mlp.c_fc": {"mlp.gate_proj": config.inner, "mlp.up_proj": config.inner},
        "mlp.c_proj": {"mlp.down_proj": C},
        "ln_1": {"input_layernorm": C},
        "ln_2": {"post_attention_layernorm": C},
    }
    names = {
        "transformer.wte.weight": {"model.embed_tokens.weight": config.vocab_size},
        "transformer.ln_f.weight": {"model.norm.weight": C},
    }
    if not config.tied:
        names["lm_head.weight"] = {"lm_head.weight": config.vocab_size}
    for layer in range(config.n_layer):
        for ours, theirs in block.items():
            names[f"transformer.h.{layer}.{ours}.weight"] = {
                f"model.layers.{layer}.{name}.weight": rows for name, rows in theirs.items()
            }
    return names


def weights_from_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our state dict, from that of transformers' LlamaForCausalLM or Qwen3ForCausalLM."""
    ours = {
        name: torch.cat([state[x] for x in theirs]) for name, theirs in weight_names(config).items()
    }
    back = weights_to_hf(ours, config)
    for name, x in state.items():  # what has no place in `ours`, such as gains of QK-norm
        assert torch.equal(x, back.get(name, x[:0])), f"{name} is not supported"
    return ours


def weights_to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' LlamaForCausalLM or Qwen3ForCausalLM."""
    theirs = {}
    for ours, rows in weight_names(config).items():
        x = state[ours]
        if config.activation == "relu2" and "c_fc" in ours:
            x = torch.cat([x, x])
        theirs |= zip(rows, x.split(list(rows.values())), strict=True)
    for layer in range(config.n_layer if config.qk_norm else 0):  # ours has no gains
        for x in "qk":
            gain = torch.ones(config.head_size)
            theirs[f"model.layers.{layer}.self_attn.{x}_norm.weight"] = gain
    return theirs
