"""Files are written here in the layouts of nanoGPT (train.py), build-nanogpt and llm.c
(train_gpt2.py). Files of these scripts themselves were opened once, with equal logits."""

import pickle
import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import bad, losses, script, train_args, user_error
from transformers import AutoTokenizer

import __main__
from convert import ConvertOptions, main, to_nanogpt
from data.open_model import open_model
from data.tokenizer import load_tokenizer
from model.config import NOT_IN_RECIPES, GPTConfig
from model.formats.huggingface import load_pretrained
from model.formats.nanogpt import load_nanogpt
from model.gpt import GPT

LLM_C_KINDS = "ln_1 attn.c_attn attn.c_proj ln_2 mlp.c_fc mlp.c_proj".split()
EXACT = {"activation": "gelu_exact"}


@torch.no_grad()
def random_gpt(vocab_size=257, **fields):
    model = GPT(GPTConfig(32, vocab_size, 2, 2, 8, **fields)).eval()
    for p in model.parameters():
        p.copy_(p.normal_().bfloat16())  # which all layouts hold exactly
    return model


def write(layout, model, path):
    if "llm.c" in layout:
        return path.write_bytes(llm_c_file(model, is_bfloat16="bfloat16" in layout))
    weights = model.state_dict()
    head = weights.pop("lm_head.weight", None)
    if head is not None:  # to_nanogpt refuses it: nanoGPT itself would tie it
        model = GPT(replace(model.config, tied=True))
        model.load_state_dict(weights)
    checkpoint = to_nanogpt(model)  # nanoGPT's sample.py has read one, too
    if head is not None:
        checkpoint["model"]["lm_head.weight"] = head[: model.config.vocab_size]
    if "compiled" in layout:
        checkpoint["model"] = {f"_orig_mod.{name}": x for name, x in checkpoint["model"].items()}
    if "build" in layout:
        __main__.GPTConfig = type("GPTConfig", (), {"__module__": "__main__"})
        checkpoint["config"] = __main__.GPTConfig()
        args = checkpoint.pop("model_args")
        vars(checkpoint["config"]).update(
            {name: args[name] for name in NOT_IN_RECIPES if name != "dropout"}
        )
    torch.save(checkpoint, path)


def llm_c_file(model, is_bfloat16):
    names = ["wte.weight", "wpe.weight"]
    for kind in LLM_C_KINDS:
        names += [f"h.{i}.{kind}.{suffix}" for suffix in ("weight", "bias") for i in (0, 1)]
    names += ["ln_f.weight", "ln_f.bias"]
    x = torch.cat([model.transformer.get_parameter(name).flatten() for name in names]).detach()
    config = model.config
    header = np.zeros(256, np.int32)
    header[:8] = 20240326, 3, 32, config.vocab_size, 2, 2, 8, config.padded_vocab_size
    if is_bfloat16:
        header[1] = 5
        x = x.bfloat16().view(torch.int16)
    return header.tobytes() + x.numpy().tobytes()


