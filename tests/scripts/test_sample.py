import json

from conftest import script


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
    (tmp_path / "prompt.txt").write_text("naïve")
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
    assert "--top_p 7.0 must be" in out and "there is no /tempo" in out
    assert "not 'x'" in out and "40 tokens long" in out and "never" not in out


def test_a_prompt_that_is_no_text_is_a_sentence(trained):
    done = sample(trained, "--prompt", "-", code=2, input=b"\xff\xfe\xff", text=False)
    assert b"cannot be read as text" in done.stderr and b"Traceback" not in done.stderr


def test_bad_settings_are_sentences(trained, tmp_path):
    for extra, message in (
        (["--prompt", "x" * 33], "the prompt is 33 tokens long; this model reads at most 32"),
        (["--prompt", f"@{tmp_path}/none"], "cannot be read"),
        (["--top_p", 0], "--top_p"),
        (["--temperature", -1], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--seed", 10**20], "--seed"),
        (["--prompt", b"caf\xe9"], "cannot be read as text"),
        (["--checkpoint", tmp_path / "none.pt"], "there is no checkpoint"),
    ):
        done = sample(trained, *extra, code=2)
        assert message in done.stderr and "Traceback" not in done.stderr
