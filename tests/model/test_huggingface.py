import json
from dataclasses import replace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from data.export_tokenizer import save_tokenizer
from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.gpt import GPT, rebuild
from model.huggingface import load_pretrained, save_pretrained
from model.recipes import parse_recipe
from training.checkpoint import open_model
from utils.errors import UserError

transformers = pytest.importorskip("transformers")

SHAPES = [(1, 1, 8, 16, 300), (3, 5, 40, 33, 70_000), (2, 4, 64, 128, 257)]  # L, H, C, T, V
LLAMA = parse_recipe("llama").model
QWEN3 = LLAMA | {"qk_norm": True}


def random_hf(shape):
    L, H, C, T, V = shape
    config = transformers.GPT2Config(vocab_size=V, n_positions=T, n_embd=C, n_layer=L, n_head=H)
    return randomised(transformers.GPT2LMHeadModel(config))


def random_ours(shape, **fields):
    L, H, C, T, V = shape
    return randomised(GPT(GPTConfig(T, V, L, H, C, **fields)))


def randomised(model):
    torch.manual_seed(0)
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    return model.eval()


@torch.no_grad()
def differ(ours, theirs, shape):
    x = torch.randint(0, shape[4], (2, shape[3]))
    return (ours(x) - theirs(x).logits).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers_both_ways(shape, tmp_path):
    theirs = random_hf(shape)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_pretrained(tmp_path / "theirs").eval()
    assert differ(again, theirs, shape) < 1e-4
    shorter = rebuild(again, replace(again.config, block_size=10)).eval()  # for fine-tuning
    assert differ(shorter, theirs, (*shape[:3], 10, shape[4])) < 1e-4
    ours = random_ours(shape)
    save_pretrained(ours, tmp_path / "ours")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    assert differ(ours, loaded, shape) < 1e-4


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"norm_eps": 1e-3}, "LlamaForCausalLM"),
        ({"n_kv_head": 2, "n_inner": 96, "tied": True, "rope_base": 5e5}, "LlamaForCausalLM"),
        ({"qk_norm": True, "n_kv_head": 1}, "Qwen3ForCausalLM"),
    ],
)
def test_llama_and_qwen3_are_those_of_transformers_both_ways(fields, name, tmp_path):
    shape = SHAPES[2]
    ours = random_ours(shape, **LLAMA | fields)
    torch.nn.init.normal_(ours.transformer.wte.weight, std=0.003)  # where a norm's epsilon counts
    save_pretrained(ours, tmp_path)
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert type(theirs).__name__ == name and not any(loading.values())
    assert differ(ours, theirs.eval(), shape) < 1e-4
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")  # several files and an index
    again = load_pretrained(tmp_path / "theirs")
    assert again.config == ours.config
    save_pretrained(again, tmp_path / "again")
    state, back = (load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again"))
    assert state.keys() == back.keys() and all(torch.equal(state[k], back[k]) for k in state)


def test_bare_names_load_too(tmp_path):
    theirs = random_hf(SHAPES[2])
    theirs.save_pretrained(tmp_path)
    state = theirs.transformer.state_dict()  # names without "transformer.", as OpenAI's on the hub
    state["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)  # the mask that old files carry
    save_file(state, tmp_path / "model.safetensors")
    assert differ(load_pretrained(tmp_path).eval(), theirs, SHAPES[2]) < 1e-4


@pytest.mark.parametrize(("name", "recipe"), [("gpt2", "llama"), ("bytes", "gpt2")])
def test_auto_tokenizer_reads_what_we_write(name, recipe, tmp_path):
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        pytest.skip(str(error))
    model = random_ours((1, 1, 8, 16, tokenizer.vocab_size), **parse_recipe(recipe).model)
    save_pretrained(model, tmp_path)
    save_tokenizer(tokenizer, tmp_path, model.config.block_size)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, I'm a language model,", " naïve  café\n\n\t— 中文 🙂 x=1;", "don't 12345"):
        assert theirs.encode(text) == tokenizer.encode(text).tolist()
        assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eot and len(theirs) == tokenizer.vocab_size


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
    with pytest.raises(UserError, match="has a tokenizer of 257 tokens, its model only 256"):
        open_model(tmp_path)


CHANGES = [  # of a GPT-2's config.json, or of a Qwen3's
    ({}, {"model_type": "bert"}, "model_type 'bert'; only gpt2"),
    ({}, {"activation_function": "gelu"}, "activation_function 'gelu'; only gelu_new"),
    ({}, {"n_layer": 3}, "KeyError: 'transformer.h.2"),
    ({}, {"n_positions": 64}, "size mismatch for transformer.wpe"),
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (QWEN3, {"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling {'rope_type': 'yarn'}"),
    (QWEN3, {"use_sliding_window": True}, "use_sliding_window True"),
    (QWEN3, {"attention_bias": True}, "attention_bias True"),
    (QWEN3, {"model_type": "llama"}, "_norm.weight is not supported"),
]


@pytest.mark.parametrize(("fields", "change", "message"), CHANGES)
def test_a_model_that_is_no_gpt_here_is_named(fields, change, message, tmp_path):
    save_pretrained(random_ours(SHAPES[2], **fields), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"is damaged or not a GPT-2, .*: .*{message}"):
        load_pretrained(tmp_path)


def test_damaged_weights_are_named(tmp_path):
    save_pretrained(random_ours(SHAPES[2], **QWEN3), tmp_path)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    state["model.layers.0.self_attn.k_norm.weight"][3] = 2
    save_file(state, weights)
    damages = {
        "k_norm.weight is not supported": lambda: None,
        "SafetensorError": lambda: weights.write_bytes(weights.read_bytes()[:-100]),
        "no model.safetensors": weights.unlink,
    }
    for message, damage in damages.items():
        damage()
        with pytest.raises(UserError, match=f"is damaged or not a GPT-2, .*: .*{message}"):
            load_pretrained(tmp_path)


def test_a_model_that_transformers_has_no_class_for_is_named(tmp_path):
    for fields, message in (
        (LLAMA | {"norm": "layer", "bias": True}, "no LLaMA with norm=layer, bias=True"),
        ({"tied": False}, "no LLaMA with position=learned"),
    ):
        with pytest.raises(UserError, match=message):
            save_pretrained(random_ours(SHAPES[2], **fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hub_that_is_not_reached_is_no_wrong_name(monkeypatch):
    errors = huggingface_hub.errors
    for error, message in (
        (errors.LocalEntryNotFoundError("not cached"), "there is no network"),
        (errors.HFValidationError("no name"), "check the name"),
    ):

        def snapshot_download(*_, error=error, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        with pytest.raises(UserError, match=f"someone/model is no folder.* {message}"):
            load_pretrained("someone/model")
