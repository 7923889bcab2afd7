import json
import re

import hub
import pytest
import torch
from conftest import (
    bad,
    environment,
    losses,
    script,
    train_args,
    user_error,
    weights,
    without,
)
from edited import SoftCapped, WithGate
from tokenizers import processors

from convert import ConvertOptions, main, to_nanogpt
from data.export_tokenizer import to_backend
from data.tokenizer import load_tokenizer, read_tokenizer_spec
from model.config import GPTConfig
from model.formats.checkpoint import join_float32, load_checkpoint, load_model
from model.formats.huggingface import load_pretrained
from model.gpt import GPT


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf") / "out"
    script("convert.py", "--checkpoint", trained / "checkpoints" / "model_last.pt", "--out", folder)
    return folder


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
def test_each_kind_of_model_goes_out_and_comes_back_with_every_bit(shards, tmp_path, recipe):
    run, hf, back = tmp_path / "run", tmp_path / "hf", tmp_path / "back.pt"
    script(*train_args(shards, run, 5, "--recipe", recipe))
    last = run / "checkpoints" / "model_last.pt"
    main(ConvertOptions(hf, last))
    main(ConvertOptions(back, model=str(hf)))
    main(ConvertOptions(tmp_path / "own.pt", model=str(run)))  # a checkpoint of ours, too
    assert load_checkpoint(tmp_path / "own.pt")["checksums"] == {
        **load_checkpoint(last)["checksums"],
        "optimizer": 0,
    }
    before, after = weights(run), load_checkpoint(back)
    assert after["tokenizer"] == "bytes" and after["script"] == "convert.py"
    assert after["model_config"] == load_checkpoint(last)["model_config"]
    for name, x in before.items():
        num_rows = 257 if name.endswith(("wte.weight", "lm_head.weight")) else None  # no padding
        found = join_float32(after["model"][name], after["model_low"][name])
        assert torch.equal(found[:num_rows], x[:num_rows])
    idx = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = load_model(last, float32=True)[0](idx)
        torch.testing.assert_close(load_pretrained(hf).eval()(idx), expected)
    tuned = tmp_path / "tuned"
    args = train_args(shards, tuned, 3, "--init_from", back, "--max_lr", 1e-4)
    args = without(args, "--n_layer", "--n_head", "--n_embd")  # those of the source
    script(*args)
    first = losses(tuned)[1]
    assert first < losses(run)[1] - 0.05 and abs(first - losses(run)[5]) < 0.3


def test_a_converted_checkpoint_is_no_run(shards, exported, tmp_path):
    path = tmp_path / "checkpoints" / "model_last.pt"
    main(ConvertOptions(path, model=str(exported)))
    args = train_args(shards, tmp_path, 3)
    bad([*args, "--resume", "auto"], f"convert.py: begin from it with --init_from {path}", tmp_path)
    bad(args, "holds the checkpoints of another run", tmp_path)
    # exported again, its card names the model that was imported
    main(ConvertOptions(tmp_path / "hf", path))
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| trained by | convert.py, not recorded |" in card and "| began from | out |" in card


@pytest.mark.parametrize(
    "is_chat, init_from",
    [
        (False, None),
        (True, "/home/me/base/checkpoints/model_last.pt"),
        (True, "../base/checkpoints"),
    ],
)
def test_the_example_of_a_model_card_runs(trained, tmp_path, is_chat, init_from):
    checkpoint = load_checkpoint(trained / "checkpoints" / "model_best.pt")
    checkpoint["corpus"] = "75 % of a, 25 % of c"
    lines = ["| trained by | train.py, gpt2 |", "| began from | random weights |"]
    lines.append("| data | 75 % of a, 25 % of c |")
    if is_chat:  # as finetune.py writes it
        checkpoint["corpus"] = None
        checkpoint["config"] |= {"method": "sft", "plain": False}
        checkpoint["working_dir"] = "/home/me/base"
        checkpoint["config"] |= {"init_from": init_from, "data": "/home/me/chat.jsonl"}
        lines = ["sft |", "| began from | base |", "| data | chat.jsonl |"]
        backend = to_backend(load_tokenizer("bytes"))  # with a BOS token
        backend.post_processor = processors.BertProcessing(("#", ord("#")), ("!", ord("!")))
        backend.save(str(tmp_path / "tokenizer.json"))
        checkpoint["tokenizer"] = read_tokenizer_spec(tmp_path / "tokenizer.json")
    torch.save(checkpoint, tmp_path / "model_best.pt")
    hf = tmp_path / "hf"
    main(ConvertOptions(out=hf, checkpoint=tmp_path / "model_best.pt"))
    bos = json.loads((hf / "config.json").read_text())["bos_token_id"]
    assert bos == (ord("!") if is_chat else 256)
    card = (hf / "README.md").read_text()
    assert all(line in card for line in lines) and "/home/me" not in card
    code = re.search("```python\n(.*?)```", card, re.DOTALL)[1]
    assert ("apply_chat_template" in code) == is_chat
    code = code.replace("USER/NAME", str(hf)).replace("max_new_tokens=50", "max_new_tokens=2")
    exec(code, {"print": lambda text: text.encode()})


def test_mistakes_are_sentences(shards, trained, exported, tmp_path):
    last = trained / "checkpoints" / "model_last.pt"
    out = tmp_path / "x.pt"
    for options, message in (
        (ConvertOptions(out), "give either --checkpoint"),
        (ConvertOptions(out, last, "gpt2"), "give either"),
        (ConvertOptions(exported, last), "exists already: choose another path, or --overwrite"),
        (ConvertOptions(out, tmp_path), "holds no checkpoint"),
        (ConvertOptions(out, exported), "is no checkpoint of this"),
        (ConvertOptions(tmp_path / "x", model=str(exported)), "must end in .pt"),
    ):
        with user_error(message):
            main(options)
    main(ConvertOptions(exported, last, overwrite=True))
    other = train_args(shards, tmp_path, 4, "--init_from", exported, "--n_layer", 3)
    for args, message in (
        (["convert.py", "--checkpoint", last, "--out", "/dev/null/x"], "/dev/null: File exists"),
        (["sample.py", "--model", tmp_path / "none"], "none"),
        (["train.py", "--dry_run", "--init_from", exported], "has a context of 32"),
        (other, "holds a model of another architecture: n_layer 2 (here 3)"),
    ):
        bad(args, message)
    assert not list(tmp_path.rglob("[a-z]*.*"))


def test_a_model_of_the_hub_is_downloaded_and_used(exported, tmp_path):
    files = {p.name: p.read_bytes() for p in exported.iterdir()} | {"flax_model.msgpack": b"no"}
    args = ["sample.py", "--prompt", "Abc", "--temperature", 0, "--max_new_tokens", 20]
    with hub.serve(files, "models/me/gpt") as (address, handler):
        env = {**environment(), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
        env["HF_HOME"] = str(tmp_path)
        out = script(*args, "--model", "me/gpt", env=env).stdout
        assert out == script(*args, "--model", exported).stdout
        assert not any("msgpack" in path for path in handler.asked)
        done = script(*args, "--model", "me/other", env=env, code=2)
        assert "me/other" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "model_class, message", [(SoftCapped, "logits differ"), (WithGate, "h.0.gate.weight")]
)
def test_nanogpt_gets_no_edited_model(model_class, message):
    config = GPTConfig(64, 257, n_layer=1, n_head=2, n_embd=32)
    assert to_nanogpt(GPT(config))["model_args"]["n_embd"] == 32
    with user_error(message):
        to_nanogpt(model_class(config))
