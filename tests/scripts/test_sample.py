import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, environment, kill, run_until, script, start, train_args, weights

import sample as sample_py
from config import SamplingConfig
from utils.devices import pick_dtype


def sample(trained, *extra, **options):
    path = trained / "checkpoints" / "model_best.pt"
    return script("sample.py", "--checkpoint", path, "--max_new_tokens", 60, *extra, **options)


def test_the_same_seed_gives_the_same_text_and_another_another(trained):
    one = sample(trained, "--prompt", "Abc", "--num_samples", 2, "--seed", 3).stdout
    assert one == sample(trained, "--prompt", "Abc", "--num_samples", 2, "--seed", 3).stdout
    assert one != sample(trained, "--prompt", "Abc", "--num_samples", 2, "--seed", 4).stdout
    assert one.startswith("Abc") and one.count("Abc") == 2
    first = sample(trained, "--prompt", "Abc", "--seed", 3).stdout
    assert one.startswith(first.rstrip("\n"))


def test_prompts_come_from_files_and_standard_input(trained, tmp_path):
    (tmp_path / "prompt.txt").write_text("naïve", "utf-8-sig")  # its mark is no text
    given = sample(trained, "--prompt", "naïve", "--temperature", 0).stdout
    assert (
        sample(trained, "--prompt", f"@{tmp_path}/prompt.txt", "--temperature", 0).stdout == given
    )
    assert sample(trained, "--prompt", "-", "--temperature", 0, input="naïve").stdout == given


def test_json_is_a_line_for_each_sample(trained):
    options = ["--prompt", "Abc", "--num_samples", 2, "--seed", 3]
    rows = [json.loads(line) for line in sample(trained, *options, "--json").stdout.splitlines()]
    assert [row["sample"] for row in rows] == [0, 1] and all(r["prompt"] == "Abc" for r in rows)
    assert sample(trained, *options).stdout.startswith("Abc" + rows[0]["text"])
    assert all(r["tokens"] == 60 or r["finish"] == "end of text" for r in rows)


def test_a_conversation_streams_and_changes_settings(trained):
    lines = ["/", "Abc", "/temperature 0", "/max_new_tokens 5", "Abc", "Abc", "/top_k none"]
    lines += ["/top_p 7", "/tempo 1", "/seed x", "x" * 40, "/quit", "never"]
    out = sample(trained, "--interactive", "--seed", 3, input="\n".join(lines)).stdout
    assert "/temperature 0.8" in out and "/top_k none" in out
    first = sample(trained, "--prompt", "Abc", "--seed", 3).stdout
    assert first.strip() in out
    greedy = sample(trained, "--prompt", "Abc", "--temperature", 0).stdout[:8]
    assert out.count(greedy) == 2
    assert "> /top_p 7.0 must be" in out and "there is no /tempo" in out
    assert "not 'x'" in out and "40 tokens long" in out and "never" not in out


def test_a_prompt_that_is_no_text_is_a_sentence(trained):
    done = sample(trained, "--prompt", "-", code=2, input=b"\xff\xfe\xff", text=False)
    assert b"cannot be read as text" in done.stderr and b"Traceback" not in done.stderr


def test_a_standard_input_that_is_closed_is_a_sentence(trained):
    for flags in (["--prompt", "-"], ["--interactive"]):
        done = sample(trained, *flags, code=2, preexec_fn=lambda: os.close(0))
        assert done.stderr.startswith("error: --interactive and --prompt - read standard input,")


def test_bad_settings_are_sentences(trained, tmp_path):
    for extra, message in (
        (["--prompt", "x" * 33], "the prompt is 33 tokens long; this model reads at most 32"),
        (["--prompt", f"@{tmp_path}/none"], "cannot be read"),
        (["--top_p", 0], "--top_p 0.0 must be from 1e-09 to 1"),
        (["--top_k", 0], "--top_k 0 must be at least 1\n"),
        (["--temperature", -1], "--temperature"),
        (["--temperature", 1e-38], "--temperature 1e-38 must be at least 1e-06, or 0"),
        (["--temperature", "nan"], "--temperature"),
        (["--seed", 10**20], "--seed"),
        (["--prompt", b"caf\xe9"], "cannot be read as text"),
        (["--checkpoint", tmp_path / "none.pt"], "there is no checkpoint"),
        (["--interactive", "--json"], "leave out --prompt and --json"),
        (["--start", "x"], "there is no --start: --prompt is the text to continue"),
    ):
        done = sample(trained, *extra, code=2)
        assert message in done.stderr and "Traceback" not in done.stderr


