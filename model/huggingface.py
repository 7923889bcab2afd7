"""GPT-2 weights from and to Hugging Face's format, without importing transformers.

from_hf and to_hf turn one state dict into the other; load_pretrained and save_pretrained read and
write the folders that transformers' from_pretrained and save_pretrained use.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as brief

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from model import llama
from model.config import GPTConfig, ModelError
from model.gpt import GPT, skeleton

# OpenAI's code multiplies x @ W, so the matrices of a block are stored (in, out); ours (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# settings of transformers' GPT2Config that the model here has no other value for
FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def config_from_hf(values: dict) -> GPTConfig:
    """GPTConfig of a config.json; ModelError where it is not a GPT-2 that can be built here."""
    if values.get("model_type") != "gpt2":
        model_type = brief(values.get("model_type"))
        raise ModelError(f"config.json describes a model {model_type}, not gpt2")
    for name, value in FIXED.items():
        if values.get(name, value) != value:
            found = brief(values[name])
            raise ModelError(f"config.json has {name} {found}; only {value} is supported")
    needed = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
    missing = [name for name in needed if name not in values]
    if missing:
        raise ModelError(f"config.json does not say {', '.join(missing)}")
    block_size, vocab_size, n_layer, n_head, n_embd = (values[name] for name in needed)
    if values.get("n_inner") not in (None, 4 * n_embd):
        raise ModelError(f"config.json has n_inner {brief(values['n_inner'])}, not 4 x {n_embd}")
    return GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd)


def config_to_hf(config: GPTConfig) -> dict:
    """The opposite, for a GPT-2."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": config.block_size,
        "n_ctx": config.block_size,
        "vocab_size": config.vocab_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        **dict.fromkeys(DROPOUTS, config.dropout),
        **FIXED,
    }


def from_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Our float32 state dict from that of transformers' GPT2LMHeadModel or GPT2Model.

    Raises ModelError naming the first tensor that is missing, of a wrong shape or unknown.
    """
    prefix = "transformer."
    state = {name if name.startswith(prefix) else prefix + name: x for name, x in state.items()}
    if config.n_layer > len(state):
        raise ModelError(f"config.json asks for {config.n_layer} layers, of {len(state)} tensors")
    shapes = {name: x.shape for name, x in skeleton(config).state_dict().items()}
    ours = {}
    for name, shape in shapes.items():
        if name not in state:
            raise ModelError(f"the tensor {name.removeprefix(prefix)} is missing")
        x, expected = whole(state.pop(name), name), list(shape)
        if name == "transformer.wte.weight":
            expected[0] = config.vocab_size
        if name.endswith(TRANSPOSED):
            expected.reverse()
        if list(x.shape) != expected:
            raise ModelError(
                f"the tensor {name.removeprefix(prefix)} is {tuple(x.shape)} where config.json "
                f"asks for {tuple(expected)}"
            )
        x = x.T.float() if name.endswith(TRANSPOSED) else x.float()
        padding = x.new_zeros(shape[0] - len(x), *shape[1:])  # of the vocabulary
        ours[name] = torch.cat([x, padding]).contiguous()
    head = state.pop("transformer.lm_head.weight", None)
    if head is not None and not torch.equal(
        whole(head, "lm_head.weight").float(),
        ours["transformer.wte.weight"][: config.vocab_size],
    ):
        raise ModelError("the tensor lm_head.weight is not wte.weight; the head here is tied to it")
    unknown = [n for n in state if not n.endswith((".attn.bias", ".attn.masked_bias"))]
    if unknown:
        raise ModelError(f"the tensor {unknown[0].removeprefix(prefix)} belongs to no GPT-2")
    return ours


def whole(x: Tensor, name: str) -> Tensor:
    """The same tensor; ModelError unless it is one of plain real numbers that are all there."""
    real = isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided
    if not real or x.is_nested or not x.is_cpu:
        raise ModelError(f"the tensor {name} is not one of plain real numbers")
    if x.numel() * x.element_size() > x.untyped_storage().nbytes():
        raise ModelError(f"the tensor {name} is larger than the numbers in the file")
    return x


def to_hf(state: dict[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """State dict of transformers' GPT2LMHeadModel from ours; the padding of the vocabulary goes."""
    theirs = {name: x.T if name.endswith(TRANSPOSED) else x for name, x in state.items()}
    theirs["transformer.wte.weight"] = theirs["transformer.wte.weight"][: config.vocab_size]
    return {name: x.detach().cpu().contiguous() for name, x in theirs.items()}


