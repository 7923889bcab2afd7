"""Weights from and to Hugging Face's format, without importing transformers.

The functions named _from_hf and _to_hf map dicts to dicts; load_pretrained and save_pretrained read
and write the folders that transformers' from_pretrained and save_pretrained use.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from reprlib import repr as brief

import torch
from torch import Tensor

from model import llama
from model.config import GPTConfig
from model.empty import empty_gpt, with_context
from model.gpt import GPT
from utils.errors import UserError

# OpenAI's code multiplies x @ W, so it stores the matrices of a block as (in, out); ours (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# fields of transformers' GPT2Config with the only value that is supported here
GPT2_CONSTANTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
SIZES = {  # fields of GPT2Config and ours
    "n_positions": "block_size",
    **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
}


def config_from_hf(values: dict) -> GPTConfig:
    """Return the GPTConfig of a config.json; raise UserError if it is not supported."""
    if values.get("model_type") in llama.MODEL_TYPES:
        return llama.config_from_hf(values)
    if values.get("model_type") != "gpt2":
        model_type, known = brief(values.get("model_type")), ", ".join(("gpt2", *llama.MODEL_TYPES))
        raise UserError(f"config.json describes a model {model_type}, not one of {known}")
    if missing := [name for name in SIZES if name not in values]:
        raise UserError(f"config.json lacks {', '.join(missing)}")
    config = GPTConfig(**{ours: values[name] for name, ours in SIZES.items()})
    for name, value in {**GPT2_CONSTANTS, "n_inner": config.inner}.items():
        found = values.get(name, value)
        if found != value and (name, found) != ("n_inner", None):
            raise UserError(f"config.json has {name} {brief(found)}; only {value} is supported")
    return config


def config_to_hf(config: GPTConfig) -> dict:
    """Return the config.json of transformers' GPT2LMHeadModel."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, ours) for name, ours in SIZES.items()},
        "n_ctx": config.block_size,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        **GPT2_CONSTANTS,
    }


def weights_from_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return our float32 state dict, made from that of transformers' GPT2LMHeadModel, GPT2Model,
    LlamaForCausalLM or Qwen3ForCausalLM; raise UserError naming the first tensor that is missing,
    of a wrong shape or unknown."""
    if config.n_layer > len(state):
        raise UserError(f"config.json has {config.n_layer} layers, the files {len(state)} tensors")
    if not config.is_gpt2:
        expected = llama.weights_to_hf(empty_gpt(config).state_dict(), config)
        tensors = {
            name: checked_tensor(state, name, empty.shape) for name, empty in expected.items()
        }
        if state:
            raise UserError(f"the tensor {next(iter(state))} belongs to no such model")
        return llama.weights_from_hf(tensors, config)
    state = {name.removeprefix("transformer."): x for name, x in state.items()}
    ours = {}
    for full_name, empty in empty_gpt(config).state_dict().items():
        name, expected = full_name.removeprefix("transformer."), list(empty.shape)
        if name == "wte.weight":
            expected[0] = config.vocab_size
        if name.endswith(TRANSPOSED):
            expected.reverse()
        x = checked_tensor(state, name, expected)
        x = x.T if name.endswith(TRANSPOSED) else x
        padding = x.new_zeros(len(empty) - len(x), *x.shape[1:])  # rows of the padded vocabulary
        ours[full_name] = torch.cat([x, padding]).contiguous()
    wte = ours["transformer.wte.weight"][: config.vocab_size]
    head = state.pop("lm_head.weight", None)
    if head is not None and not torch.equal(dense_float32(head, "lm_head.weight"), wte):
        raise UserError("the tensor lm_head.weight differs from wte.weight; GPT-2 ties them")
    unknown = [name for name in state if not name.endswith((".attn.bias", ".attn.masked_bias"))]
    if unknown:
        raise UserError(f"the tensor {unknown[0]} belongs to no GPT-2")
    return ours


def checked_tensor(state: dict[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    """Take a tensor out of `state`, as float32; raise UserError if it has another shape."""
    x = dense_float32(state.pop(name, None), name)
    if tuple(x.shape) != tuple(shape):
        raise UserError(
            f"the tensor {name} is {tuple(x.shape)}, but config.json implies {tuple(shape)}"
        )
    return x


def dense_float32(x: object, name: str) -> Tensor:
    """Return `x` in float32; raise UserError unless it is a dense tensor within its storage."""
    if x is None:
        raise UserError(f"the tensor {name} is missing")
    real = isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided
    if not real or x.is_nested or not x.is_cpu:
        raise UserError(f"the tensor {name} is not a dense floating-point tensor")
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        raise UserError(f"the tensor {name} is larger than its storage in the file")
    return x.float()


def weights_to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Return the state dict of transformers' GPT2LMHeadModel, without padding of the vocabulary."""
    theirs = {name: x.T if name.endswith(TRANSPOSED) else x for name, x in state.items()}
    theirs["transformer.wte.weight"] = theirs["transformer.wte.weight"][: config.vocab_size]
    return theirs