def test_float32_samples_use_the_whole_weights_and_bfloat16_ones_their_half(
    trained, monkeypatch, capsys
):
    found = {}

    def generate(model, *_, **__):
        found.update({name: x.clone() for name, x in model.state_dict().items()})
        return iter(())

    monkeypatch.setattr(sample_py, "generate", generate)
    monkeypatch.setattr(sample_py.cpu, "for_inference", lambda *_: None)
    exact = weights(trained, "model_best.pt")
    for dtype in ("float32", "auto", "bfloat16"):
        path = trained / "checkpoints/model_best.pt"
        sample_py.main(SamplingConfig(checkpoint=path, dtype=dtype, device="cpu"))
        equal = [torch.equal(found[name], x) for name, x in exact.items()]
        used = pick_dtype(dtype, torch.device("cpu"))
        assert all(equal) if used is torch.float32 else not any(equal[:2])


def test_without_a_path_the_best_else_the_newest_is_taken_and_named(shards, trained, tmp_path):
    folder = tmp_path / "checkpoints"
    options = ["--max_new_tokens", 2]
    done = script("sample.py", "--checkpoint", folder, *options, code=2)
    assert f"there is no checkpoint {folder}" in done.stderr
    folder.mkdir()
    done = script("sample.py", "--checkpoint", folder, *options, code=2)
    assert f"{folder} holds no checkpoint" in done.stderr
    for name in ("model_last.pt", "model_best.pt"):  # the best is preferred once it is there
        shutil.copy(trained / "checkpoints" / name, folder / name)
        for path in (folder, tmp_path):  # a run's folder, too
            done = script("sample.py", "--checkpoint", path, *options)
            assert f"reading {folder / name}" in done.stderr
    done = script("evaluate.py", "--checkpoint", folder, "--tasks", "val", "--device", "cpu")
    assert f"reading {folder / 'model_best.pt'}" in done.stderr
    scores = json.loads((folder / "evaluation_model_best.json").read_text())  # beside it
    assert scores["model"] == str(folder / "model_best.pt")
    script("convert.py", "--checkpoint", folder, "--out", tmp_path / "hf")
    run = train_args(shards, tmp_path / "run", 21, "--resume", folder)
    assert "resumed at step 20" in script(*run).stdout  # the last, not the best


def test_a_run_stopped_before_its_first_best_can_be_sampled(shards, tmp_path):
    process = start(*train_args(shards, tmp_path, 3000, "--eval_every", 0, "--save_every", 2))
    run_until(process, lambda: (tmp_path / "checkpoints/model_last.pt").exists())
    kill(process)
    done = script("sample.py", "--checkpoint", tmp_path, "--max_new_tokens", 5)
    assert "model_last.pt" in done.stderr and len(done.stdout) > 1


def test_a_terminal_of_ascii_gets_replacements(trained):
    env = environment() | {"PYTHONIOENCODING": "ascii"}
    done = sample(trained, "--prompt", "naïve 中", env=env)
    assert done.stdout.startswith("na?ve ?") and done.stderr.count("Traceback") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="drives a pseudo-terminal")
def test_a_conversation_has_history_and_line_editing(trained):
    ours, theirs = pty.openpty()
    path = trained / "checkpoints" / "model_best.pt"
    command = [sys.executable, "sample.py", "--checkpoint", path, "--interactive"]
    env = environment() | {"TERM": "xterm"}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, cwd=ROOT, env=env, **streams)
    os.close(theirs)
    shown = b""

    def wait_for(text):
        nonlocal shown
        began = time.monotonic()
        while text not in shown:
            assert time.monotonic() - began < 30, shown
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 10_000)
        shown = shown[shown.index(text) + len(text) :]

    try:
        wait_for(b"> ")
        os.write(ours, b"/seed 12\n")
        wait_for(b"> ")
        os.write(ours, b"\x1b[A\x7f3\n/\n")  # the line before, with 3 for its last character
        wait_for(b"/seed 13")
        os.write(ours, b"/quit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(ours)
