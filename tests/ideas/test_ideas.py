"""Ideas of researchers, each tried in a copy of the project: nothing around it goes wrong."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, environment, gap, same_run, script, torchrun, train_args
from ideas import MODEL_IDEAS, Idea, apply

PARTS = ("config.py", "recipes.py", "train.py", "convert.py", "evaluate.py", "sample.py")
FOLDERS = ("data", "evaluation", "finetuning", "model", "training", "utils")


def edited_copy(idea: Idea, folder: Path) -> Path:
    """Return a copy of the project with an idea in it."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.npy", "*.bin")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in PARTS:
        shutil.copy(ROOT / name, folder)
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/model_card.md", folder / "scripts")
    apply(idea, folder)
    return folder


@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("idea", MODEL_IDEAS, ids=lambda idea: idea.name)
def test_an_idea_in_the_model(idea, recipe, shards, tmp_path):
    copy = edited_copy(idea, tmp_path / "copy")
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    given = ("--recipe", recipe, "--save_every", 10, "--keep_last", 2, "--dropout", 0, *idea.flags)
    script(*train_args(shards, run, 20, *given), cwd=copy)

    # resumed in the middle, it ends with the same bits
    middle = run / "checkpoints/model_step_000010.pt"
    script(*train_args(shards, resumed, 20, *given, "--resume", middle), cwd=copy)
    assert same_run(resumed, run)

    # begins as written, changes in training, samples and scores are those of a forward pass
    last = run / "checkpoints/model_last.pt"
    check = ROOT / "tests/ideas/check_model.py"
    env = environment() | {"PYTHONPATH": str(copy)}
    said = script(check, last, json.dumps(idea.begins), env=env, cwd=copy).stdout
    assert "as a forward pass" in said

    # another program computes the same, or gets no file
    out = tmp_path / "exported"
    export = ("convert.py", "--checkpoint", last, "--out", out)
    if idea.exports:
        script(*export, cwd=copy)
    else:
        refused = script(*export, cwd=copy, code=2)
        assert len(refused.stderr.strip().splitlines()) == 1 and not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2", "modern"])
@pytest.mark.parametrize("idea", MODEL_IDEAS, ids=lambda idea: idea.name)
def test_an_idea_on_two_processes(idea, recipe, shards, tmp_path):
    copy = edited_copy(idea, tmp_path / "copy")
    given = ("--recipe", recipe, *idea.flags)
    script(*train_args(shards, tmp_path / "one", 20, *given), cwd=copy)
    for sharding in ("none", "zero2"):
        run = tmp_path / sharding
        torchrun(2, *train_args(shards, run, 20, *given, "--sharding", sharding), cwd=copy)
        assert gap(run, tmp_path / "one") < 2e-4
