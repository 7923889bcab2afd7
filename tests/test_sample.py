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
