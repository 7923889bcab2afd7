"""Models with rotary positions in Hugging Face's formats: LLaMA (the llama recipe, and its kin) and
NanoChat (modern)."""

import torch
from torch import Tensor

from model.config import GPTConfig, ModelError

FORMATS = {  # what each cannot do without, as fields of GPTConfig
    "llama": {"norm": "rms", "activation": "swiglu", "qk_norm": False, "embed_norm": False}
    | {"softcap": None},
    "nanochat": {"norm": "unit", "activation": "relu2", "qk_norm": True, "embed_norm": True}
    | {"tied": False},
}
ALWAYS = {"position": "rotary", "bias": False}
CLASSES = {"llama": "LlamaForCausalLM", "nanochat": "NanoChatForCausalLM"}
MLPS = {"llama": ("gate_proj", "up_proj", "down_proj"), "nanochat": ("fc1", "fc2")}


def format_of(config: GPTConfig) -> str:
    """llama or nanochat; ModelError for a model that is neither, naming what is in the way."""
    misfits = {}
    for name, needed in FORMATS.items():
        needed = ALWAYS | needed
        misfits[name] = [key for key, value in needed.items() if getattr(config, key) != value]
        if not misfits[name]:
            return name
    name = min(misfits, key=lambda name: len(misfits[name]))
    raise ModelError(
        f"transformers has no class for this model; it would be {name} but for "
        + ", ".join(f"{key}={getattr(config, key)}" for key in misfits[name])
    )


def config_to_hf(config: GPTConfig) -> dict:
    """What config.json says of the architecture."""
    name = format_of(config)
    own = {"hidden_act": "silu", "mlp_bias": False, "head_dim": config.head_size}
    if name == "nanochat":
        own = {"hidden_act": "relu2", "final_logit_softcapping": config.softcap}
    return own | {
        "architectures": [CLASSES[name]],
        "model_type": name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.inner,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.block_size,
        "rope_theta": config.rope_base,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }


def to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Their state dict from ours; the padding of the vocabulary goes."""
    name, D = format_of(config), config.head_size
    heads = [n * D for n in (config.n_head, config.kv_heads, config.kv_heads)]
    *ins, out = MLPS[name]
    theirs = {
        "model.embed_tokens.weight": state["transformer.wte.weight"][: config.vocab_size],
    }
    if not config.tied:
        theirs["lm_head.weight"] = state["lm_head.weight"][: config.vocab_size]
    if name == "llama":
        theirs["model.norm.weight"] = state["transformer.ln_f.weight"]
    for layer in range(config.n_layer):
        ours, to = f"transformer.h.{layer}.", f"model.layers.{layer}."
        q, k, v = state[ours + "attn.c_attn.weight"].split(heads)
        if name == "nanochat":  # turns the other way: the same with the halves of a head swapped
            q, k = (w.unflatten(0, (-1, D)).roll(D // 2, 1).flatten(0, 1) for w in (q, k))
        for key, weight in (("q", q), ("k", k), ("v", v)):
            theirs[f"{to}self_attn.{key}_proj.weight"] = weight
        theirs[to + "self_attn.o_proj.weight"] = state[ours + "attn.c_proj.weight"]
        for key, weight in zip(ins, state[ours + "mlp.c_fc.weight"].chunk(len(ins)), strict=True):
            theirs[f"{to}mlp.{key}.weight"] = weight
        theirs[f"{to}mlp.{out}.weight"] = state[ours + "mlp.c_proj.weight"]
        if name == "llama":
            theirs[to + "input_layernorm.weight"] = state[ours + "ln_1.weight"]
            theirs[to + "post_attention_layernorm.weight"] = state[ours + "ln_2.weight"]
    return {key: x.detach().cpu().contiguous().to(torch.float32) for key, x in theirs.items()}
