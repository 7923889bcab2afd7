import os
import shutil

import pytest
from conftest import bad, script

import sample as sample_py
from data.tokenizer import load_tokenizer
from utils.errors import UserError


def sample(trained, *extra, **options):
    path = trained / "checkpoints" / "model_best.pt"
    return script("sample.py", "--checkpoint", path, "--max_new_tokens", 60, *extra, **options)


def test_the_same_seed_gives_the_same_text_and_another_another(trained):
    two = ["--prompt", "Abc", "--num_samples", 2]
    one = sample(trained, *two, "--seed", 3).stdout
    assert one != sample(trained, *two, "--seed", 4).stdout
    assert one.startswith("Abc") and one.count("Abc") == 2
    assert one.startswith(sample(trained, "--prompt", "Abc", "--seed", 3).stdout.rstrip("\n"))


def test_a_prompt_comes_from_standard_input(trained):
    greedy = ["--temperature", 0, "--prompt"]
    given = sample(trained, *greedy, "naïve").stdout
    assert sample(trained, *greedy, "-", input="naïve").stdout == given


def test_a_conversation_goes_on_until_quit(trained):
    lines = ["Abc", "", "x" * 40, "/new", "Abc", "/quit", "Abc"]
    out = sample(trained, "--chat", "--seed", 3, input="\n".join(lines)).stdout
    assert "the prompt has 58 tokens; this model reads at most 32" in out
    answers = [sample(trained, "--chat", "--prompt", "Abc", "--seed", i).stdout for i in (3, 4, 5)]
    assert [answer in out for answer in answers] == [True, True, False]


def test_the_text_begins_and_ends_where_the_model_s_does():
    tokenizer = load_tokenizer("bytes")
    text = sample_py.GeneratedText(tokenizer, is_answer=True)
    pieces = [text.append(token) for token in (*"  é ".encode(), tokenizer.eot, ord("x"))]
    assert pieces == ["", " ", "", "é", " ", "", ""]
    assert (text.content, text.has_ended) == (" é ", True)


def test_mistakes_are_sentences(trained, tmp_path):
    best = ["sample.py", "--checkpoint", trained / "checkpoints/model_best.pt"]
    for extra, message in (
        (["--prompt", "x" * 32], "the prompt has 33 tokens; this model reads at most 32"),
        (["--checkpoint", tmp_path / "none.pt"], "none.pt: No such file"),
    ):
        bad([*best, *extra], message)


def test_float32_samples_use_the_whole_weights_and_bfloat16_ones_their_half(monkeypatch):
    asked = []

    def open_model(name, float32):
        asked.append(float32)
        raise UserError

    monkeypatch.setattr(sample_py, "open_model", open_model)
    for dtype in ("float32", "float16", "bfloat16"):
        with pytest.raises(UserError):
            sample_py.main(sample_py.SampleConfig(dtype=dtype, device="cpu"))
    assert asked == [True, True, False]


def test_without_a_path_the_best_else_the_newest_is_taken_and_named(trained, tmp_path):
    folder = tmp_path / "checkpoints"
    options = ["--max_new_tokens", 2]
    folder.mkdir()
    bad(["sample.py", "--checkpoint", folder, *options], f"{folder} holds no checkpoint")
    for name in ("model_last.pt", "model_best.pt"):  # the best is preferred once it is there
        shutil.copy(trained / "checkpoints" / name, folder / name)
        for path in (folder, tmp_path):  # a run's folder, too
            done = script("sample.py", "--checkpoint", path, *options)
            assert f"reading {folder / name}" in done.stderr
    done = script(sample_py.__file__, *options, cwd=tmp_path)
    assert "reading checkpoints/model_best.pt" in done.stderr


def test_the_reader_of_a_long_text_may_leave(trained):
    def close_stdout():
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)

    assert sample(trained, code=128 + 13, preexec_fn=close_stdout).stderr == ""