@cache
def find_folder(name: str) -> Path:
    """Return the folder `name`, or download the hub repository of that name if it is not cached."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
        if not list(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*.bin*"])
    except (OSError, ValueError) as error:  # the hub's errors are subclasses of these
        raise UserError(
            f"{name} is no folder, and the Hugging Face hub did not provide a model of that name "
            f"({type(error).__name__}); check the name, or go online"
        ) from error
    return folder


@contextlib.contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Turn any error of unusable files into a UserError that names their source."""
    try:
        yield
    except (OSError, LookupError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{source} cannot be loaded as GPT-2, LLaMA or Qwen3: {reason}") from error


def read_config(folder: Path) -> GPTConfig:
    """Return the architecture in a folder's config.json; raise UserError if it is unsupported."""
    with naming(folder):
        return config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder. Raises UserError for damaged files and values that are not
    finite."""
    from safetensors.torch import load_file  # not needed for training

    state: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                state |= load_file(file)
            else:
                state |= torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle can raise any error
            raise UserError(f"{file.name} is damaged ({type(error).__name__})") from error
    for name, x in state.items():
        if x.is_floating_point() and not x.isfinite().all():
            raise UserError(f"{name} has values that are not finite")
    return state


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read: a whole one, else those of an index, with
    .safetensors before .bin. Raises UserError if one is missing."""
    for whole, parts in (
        ("model.safetensors", "model-*.safetensors"),
        ("pytorch_model.bin", "pytorch_model-*.bin"),
    ):
        index = folder / f"{whole}.index.json"
        if (folder / whole).exists():
            return [folder / whole]
        if index.exists():
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            if lacking := [name for name in names if not (folder / name).exists()]:
                raise UserError(f"{lacking[0]} is missing, which {index.name} lists")
            return [folder / name for name in names]
        if found := sorted(folder.glob(parts)):
            return found
    raise UserError("it holds no model.safetensors and no pytorch_model.bin")


def load_pretrained(
    name_or_folder: str | Path, block_size: int | None = None, dropout: float = 0.0
) -> GPT:
    """Return the model of a Hugging Face name ("gpt2", "gpt2-xl", "user/model") or folder: a GPT-2,
    or a LLaMA or Qwen3 of the shapes that save_pretrained writes.

    A smaller `block_size` keeps the first positions. Raises UserError naming what does not fit.
    """
    folder = find_folder(str(name_or_folder))
    config = read_config(folder)
    block_size = block_size or config.block_size
    if block_size > config.block_size:
        most = config.block_size
        raise UserError(f"{name_or_folder} has {most} positions, fewer than {block_size}")
    with naming(name_or_folder):
        weights = weights_from_hf(read_weights(folder), config)
        model = empty_gpt(config)
        model.load_state_dict(weights, assign=True)
    return with_context(model, replace(config, block_size=block_size, dropout=dropout))


def save_pretrained(model: GPT, folder: str | Path) -> None:
    """Write config.json and model.safetensors, which transformers' AutoModelForCausalLM loads;
    raise UserError for a model that is neither a GPT-2 nor in the shape of a LLaMA or Qwen3."""
    from safetensors.torch import save_file

    folder, config, state = Path(folder), model.config, model.state_dict()
    if config.is_gpt2:
        values, weights = config_to_hf(config), weights_to_hf(state, config)
    else:
        values, weights = llama.config_to_hf(config), llama.weights_to_hf(state, config)
    weights = {name: x.detach().cpu().contiguous() for name, x in weights.items()}
    eot = config.vocab_size - 1
    values |= {"dtype": "float32", "bos_token_id": eot, "eos_token_id": eot}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
