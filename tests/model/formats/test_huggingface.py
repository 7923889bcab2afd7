import json
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from conftest import user_error
from edited import READERS, PostNorm, SoftCapped, WithGate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from data.export_tokenizer import save_tokenizer
from data.open_model import open_model
from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.formats.huggingface import load_pretrained, save_pretrained
from model.formats.huggingface_weights import config_from_hf, config_to_hf
from model.gpt import GPT
from recipes import parse_recipe
from utils.errors import UserError

transformers = pytest.importorskip("transformers")

SHAPE, UNEVEN_SHAPE = (2, 4, 64, 128, 257), (3, 5, 40, 33, 70_000)  # L, H, C, T, V
LLAMA = parse_recipe("llama").model
QWEN3 = LLAMA | {"qk_norm": True}


def random_ours(shape, **fields):
    L, H, C, T, V = shape
    model = GPT(GPTConfig(T, V, L, H, C, **fields))
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    return model.eval()


@torch.no_grad()
def differ(ours, theirs, shape):
    x = torch.randint(0, shape[4], (2, shape[3]))
    return (ours(x) - theirs(x).logits).abs().max().item()


@pytest.mark.parametrize(
    "shape, fields, name",
    [
        ((1, 1, 8, 16, 300), {}, "GPT2LMHeadModel"),
        (UNEVEN_SHAPE, {}, "GPT2LMHeadModel"),
        (SHAPE, {"tied": False}, "GPT2LMHeadModel"),
        # nanoGPT's
        (SHAPE, {"activation": "gelu_exact", "bias": False}, "GPT2LMHeadModel"),
        (SHAPE, LLAMA | {"norm_eps": 1e-3}, "LlamaForCausalLM"),
        (
            SHAPE,
            LLAMA | {"n_kv_head": 2, "n_inner": 96, "tied": True, "rope_base": 5e5},
            "LlamaForCausalLM",
        ),
        (SHAPE, QWEN3 | {"n_kv_head": 1}, "Qwen3ForCausalLM"),
    ],
)
def test_logits_and_weights_are_those_of_transformers_both_ways(shape, fields, name, tmp_path):
    ours = random_ours(shape, **fields)
    if fields:
        torch.nn.init.normal_(ours.transformer.wte.weight, std=0.003)  # where norm_eps counts
    save_pretrained(ours, tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == name and not any(loading.values())
    assert differ(ours, theirs.eval(), shape) < 1e-4
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")  # several files and an index
    again = load_pretrained(tmp_path / "theirs").eval()
    assert again.config == replace(ours.config, bias=name == "GPT2LMHeadModel")
    save_pretrained(again, tmp_path / "again")
    first, second = (load_file(x / "model.safetensors") for x in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


KINDS = {  # with fewer key/value heads, the tensors of one fused weight have different shapes
    "gpt2": {},
    "llama": LLAMA | {"n_kv_head": 2},
    "tied llama": LLAMA | {"tied": True},
    "qwen3": QWEN3,
}
GPT2_TABLE, LLAMA_TABLE = "transformer.wte.weight", "model.embed_tokens.weight"
BUFFERS = {
    "transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128).tril().bool(),
    "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (1e-4 ** (torch.arange(8) / 8)).bfloat16(),
}
NAMES = [  # under which a tensor is written
    *("{}", "_orig_mod.{}", "{}s", "lm_head.weight", *BUFFERS, "wte.weight", "h.0.ln_1.weight"),
    *("transformer.h.2.ln_1.weight", "model.layers.0.self_attn.k_proj.weight"),
]
CHANGES_OF_TENSOR = [
    *(torch.clone, torch.Tensor.half, torch.Tensor.int, lambda x: x[1:], lambda x: x + 1),
    *(lambda x, buffer=buffer: buffer.clone() for buffer in BUFFERS.values()),
]


@cache
def files_of(kind):
    """Return config.json and the tensors of a model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pretrained(random_ours(SHAPE, **KINDS[kind]), folder)
        config = (folder / "config.json").read_text()
        return config, load_file(folder / "model.safetensors")


def write_and_load(folder, config, tensors):
    Path(folder, "config.json").write_text(config)
    save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    return load_pretrained(folder).eval()


def load_from(config, tensors):
    """Write and load a model, and compare its logits with those of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        ours = write_and_load(folder, config, tensors)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    idx = torch.arange(128)[None]
    torch.testing.assert_close(ours(idx), theirs.eval()(idx).logits, atol=1e-4, rtol=0)


@settings(max_examples=80, deadline=None)
@example("gpt2", 27, "wte.weight", torch.clone, False)  # the one name without the prefix
@given(
    *(st.sampled_from(list(KINDS)), st.integers(0, 30)),
    *(st.sampled_from(NAMES), st.sampled_from(CHANGES_OF_TENSOR), st.booleans()),
)
def test_each_tensor_is_used_once_or_redundant_or_refused_by_name(kind, i, name, change, is_kept):
    config, tensors = files_of(kind)
    old_name = list(tensors)[i % len(tensors)]
    new_name = name.format(old_name)
    changed = tensors | {new_name: change(tensors[old_name].clone())}
    if not is_kept and new_name != old_name:
        del changed[old_name]
    try:
        load_from(config, changed)
    except UserError as error:
        assert old_name in str(error) or new_name in str(error)


@pytest.mark.parametrize("kind, table", [("gpt2", GPT2_TABLE), ("tied llama", LLAMA_TABLE)])
def test_copies_and_buffers_and_a_head_of_its_own_load(kind, table):
    config, tensors = files_of(kind)
    x = tensors[table]
    for name, buffer in BUFFERS.items():
        load_from(config, tensors | {name: buffer})
    load_from(config, {name.removeprefix("transformer."): x for name, x in tensors.items()})
    for head in (x.clone(), x + 1):
        load_from(config, tensors | {"lm_head.weight": head})
    headed = tensors | {"lm_head.weight": x}
    del headed[table]
    load_from(config, headed)  # as safetensors.torch.save_model writes it


@pytest.mark.parametrize("fields", [{}, LLAMA | {"tied": False}], ids=["gpt2", "llama"])
def test_tokens_that_the_tokenizer_lacks_are_never_sampled_or_scored(fields, tmp_path):
    padded = random_ours((1, 1, 8, 16, 330), **fields)
    save_pretrained(padded, tmp_path, eot=256)
    save_tokenizer(load_tokenizer("bytes"), tmp_path, 16)
    model, spec, _ = open_model(tmp_path, float32=True)
    assert spec == "bytes" and model.config.vocab_size == 257
    idx = torch.randint(0, 257, (2, 16))
    assert (model(idx) == padded(idx)[..., :257]).all()
    save_pretrained(random_ours((1, 1, 8, 16, 256), **fields), tmp_path, eot=256)
    with user_error("has 257 tokens, the model of .* 256"):
        open_model(tmp_path)


CHANGES = [  # of a GPT-2's config.json, or of a Qwen3's
    ("gpt2", {"model_type": "bert"}, "model_type 'bert'; only gpt2"),
    (
        "gpt2",
        {"activation_function": "relu"},
        "activation_function 'relu'; only gelu_new or gelu is",
    ),
    ("gpt2", {"n_embd": 33}, "n_embd 33 is no multiple of n_head 4"),
    ("gpt2", {"n_positions": 0}, "n_positions 0 must be at least 1"),
    ("gpt2", {"n_positions": None}, "config.json has no n_positions"),
    ("qwen3", {"hidden_size": 33}, "hidden_size 33 is no multiple of num_attention_heads 4"),
    ("qwen3", {"rms_norm_eps": -1}, "rms_norm_eps -1 must be at least 0"),
    ("gpt2", {"n_layer": 1}, "it has transformer.h.1.*, which this model lacks"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling {'rope_type': 'yarn'}"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window True"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
]


@pytest.mark.parametrize("kind, change, message", CHANGES)
def test_a_model_that_is_no_gpt_here_is_named(kind, change, message, tmp_path):
    config, tensors = files_of(kind)
    with user_error(f"is damaged or not a GPT-2, .*: .*{message}"):
        write_and_load(tmp_path, json.dumps(json.loads(config) | change), tensors)


def test_each_name_of_an_activation_is_that_function_or_refused():
    """By the functions of transformers, of which several have more than one name."""
    x = torch.linspace(-5, 5, 99)
    tanh = partial(F.gelu, approximate="tanh")
    for fields, hf_name, functions in (
        ({}, "activation_function", {"gelu": tanh, "gelu_exact": F.gelu}),
        (LLAMA, "hidden_act", {"swiglu": F.silu}),
    ):
        hf_config = config_to_hf(GPTConfig(**fields))
        for name in (
            "gelu_python",
            "gelu_pytorch_tanh",
            "gelu_fast",
            "swish",
            "quick_gelu",
            "mish",
        ):
            theirs = transformers.activations.ACT2FN[name](x)
            same = [
                ours for ours, f in functions.items() if torch.allclose(f(x), theirs, atol=1e-5)
            ]
            if same:
                assert [config_from_hf(hf_config | {hf_name: name}).activation] == same
            else:
                with pytest.raises(ValueError, match=f"{hf_name} '{name}'; only"):
                    config_from_hf(hf_config | {hf_name: name})


def test_the_files_are_those_that_transformers_reads(tmp_path):
    ours = random_ours(SHAPE)
    save_pretrained(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    single = tmp_path / "model.safetensors"
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    torch.nn.init.zeros_(ours.transformer.wpe.weight)
    save_pretrained(ours, tmp_path)  # beside those files
    assert (load_pretrained(tmp_path).transformer.wpe.weight == 0).all()
    single.write_bytes(single.read_bytes()[:-100])
    with user_error("is damaged or not a GPT-2, .*: .*SafetensorError"):
        load_pretrained(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with user_error(
        "is damaged or not a GPT-2, .*: .*it has no model-00001"
    ):  # which the index names
        load_pretrained(tmp_path)


LOGITS_DIFFER = "is not the (GPT2LMHeadModel|Qwen3ForCausalLM) of .*: its logits differ"
WITHOUT_PLACE = "no other program has a place for .*h.0.gate.weight, .*h.0.gate.bias"


@pytest.mark.parametrize(
    "model_class, fields, message",
    [
        (
            GPT,
            LLAMA | {"norm": "layer", "bias": True},
            "position=rotary, activation=swiglu: export one of",
        ),
        (GPT, {"qk_norm": True}, "class to export a model with qk_norm=True: export one of"),
        (WithGate, {}, WITHOUT_PLACE),
        (WithGate, QWEN3, WITHOUT_PLACE),
        *((x, {}, LOGITS_DIFFER) for x in (SoftCapped, PostNorm, *READERS)),
        *((x, QWEN3, LOGITS_DIFFER) for x in (SoftCapped, PostNorm, *READERS)),
    ],
)
def test_a_model_that_no_other_program_computes_is_not_written(
    model_class, fields, message, tmp_path
):
    model = model_class(random_ours(SHAPE, **fields).config)
    with user_error(message):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_change_of_one_object_shows_in_its_logits(tmp_path):
    model = random_ours(SHAPE)
    activate = model.transformer.h[1].mlp.activate
    model.transformer.h[1].mlp.activate = lambda x: 2 * activate(x)
    with user_error("logits differ, and nothing was written"):
        save_pretrained(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_name_that_is_not_in_the_cache_is_a_sentence_without_network(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with user_error("someone/model is no folder.* the name and the network$"):
        GPT.from_pretrained("someone/model")
