"""Ideas of researchers, each tried in a copy of the project: nothing around it goes wrong."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import (
    ROOT,
    environment,
    gap,
    losses,
    same_run,
    script,
    slow,
    torchrun,
    train_args,
)
from ideas import (
    LOOP_IDEAS,
    LOOP_TOKENS,
    LOSS_IDEAS,
    LOST_COUNTER,
    MODEL_IDEAS,
    OPTIMIZER_IDEAS,
    Idea,
    apply,
)

from model.formats.checkpoint import load_checkpoint

FILES = ("config.py", "recipes.py", "train.py", "convert.py", "scripts/model_card.md")
FOLDERS = ("data", "evaluation", "finetuning", "model", "training", "utils")


def edited_copy(idea: Idea, folder: Path) -> Path:
    """Return a copy of the project with an idea in it."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.npy", "*.bin")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "scripts").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    apply(idea, folder)
    return folder


def flags(idea: Idea, recipe: str) -> list[str]:
    """Return the flags of training with an idea."""
    return ["--recipe", recipe, *(flag.format(recipe=recipe) for flag in idea.flags)]


def name_of(idea: Idea) -> str:
    """Return the name of a row of a test."""
    return idea.name


def train_and_resume(idea: Idea, recipe: str, shards: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Train for 8 steps with an idea, and again from the middle, which must end with the same bits.
    Return the copy of the project and the run."""
    copy = edited_copy(idea, tmp_path / "copy")
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    given = (*flags(idea, recipe), "--save_every", 4, "--keep_last", 2, "--val_tokens", 128)
    script(*train_args(shards, run, 8, *given), cwd=copy)
    middle = run / "checkpoints/model_step_000004.pt"
    script(*train_args(shards, resumed, 8, *given, "--resume", middle), cwd=copy)
    assert same_run(resumed, run)
    return copy, run


# each is like another one, in what could go wrong
SIMILAR = (
    "layer scale that begins at 0",
    "post-norm",
    "token shift",
    "causal convolution before attention",
    "mixture of experts",
    "one MLP for all blocks, frozen embeddings",
    "soft-capped logits by a field of GPTConfig",
)
IN_THE_MODEL = [slow(idea) if name_of(idea) in SIMILAR else idea for idea in MODEL_IDEAS]


@pytest.mark.parametrize("recipe", ["modern", slow("gpt2")])
@pytest.mark.parametrize("idea", IN_THE_MODEL, ids=name_of)
def test_an_idea_in_the_model(idea, recipe, shards, tmp_path):
    copy, run = train_and_resume(idea, recipe, shards, tmp_path)

    # begins as written, changes in training, samples and scores are those of a forward pass
    last = run / "checkpoints/model_last.pt"
    check = ROOT / "tests/ideas/check_model.py"
    env = environment() | {"PYTHONPATH": str(copy)}
    given = (last, json.dumps(idea.begins), idea.frozen)
    assert "as a forward pass" in script(check, *given, env=env, cwd=copy).stdout

    # another program computes the same, or gets no file
    out = tmp_path / "exported"
    export = ("convert.py", "--checkpoint", last, "--out", out)
    if idea.exports:
        script(*export, cwd=copy)
    else:
        refused = script(*export, cwd=copy, code=2)
        assert len(refused.stderr.strip().splitlines()) == 1 and not out.exists()


@pytest.mark.parametrize("idea", [LOSS_IDEAS[0], *map(slow, LOSS_IDEAS[1:])], ids=name_of)
def test_an_idea_in_the_loss_holds_for_few_and_for_many_logits(idea, shards, tmp_path):
    copy = edited_copy(idea, tmp_path / "copy")
    few, many = tmp_path / "few", tmp_path / "many"
    same = ("--total_batch_size", 4096, "--val_tokens", 128, "--micro_batch_size")
    script(*train_args(shards, few, 5, *same, 32), cwd=copy)
    # 4,096 tokens of 320 logits are 5.2 MB
    done = script(*train_args(shards, many, 5, *same, 128), cwd=copy)
    assert gap(few, many) < 1e-4
    assert "the chunked loss gives another result than the plain model" in done.stderr
    # the definition changes the loss
    plain = tmp_path / "plain"
    script(*train_args(shards, plain, 5, *same, 32))
    assert gap(few, plain) > 1e-4


@pytest.mark.parametrize("recipe", ["modern", slow("gpt2")])
@pytest.mark.parametrize("idea", OPTIMIZER_IDEAS, ids=name_of)
def test_an_optimizer_is_a_file_and_an_entry_and_resumes(idea, recipe, shards, tmp_path):
    _, run = train_and_resume(idea, recipe, shards, tmp_path)
    assert losses(run)[8] < losses(run)[1] - 0.1


def test_a_counter_that_a_checkpoint_would_lose_is_refused_at_the_first_step(shards, tmp_path):
    copy = edited_copy(LOST_COUNTER, tmp_path / "copy")
    args = train_args(shards, tmp_path, 20, *flags(LOST_COUNTER, "modern"))
    done = script(*args, cwd=copy, code=2)
    assert "could not be resumed: Counted.calls may change: keep it in `state`" in done.stderr
    assert "Traceback" not in done.stderr and list(losses(tmp_path)) == [1]


@pytest.mark.parametrize("idea", LOOP_IDEAS, ids=name_of)
def test_an_idea_in_the_loop_counts_its_tokens_and_resumes(idea, shards, tmp_path):
    _, run = train_and_resume(idea, "gpt2", shards, tmp_path)
    tokens = LOOP_TOKENS[LOOP_IDEAS.index(idea)]
    assert load_checkpoint(run / "checkpoints/model_last.pt")["tokens"] == tokens


@pytest.mark.parametrize("idea", MODEL_IDEAS + LOSS_IDEAS + LOOP_IDEAS, ids=name_of)
def test_an_idea_has_as_many_lines_as_in_nanogpt_and_two_at_most(idea):
    assert 0 < idea.lines <= idea.nanogpt_lines + 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("idea", MODEL_IDEAS + LOSS_IDEAS + OPTIMIZER_IDEAS[:1], ids=name_of)
def test_an_idea_on_two_processes_equals_one_or_is_refused(idea, recipe, shards, tmp_path):
    copy = edited_copy(idea, tmp_path / "copy")
    given = flags(idea, recipe)
    script(*train_args(shards, tmp_path / "one", 20, *given), cwd=copy)
    for sharding, tensor_parallel, refusal in (
        ("none", 1, None),
        ("zero2", 1, None if idea.is_divided else "is shared by modules"),
        ("zero2", 2, None if idea.is_shared_by_processes else "cannot share the blocks"),
    ):
        run = tmp_path / f"{sharding} {tensor_parallel}"
        divided = ("--sharding", sharding, "--tensor_parallel", tensor_parallel)
        args = train_args(shards, run, 20, *given, *divided)
        if refusal is None:
            torchrun(2, *args, cwd=copy)
            assert gap(run, tmp_path / "one") < 2e-4
        else:
            (refused, _) = torchrun(2, *args, cwd=copy, code=2)
            assert refusal in refused.stderr and "Traceback" not in refused.stderr
