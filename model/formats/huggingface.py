"""Folders of Hugging Face's format, read and written without importing transformers."""

import json
from collections.abc import Collection
from pathlib import Path

from model.formats.huggingface_weights import config_to_hf, weights_to_hf
from model.gpt import GPT


def load_pretrained(model_name: str | Path) -> GPT:
    """Return the model of a Hugging Face name ("gpt2", "user/model") or folder, in float32: a
    GPT-2, LLaMA or Qwen3. Raise UserError naming what does not fit."""
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

    `eot` is the id of end of text, by default the last one. Generation ends at `end_ids`, by
    default at `eot`.
    `bos` is the id that a text begins with, by default `eot`.
    Raises UserError for a model that is neither a GPT-2 nor a LLaMA or Qwen3 of transformers.
    """
    from safetensors.torch import save_file  # here, because training does without it

    folder = Path(folder)
    if eot is None:
        eot = model.config.vocab_size - 1
    if bos is None:
        bos = eot
    if end_ids is None:
        end_ids = [eot]
    # No token ends a text of characters; `eot` still pads the shorter texts of a batch.
    eos = eot if end_ids else None
    special_ids: dict[str, object] = {"bos_token_id": bos, "eos_token_id": eos}
    hf_config = config_to_hf(model.config) | {"dtype": "float32"} | special_ids
    # what transformers' `generate` does for this model unless told otherwise
    generation_config = special_ids | {"pad_token_id": eot, "do_sample": True}
    other_ends = sorted(set(end_ids) - {eot})
    if other_ends:
        generation_config["eos_token_id"] = [eot, *other_ends]
    hf_weights = weights_to_hf(model.state_dict(), model.config)
    # safetensors takes no transposed views
    hf_weights = {hf_name: x.contiguous() for hf_name, x in hf_weights.items()}

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=1), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    path = folder / "model.safetensors"
    # older transformers refuse a file without this metadata
    save_file(hf_weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files that others cannot read
