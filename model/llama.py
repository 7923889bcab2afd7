"""Models in the shape of a LLaMA in Hugging Face's format, from our names to theirs; with QK-norm
they are a Qwen3's, whose layers are a LLaMA's otherwise."""

import torch
from torch import Tensor

from model.config import GPTConfig, ModelError
from model.norm import EPS

NEEDED = {"position": "rotary", "norm": "rms", "bias": False}
FREE = ("n_kv_head", "n_inner", "rope_base", "qk_norm", "tied")
ACTS = {"swiglu": "silu", "relu2": "relu"}  # a ReLU whose gate is its input: their product is ReLU²


def config_to_hf(config: GPTConfig) -> dict:
    """What config.json says of the architecture. ModelError for one that is no LLaMA's, naming what
    is in the way."""
    wanted = NEEDED | {name: getattr(config, name) for name in FREE}
    wanted["activation"] = config.activation if config.activation in ACTS else "swiglu"
    if misfits := config.differs_from(wanted):
        told = ", ".join(f"{name}={getattr(config, name)}" for name in misfits)
        raise ModelError(
            f"transformers has no class for this model: no GPT-2, and no LLaMA because of {told}"
        )
    kind = ("Qwen3", "qwen3") if config.qk_norm else ("Llama", "llama")
    return {
        "architectures": [f"{kind[0]}ForCausalLM"],
        "model_type": kind[1],
        "hidden_act": ACTS[config.activation],
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


def to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """State dict of transformers' LlamaForCausalLM or Qwen3ForCausalLM from ours; padding of the
    vocabulary goes."""
    heads = [n * config.head_size for n in (config.n_head, config.kv_heads, config.kv_heads)]
    theirs = {
        "model.embed_tokens.weight": state["transformer.wte.weight"][: config.vocab_size],
        "model.norm.weight": state["transformer.ln_f.weight"],
    }
    if not config.tied:
        theirs["lm_head.weight"] = state["lm_head.weight"][: config.vocab_size]
    for layer in range(config.n_layer):
        ours, to = f"transformer.h.{layer}.", f"model.layers.{layer}."
        q, k, v = state[ours + "attn.c_attn.weight"].split(heads)
        fc = state[ours + "mlp.c_fc.weight"]
        gate, up = fc.chunk(2) if config.activation == "swiglu" else (fc, fc.clone())
        theirs |= {
            to + "self_attn.q_proj.weight": q,
            to + "self_attn.k_proj.weight": k,
            to + "self_attn.v_proj.weight": v,
            to + "self_attn.o_proj.weight": state[ours + "attn.c_proj.weight"],
            to + "mlp.gate_proj.weight": gate,
            to + "mlp.up_proj.weight": up,
            to + "mlp.down_proj.weight": state[ours + "mlp.c_proj.weight"],
            to + "input_layernorm.weight": state[ours + "ln_1.weight"],
            to + "post_attention_layernorm.weight": state[ours + "ln_2.weight"],
        }
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                theirs[f"{to}self_attn.{name}.weight"] = torch.ones(config.head_size)
    return {name: x.detach().cpu().contiguous() for name, x in theirs.items()}
