"""Folders of Hugging Face's format.

Before a folder is written, the model is compared with transformers, which computes the same only if
nobody has changed the model. Reading a folder does not import transformers.
"""

import json
from collections.abc import Collection
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from model.config import GPTConfig
from model.formats.huggingface_weights import config_to_hf, weights_to_hf
from model.gpt import GPT
from model.proof import agrees, on_narrow_copy
from utils.errors import UserError

# Tokens with which a narrow copy is compared with transformers: enough to notice a shorter window
# of attention. Angles of rotary positions are rounded, so that later positions would differ by more
# than the tolerance.
NARROW_TOKENS = 2048
TOKENS = 16  # with which the model itself is compared


def load_pretrained(model_name: str | Path) -> GPT:
    """Return the float32 model of a Hugging Face name ("gpt2", "user/model") or folder. Raise
    UserError, which names the reason, if it is not a GPT-2, LLaMA or Qwen3."""
    return GPT.from_pretrained(str(model_name))


def save_pretrained(
    model: GPT,
    folder: str | Path,
    eot: int | None = None,
    end_ids: Collection[int] | None = None,
    bos: int | None = None,
) -> None:
    """Write config.json, generation_config.json and model.safetensors, which transformers'
    AutoModelForCausalLM loads.

    `eot` is the token id of end of text, by default the last id. Generation ends at `end_ids`, by
    default at `eot`. A text begins with the id `bos`, by default `eot`.
    Raises UserError for a model that is not a GPT-2, LLaMA or Qwen3 of transformers, also if only
    its logits are others. Nothing is written then.
    """
    from safetensors.torch import save_file  # here, because training does not need it

    folder = Path(folder)
    if eot is None:
        eot = model.config.vocab_size - 1
    if bos is None:
        bos = eot
    if end_ids is None:
        end_ids = [eot]
    # end_ids is empty for a text of characters, which no token ends. `eot` still pads batches.
    eos = eot if end_ids else None
    token_id_fields: dict[str, object] = {"bos_token_id": bos, "eos_token_id": eos}
    # the content of config.json: {"model_type": "gpt2", "n_embd": 768, ...}
    hf_config = config_to_hf(model.config) | {"dtype": "float32"} | token_id_fields
    # the defaults of transformers' `generate` for this model
    generation_config = token_id_fields | {"pad_token_id": eot, "do_sample": True}
    other_ends = sorted(set(end_ids) - {eot})  # such as the end of a chat's message
    if other_ends:
        generation_config["eos_token_id"] = [eot] + other_ends
    # safetensors saves neither transposed views nor memory that two tensors share, as in an edited
    # model whose layers share weights
    hf_weights: dict[str, Tensor] = {}
    used_addresses: set[int] = set()
    for hf_name, x in weights_to_hf(model.state_dict(), model.config).items():
        x = x.cpu().contiguous()
        hf_weights[hf_name] = x.clone() if x.data_ptr() in used_addresses else x
        used_addresses.add(x.data_ptr())
    refuse_another_architecture(model)  # UserError, before the first file is written

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    path = folder / "model.safetensors"
    # older transformers refuse a file without this metadata
    save_file(hf_weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that other users cannot read


def refuse_another_architecture(model: GPT) -> None:
    """Raise UserError if the model computes something else than the model of transformers that its
    export names. A narrow copy shows it for a long text, the model itself for 16 tokens."""
    # cached; mypy does not know that classes are hashable
    is_same = narrow_copy_agrees(type(model), model.config)  # type: ignore[arg-type]
    if not (is_same and agrees_with_transformers(model, TOKENS)):
        (class_name,) = config_to_hf(model.config)["architectures"]  # "LlamaForCausalLM"
        raise UserError(
            f"this model is not the {class_name} of transformers: its logits differ, and nothing "
            "was written"
        )


@cache
def narrow_copy_agrees(model_class: type[GPT], config: GPTConfig) -> bool:
    """Return whether transformers computes the same logits as a narrow copy of a model of this
    class and config. Raise UserError if the copy cannot be compared."""
    try:
        # Calls the function with a model of few channels and random weights. If it returns True,
        # refuse_another_architecture compares the model itself, too.
        return on_narrow_copy(agrees_with_transformers, model_class, config)
    except Exception as error:  # an edited model may raise anything
        raise UserError(
            "this model cannot be compared with transformers, so nothing was written: "
            f"{type(error).__name__}: {error}"
        ) from error


@torch.no_grad()
def agrees_with_transformers(model: GPT, num_tokens: int = NARROW_TOKENS) -> bool:
    """Return whether transformers computes the same logits with the exported weights of a model,
    for a text of `num_tokens` tokens, or of the whole context if that is shorter."""
    import transformers  # here, because it takes seconds

    hf_fields = config_to_hf(model.config)  # {"model_type": "gpt2", "n_embd": 768, ...}
    (class_name,) = hf_fields["architectures"]  # "GPT2LMHeadModel"
    # generation_config.json has the ids of special tokens; here they only must exist
    token_id_fields = {"bos_token_id": 0, "eos_token_id": 0}
    hf_config = transformers.AutoConfig.for_model(**hf_fields | token_id_fields)
    # on the CPU, where transformers computes
    weights = {name: x.cpu() for name, x in model.state_dict().items()}
    transformers.utils.logging.disable_progress_bar()
    # float32, as `weights`, whose memory it shares
    hf_model = getattr(transformers, class_name).from_pretrained(
        None,  # no folder: the weights come from state_dict
        config=hf_config,
        state_dict=weights_to_hf(weights, model.config),
        dtype=torch.float32,
    )
    transformers.utils.logging.enable_progress_bar()

    was_training = model.training
    model.eval()  # no dropout
    num_tokens = min(num_tokens, model.config.block_size)
    generator = torch.Generator("cpu").manual_seed(0)
    idx = torch.randint(model.config.vocab_size, (1, num_tokens), generator=generator)
    ours = model(idx.to(model.head_weight.device)).cpu()  # (1, T, V)
    model.train(was_training)
    theirs = hf_model.eval()(idx).logits  # (1, T, V)
    # A run that diverged may have NaN in its weights, and then both have NaN. `agrees` allows for
    # rounding in the dtype: 1e-4 of the largest logit in float32, 3 % in bfloat16.
    return agrees(ours.nan_to_num(), theirs.nan_to_num(), model.head_weight.dtype)
