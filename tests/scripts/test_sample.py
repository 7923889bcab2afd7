import codecs
import os
import random
import shutil

import pytest
import torch
from conftest import script, user_error

import sample as sample_py
from data.named_tokenizer import ByteTokenizer
from model.formats.checkpoint import find_checkpoint
from model.generate import cut_at_end
from utils.errors import UserError


def sample(trained, *extra, **options):
    path = trained / "checkpoints" / "model_best.pt"
    return script("sample.py", "--checkpoint", path, "--max_new_tokens", 60, *extra, **options)


def test_a_sample_is_that_of_its_seed_and_a_prompt_comes_from_standard_input(trained):
    """Another seed gives another text: see the conversation below."""
    seed = ["--seed", 10**30, "--prompt"]
    two = sample(trained, *seed, "naïve", "--num_samples", 2).stdout
    assert two.count("naïve") == 2
    assert two.startswith(sample(trained, *seed, "-", input="naïve").stdout.rstrip("\n"))


def test_a_conversation_goes_on_until_quit(trained, capsys):
    lines = [b"Abc", b"", b"x" * 40, b"caf\xe9", b"/new", b"Abc", b"/quit", b"Abc"]
    env = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as of most locales
    out = sample(trained, "--chat", "--seed", 3, input=b"\n".join(lines), env=env).stdout
    assert "the prompt is not UTF-8 text: 'caf" in out
    assert "the prompt has 58 tokens; this model reads at most 32" in out
    for seed in (3, 4, 5):
        options = {"prompt": "Abc", "seed": seed, "max_new_tokens": 60}
        sample_py.main(sample_py.SampleOptions(trained, chat=True, **options))
        answer = capsys.readouterr().out.replace("\r", "\n")  # as `script` reads it
        assert (answer in out) == (seed < 5)


class TemplateTokenizer(ByteTokenizer):
    chat_template = "a template of another project, which writes no space before an answer"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), TemplateTokenizer()])
@pytest.mark.parametrize("chat", [False, True])
def test_texts_are_shown_as_they_are_decoded_whole(monkeypatch, capsys, tokenizer, chat):
    """With bytes that are no UTF-8, ends of text, and characters that are cut."""
    rng = random.Random(0)
    options = sample_py.SampleOptions(num_samples=2, chat=chat)
    writer = sample_py.Writer(None, tokenizer, options)
    monkeypatch.setattr(writer, "prompt_ids", lambda *_: [0])
    for _ in range(200):
        completions = []
        for _ in range(2):
            ids = list("".join(rng.choices([*"  ab", "é", "天", "🐍", "\ufffd"], k=9)).encode())
            ids = [rng.choice([byte] * 9 + [0x80, 0xFF, tokenizer.eot]) for byte in ids[:9]]
            completions.append(ids)
        new_tokens = [torch.tensor(tokens) for tokens in zip(*completions, strict=True)]
        monkeypatch.setattr(sample_py, "generate", lambda *_, tokens=new_tokens: iter(tokens))
        expected = []
        for ids in completions:
            shown = bytes(cut_at_end(ids, tokenizer.end_ids).tokens)
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            text = decoder.decode(shown, final=chat)  # a text that goes on ends before a cut
            drops_space = chat and tokenizer.chat_template is None
            expected.append(text.removeprefix(" ") if drops_space else text)
        assert writer.print_answers("", [], 0) == expected[0]
        assert capsys.readouterr().out == f"{expected[0]}\n\n{'-' * 80}\n{expected[1]}\n"


def test_float32_samples_use_the_whole_weights_and_bfloat16_ones_their_half(monkeypatch):
    asked = []

    def open_model(name, float32):
        asked.append(float32)
        raise UserError

    monkeypatch.setattr(sample_py, "open_model", open_model)
    for dtype in ("float32", "float16", "bfloat16"):
        with pytest.raises(UserError):
            sample_py.main(sample_py.SampleOptions(dtype=dtype, device="cpu"))
    assert asked == [True, True, False]


def test_without_a_path_the_best_else_the_newest_is_taken_and_named(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    folder = sample_py.SampleOptions().checkpoint
    with pytest.raises(FileNotFoundError):  # a misspelt checkpoint is no name on the hub
        sample_py.open_model("none.pt")
    folder.mkdir()
    with user_error(f"{folder} holds no checkpoint and no model"):
        find_checkpoint(folder)
    shutil.copytree(trained, "runs/own")
    with user_error(f"{folder} holds no checkpoint, but runs/own, and no model"):
        find_checkpoint(folder)
    with user_error("there is no runs/owm in "):  # nor is it a name on the hub
        sample_py.open_model("runs/owm")
    for name in ("model_last.pt", "model_best.pt"):  # the best is preferred once it is there
        shutil.copy(trained / "checkpoints" / name, folder / name)
        for path in (folder, tmp_path):  # a run's folder, too
            assert find_checkpoint(path).name == name
    assert f"reading {folder}/model_last.pt, of step " in capsys.readouterr().err


def test_the_reader_of_a_long_text_may_leave(trained):
    def close_stdout():
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    assert sample(trained, code=128 + 13, preexec_fn=close_stdout).stderr == ""


def test_a_model_is_one_line_from_any_folder_and_writes_what_sample_py_writes(
    trained, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    model = sample_py.load(str(trained))
    for options in ({"seed": 3}, {"temperature": 0.5, "top_k": 9}):
        text = model.complete("Abc", max_new_tokens=60, **options)
        options = sample_py.SampleOptions(trained, prompt="Abc", max_new_tokens=60, **options)
        sample_py.main(options)
        assert capsys.readouterr().out == f"Abc{text}\n"
    with user_error("temperature -1 must be"):
        model.complete("Abc", temperature=-1)
    with user_error("^there is no docs/none in .*"):  # of the project, and not of the hub
        sample_py.load("docs/none")


def test_a_model_of_chats_without_chat_gets_a_note(trained, tmp_path, capsys):
    content = torch.load(trained / "checkpoints/model_best.pt", weights_only=True)
    for plain in (True, False):
        content["config"]["plain"] = plain
        torch.save(content, tmp_path / "a.pt")
        for chat in (True, False):
            options = sample_py.SampleOptions(tmp_path, prompt="A", chat=chat, max_new_tokens=1)
            sample_py.main(options)
            notes = capsys.readouterr().err
            assert ("has learned to chat: add --chat" in notes) == (not plain and not chat)