@pytest.mark.parametrize(
    "layout, fields",
    [
        ("nanoGPT", EXACT | {"vocab_size": 65}),
        ("nanoGPT compiled", EXACT | {"bias": False}),
        ("nanoGPT compiled", EXACT | {"tied": False}),
        ("build-nanogpt", {}),
        ("llm.c", {"vocab_size": 50_257}),
        ("llm.c bfloat16", {}),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_the_weights_in_the_file(layout, fields, tmp_path):
    written = random_gpt(**fields)
    V = written.config.vocab_size
    write(layout, written, tmp_path / "file")
    idx = torch.randint(0, V, (2, 32))
    assert load_nanogpt(tmp_path / "file").eval()(idx).equal(written(idx))
    if "llm.c" in layout:  # by its header, the rows of padding are no tokens
        model, tokenizer, _ = open_model(tmp_path / "file")
        assert (tokenizer, model.config.vocab_size) == ({50_257: "gpt2", 257: "bytes"}[V], V)


@pytest.mark.parametrize("options", [{}, {"dataset": None}, {"dataset": ["a"]}, "a text"])
def test_a_checkpoint_of_a_fork_need_not_name_a_data_set(tmp_path, options):
    write("nanoGPT", random_gpt(**EXACT), tmp_path / "ckpt.pt")
    torch.save(torch.load(tmp_path / "ckpt.pt") | {"config": options}, tmp_path / "ckpt.pt")
    _, tokenizer, _ = open_model(tmp_path / "ckpt.pt")
    assert tokenizer == "bytes"


def test_scripts_begin_from_a_checkpoint_of_nanogpt_and_write_one(shards, tmp_path):
    ckpt, own, back = (tmp_path / name for name in ("ckpt.pt", "own.pt", "back.pt"))
    write("nanoGPT", random_gpt(bias=False, **EXACT), ckpt)
    assert "Abc" in script("sample.py", "--model", ckpt, "--prompt", "Abc").stdout
    main(ConvertOptions(own, model=str(ckpt)))
    sampled = script("sample.py", "--checkpoint", tmp_path, "--prompt", "Abc")
    assert f"reading {own}" in sampled.stderr  # ckpt.pt is none of ours
    main(ConvertOptions(tmp_path / "hf", own))
    idx = torch.randint(0, 257, (2, 32))
    logits = load_nanogpt(ckpt).eval()(idx)
    torch.testing.assert_close(
        load_pretrained(tmp_path / "hf").eval()(idx), logits, rtol=0, atol=1e-5
    )
    theirs = torch.load(ckpt)
    for given in ({"checkpoint": own}, {"model": str(ckpt)}):
        main(ConvertOptions(back, **given, format="nanogpt"))
        ours = torch.load(back)
        back.unlink()
        assert ours["model_args"] == theirs["model_args"]
        torch.testing.assert_close(dict(ours["model"]), theirs["model"], rtol=0, atol=0)
    recipe = ["--n_embd", 8, "--recipe", "gpt2,bias=False,activation=gelu_exact"]
    script(*train_args(shards, tmp_path, 2, "--init_from", ckpt, *recipe))
    assert len(losses(tmp_path)) == 2


def character_model(folder):
    """Write nanoGPT's files of a character-level data set; return the model and the characters."""
    characters = random.Random(1).sample("\n !$azQ09é天🙂\u0301", 13)
    ids = {character: i for i, character in enumerate(characters)}
    torch.manual_seed(1)
    model = random_gpt(len(ids), bias=False, **EXACT)
    ckpt, meta = folder / "out/ckpt.pt", folder / "data/characters/meta.pkl"
    for path in (ckpt, meta):
        path.parent.mkdir(parents=True)
    write("nanoGPT", model, ckpt)
    torch.save(torch.load(ckpt) | {"config": {"dataset": "characters"}}, ckpt)
    meta.write_bytes(pickle.dumps({"vocab_size": len(ids), "stoi": ids, "itos": characters}))
    return model, characters


@torch.no_grad()
def test_characters_of_nanogpt_come_from_its_meta_pkl(tmp_path):
    trained, characters = character_model(tmp_path)
    ckpt, own, hf = tmp_path / "out/ckpt.pt", tmp_path / "own.pt", tmp_path / "hf"
    prompt = "a é🙂\n"
    ids = [characters.index(character) for character in prompt]
    for _ in range(32 - len(ids)):  # as nanoGPT's `generate`: nothing stands before a prompt
        ids.append(int(trained(torch.tensor([ids]))[0, -1].argmax()))
    text = "".join(characters[i] for i in ids)
    assert len(set(text[len(prompt) :])) > 1  # not one character again and again
    main(ConvertOptions(own, model=str(ckpt)))
    main(ConvertOptions(hf, own))
    greedy = ["--temperature", 0, "--dtype", "float32", "--max_new_tokens", 32 - len(prompt)]
    for model in (ckpt, hf):
        sampled = script("sample.py", "--model", model, "--prompt", prompt, *greedy)
        assert sampled.stdout == f"{text}\n"
    bad(
        ["sample.py", "--model", ckpt, "--prompt", "axb"],
        "characters that the model's vocabulary lacks",
    )

    # in the tokenizers of the checkpoint, of our own one, of the export and of its tokenizer.json
    shutil.copy(hf / "tokenizer.json", ckpt.parent)
    tokenizers = [load_tokenizer(open_model(path)[1]) for path in (ckpt, own, hf)]
    (tmp_path / "data/characters/meta.pkl").unlink()
    for layout in ("llm.c", "build-nanogpt", "nanoGPT"):  # a tokenizer.json beside any file
        write(layout, random_gpt(len(characters)), ckpt)
        tokenizers.append(load_tokenizer(open_model(ckpt)[1]))
    theirs = AutoTokenizer.from_pretrained(hf)
    assert len({tokenizer.identity for tokenizer in tokenizers}) == 1
    for seed in range(100):
        text = "".join(random.Random(seed).choices(characters, k=seed))
        ids = [characters.index(character) for character in text]
        assert theirs(text).input_ids == ids and theirs.decode(ids) == text
        for tokenizer in tokenizers:
            assert tokenizer.encode(text).tolist() == ids
            assert tokenizer.decode_bytes(ids).decode() == text
    # a line break separates documents, and ends no text
    assert tokenizer.start_ids == (characters.index("\n"),) and not tokenizer.end_ids


def test_a_meta_pkl_that_cannot_be_used_is_a_sentence(tmp_path):
    character_model(tmp_path)
    ckpt, meta = tmp_path / "out/ckpt.pt", tmp_path / "data/characters/meta.pkl"
    ids = pickle.loads(meta.read_bytes())["stoi"]
    damaged = "meta.pkl is damaged or not a tokenizer that can be used: "
    for content, message in (
        ({"stoi": ids, "itos": Path("x")}, f"{damaged}it holds a pathlib.*Path, not only dicts"),
        ({"stoi": np.zeros(len(ids))}, f"{damaged}it holds a numpy"),
        ({"itos": {}}, f"{damaged}KeyError: 'stoi'"),
        ({"stoi": ids | {"x": len(ids)}}, "has 14 tokens, the model of .*ckpt.pt 13"),
        ({"stoi": {"a": 0, "b": 1}}, "meta.pkl has 2 tokens, the model of .*ckpt.pt 13"),
    ):
        meta.write_bytes(pickle.dumps(content))
        with user_error(message):
            open_model(ckpt)
    meta.unlink()
    with user_error("13 tokens, which are neither .* nanoGPT's meta.pkl, beside the weights"):
        open_model(ckpt)


def test_what_does_not_fit_is_a_sentence(tmp_path):
    path = tmp_path / "file"
    write("nanoGPT", random_gpt(65), path)
    with user_error("65 tokens, which are neither GPT-2's"):
        open_model(path)
    with user_error("differs from GPT-2 in norm, activation"):
        to_nanogpt(random_gpt(norm="rms", activation="relu2"))
    whole = llm_c_file(random_gpt(), is_bfloat16=False)
    for content, message in (
        (b"hello", "not a checkpoint of this project, nanoGPT, build-nanogpt"),
        (whole + bytes(8), "2 values more"),
        (whole[:-8], "is damaged.* invalid for input of size 6"),
    ):
        path.write_bytes(content)
        with user_error(message):
            open_model(path)
