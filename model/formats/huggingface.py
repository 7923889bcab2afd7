"""Folders of Hugging Face's format, read and written without importing transformers."""

import json
from collections.abc import Collection
from pathlib import Path

from model.formats.huggingface_weights import config_to_hf, weights_to_hf
from model.gpt import GPT


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
    Raises UserError for a model that is not a GPT-2, LLaMA or Qwen3 of transformers.
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
    special_ids: dict[str, object] = {"bos_token_id": bos, "eos_token_id": eos}
    hf_config = config_to_hf(model.config) | {"dtype": "float32"} | special_ids
    # the defaults of transformers' `generate` for this model
    generation_config = special_ids | {"pad_token_id": eot, "do_sample": True}
    other_ends = sorted(set(end_ids) - {eot})
    if other_ends:
        generation_config["eos_token_id"] = [eot, *other_ends]
    hf_weights = weights_to_hf(model.state_dict(), model.config)
    # contiguous, because safetensors cannot save transposed views
    hf_weights = {hf_name: x.contiguous() for hf_name, x in hf_weights.items()}

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    path = folder / "model.safetensors"
    # older transformers refuse a file without this metadata
    save_file(hf_weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that other users cannot read
