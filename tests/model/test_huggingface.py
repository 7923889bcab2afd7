import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import parse_recipe
from data.tokenizer import GPT2_IDS, check_vocabulary, load_tokenizer, save_tokenizer
from model.config import GPTConfig
from model.generate import Sampling, complete
from model.gpt import GPT
from model.huggingface import load_pretrained, save_pretrained
from utils.errors import UserError

transformers = pytest.importorskip("transformers")

SHAPES = [(1, 1, 8, 16, 300), (3, 5, 40, 33, 50257), (2, 4, 64, 128, 257)]  # L, H, C, T, V


def random_hf(shape, seed=0):
    L, H, C, T, V = shape
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=T, n_embd=C, n_layer=L, n_head=H)
    ).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    return model


def random_ours(shape):
    L, H, C, T, V = shape
    torch.manual_seed(1)
    model = GPT(GPTConfig(T, V, L, H, C)).eval()
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    return model


@torch.no_grad()
def differ(ours, theirs, shape):
    x = torch.randint(0, shape[4], (2, shape[3]))
    return (ours(x) - theirs(x).logits).abs().max().item()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers_both_ways(shape, tmp_path):
    theirs = random_hf(shape)
    theirs.save_pretrained(tmp_path / "theirs")
    assert differ(load_pretrained(tmp_path / "theirs").eval(), theirs, shape) < 1e-4
    ours = random_ours(shape)
    save_pretrained(ours, tmp_path / "ours")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    assert differ(ours, loaded, shape) < 1e-4


def test_the_full_124m_configuration_agrees_and_generates_the_same(tmp_path):
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path).eval()
    assert differ(ours, theirs, (12, 12, 768, 128, 50257)) < 1e-4
    save_pretrained(ours, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert differ(ours, back, (12, 12, 768, 128, 50257)) < 1e-4
    prompt = torch.randint(0, 50257, (1, 8))
    with torch.no_grad():
        expected = theirs.generate(
            prompt, max_new_tokens=50, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    (found,) = complete(ours, prompt.tolist(), -1, Sampling(50, temperature=0))
    assert found == expected[0, 8:].tolist() and len(found) == 50


def test_bin_files_and_bare_names_load_too(tmp_path):
    theirs = random_hf(SHAPES[2])
    theirs.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    state = theirs.transformer.state_dict()  # names without "transformer.", as OpenAI's on the hub
    state["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)  # the mask that old files carry
    for zipped in (True, False):  # and the format of before PyTorch 1.6
        path = tmp_path / "pytorch_model.bin"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
        assert differ(load_pretrained(tmp_path).eval(), theirs, SHAPES[2]) < 1e-4


def test_fewer_positions_and_dropout_for_fine_tuning(tmp_path):
    theirs = random_hf(SHAPES[2])
    theirs.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, block_size=20, dropout=0.1)
    assert model.config.block_size == 20 and model.config.dropout == 0.1
    assert all(p.requires_grad for p in model.parameters())
    assert differ(model.eval(), theirs, (2, 4, 64, 20, 257)) < 1e-4
    with pytest.raises(UserError, match="128 positions"):
        load_pretrained(tmp_path, block_size=200)


@pytest.mark.parametrize("recipe", ["gpt2", "modern", "llama"])
@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_auto_tokenizer_reads_what_we_write(name, recipe, tmp_path):
    try:
        tokenizer = load_tokenizer(name)
    except ValueError as error:
        pytest.skip(str(error))
    fields = parse_recipe(recipe).shape(16, tokenizer.vocab_size)
    model = GPT(GPTConfig(16, tokenizer.vocab_size, 1, 1, 8, **fields))
    save_pretrained(model, tmp_path)
    save_tokenizer(tokenizer, tmp_path, model.config.block_size)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Hello, I'm a language model,", " naïve  café\n\n\t— 中文 🙂 x=1;", "don't 12345"):
        assert theirs.encode(text) == tokenizer.encode(text).tolist()
        assert theirs.decode(theirs.encode(text)) == text
    assert theirs.eos_token_id == tokenizer.eot and len(theirs) == tokenizer.vocab_size


def test_folders_that_hold_no_such_gpt2_are_named(tmp_path):
    random_hf(SHAPES[2]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()

    def refused(message, **change):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=message):
            load_pretrained(tmp_path)

    refused("a model 'bert', not one of gpt2, llama, qwen3", model_type="bert")
    refused("lacks max_position_embeddings", model_type="llama")
    refused("activation_function 'gelu'", activation_function="gelu")
    refused("h.2.ln_1.weight is missing", n_layer=3)
    refused("wte.weight is", n_embd=32)
    refused("wpe.weight is", n_positions=64)
    refused("h.1.*belongs to no GPT-2", n_layer=1)
    refused("does not divide", n_head=5)
    weights.write_bytes(whole[:-100])
    refused("model.safetensors is damaged")
    weights.unlink()
    refused("no model.safetensors")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="cannot be loaded as GPT-2"):
        load_pretrained(tmp_path)


def test_files_are_those_that_transformers_reads(tmp_path):
    model = GPT(GPTConfig(16, 300, 2, 2, 32))
    save_pretrained(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: x * 0.5 for name, x in weights.items()}, tmp_path / "old_model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    assert torch.equal(load_pretrained(tmp_path).state_dict()[name], model.state_dict()[name])
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00002.safetensors")}
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00001-of-00002.safetensors is missing"):
        load_pretrained(tmp_path)
    weights["transformer.h.0.ln_1.weight"][3] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="ln_1.weight has values that are not finite"):
        load_pretrained(tmp_path)


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    ids = {f"t{i}": i for i in range(50_257)}
    check_vocabulary(tmp_path)  # nothing there says otherwise
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(UserError, match="vocab.json is another tokenizer than GPT-2's"):
        check_vocabulary(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(ids | GPT2_IDS))
    check_vocabulary(tmp_path)


def test_a_llama_without_an_epsilon_has_that_of_transformers(tmp_path):
    config = GPTConfig(16, 300, 2, 2, 32, **parse_recipe("llama").model)
    save_pretrained(GPT(config), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="rms_norm_eps 1e-06"):
        load_pretrained(tmp_path)
