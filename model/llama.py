"""LLaMA and Qwen3 models to Hugging Face's format. A Qwen3 is a LLaMA with QK-norm."""

import torch
from torch import Tensor

from model.config import GPTConfig, ModelError
from model.gpt import RMS_EPS as EPS

# fields of GPTConfig in which every LLaMA differs from GPT-2, and those that it is free to choose
CONSTANTS = {"position": "rotary", "norm": "rms", "bias": False}
CHOICES = ("n_kv_head", "n_inner", "rope_base", "qk_norm", "tied")
# relu2 is exported as a gated ReLU whose gate equals its input: relu(x) * x = relu(x)²
ACTIVATIONS = {"swiglu": "silu", "relu2": "relu"}


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' LlamaForCausalLM; with QK-norm Qwen3ForCausalLM,
    which is a LLaMA otherwise. Raise ModelError naming the fields that neither supports."""
    wanted = CONSTANTS | {name: getattr(config, name) for name in CHOICES}
    known = config.activation in ACTIVATIONS
    wanted["activation"] = config.activation if known else "swiglu"
    if misfits := config.differs_from(wanted):
        fields = ", ".join(f"{name}={getattr(config, name)}" for name in misfits)
        raise ModelError(
            f"transformers has no class for this model: no GPT-2, and no LLaMA because of {fields}"
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