def find_folder(name: str) -> Path:
    """The folder `name`, or the hub repository of that name, downloaded if it is not yet."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "*.safetensors", "pytorch_model*.bin"]
    try:
        # the other frameworks' weights stay where they are; .bin only where nothing else is
        folder = Path(snapshot_download(name, allow_patterns=wanted[:2]))
        if not list(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # its errors are kinds of these
        raise ModelError(
            f"{name} is no folder, and could not be had from the Hugging Face hub "
            f"({type(error).__name__})"
        ) from error
    return folder


def read_config(folder: Path) -> GPTConfig:
    """The architecture that a folder's config.json describes; ModelError if it is no GPT-2."""
    try:
        return config_from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{folder} is not a GPT-2 that can be loaded: {error}") from error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder's .safetensors files, or else in its pytorch_model*.bin files."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError("it holds no .safetensors and no pytorch_model.bin")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            if file.suffix == ".safetensors":
                from safetensors.torch import load_file  # training does without

                state.update(load_file(file))
            else:
                state.update(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:  # a damaged pickle can ask torch for anything
            raise ModelError(f"{file.name} is damaged ({type(error).__name__})") from error
    return state


def load_pretrained(name: str | Path, block_size: int | None = None, dropout: float = 0.0) -> GPT:
    """The GPT-2 of a Hugging Face name ("gpt2", "gpt2-xl", "user/model") or folder.

    A smaller `block_size` keeps the first positions. Raises ModelError naming what does not fit.
    """
    folder = find_folder(str(name))
    config = read_config(folder)
    try:
        state = from_hf(read_weights(folder), config)
    except (OSError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{name} is not a GPT-2 that can be loaded: {reason}") from error
    if block_size is not None:
        if block_size > config.block_size:
            raise ModelError(f"{name} has {config.block_size} positions, fewer than {block_size}")
        wpe = "transformer.wpe.weight"
        state[wpe] = state[wpe][:block_size].contiguous()
    shape = (config.vocab_size, config.n_layer, config.n_head, config.n_embd)
    model = skeleton(GPTConfig(block_size or config.block_size, *shape, dropout=dropout))
    model.load_state_dict(state, assign=True)
    return model.requires_grad_()


def save_pretrained(model: GPT, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Writes config.json and model.safetensors, which transformers' AutoModelForCausalLM loads, and
    with a tokenizer the files that AutoTokenizer loads. Raises ModelError for a model that is
    neither a GPT-2 nor in the shape of a LLaMA."""
    folder, config = Path(folder), model.config
    if config.is_gpt2:
        values, weights = config_to_hf(config), to_hf(model.state_dict(), config)
    else:
        values, weights = llama.config_to_hf(config), llama.to_hf(model.state_dict(), config)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), config.vocab_size - 1)
    values |= {"dtype": "float32", **ends}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder, config.block_size)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, block_size: int) -> None:
    """Writes vocab.json and merges.txt, GPT-2's own format, from which AutoTokenizer works."""
    end = "<|endoftext|>"
    ranks = tokenizer.ranks()
    printable = byte_names()
    names = {token: "".join(printable[b] for b in token) for token in ranks}
    vocab = {names[token]: rank for token, rank in ranks.items()} | {end: tokenizer.eot}
    merges = [f"{names[a]} {names[b]}" for a, b in merges_of(ranks)]
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    text = "#version: 0.2\n" + "".join(merge + "\n" for merge in merges)
    (folder / "merges.txt").write_text(text, encoding="utf-8")
    values = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": block_size}
    specials = dict.fromkeys(("bos_token", "eos_token", "unk_token"), end)
    (folder / "tokenizer_config.json").write_text(json.dumps({**values, **specials}))


def byte_names() -> list[str]:
    """The printable character that GPT-2's vocab.json writes for each byte: itself where it is
    printable, else the next free one from U+0100 on."""
    kept = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(0x100, 0x200))
    return [chr(b if b in kept else next(free)) for b in range(256)]


def merges_of(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The byte pair merges, in order, that made a vocabulary: for each token the two that are left
    of it when all merges of lower rank are done."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
            i = min(range(len(pairs)), key=pairs.__getitem__)
            assert pairs[i] < rank, token
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]
