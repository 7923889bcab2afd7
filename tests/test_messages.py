"""A message names what its reader can do. Below the scripts only the files of options name flags,
those of their scripts; in other files a flag stands in a command, behind the script that has it."""

import ast
import importlib.util
import inspect
import re
import sys
from dataclasses import fields
from functools import cache
from itertools import pairwise

import pytest
from conftest import ROOT

from utils.cli import parse

SCRIPTS = [
    "train.py", "finetune.py", "sample.py", "evaluate.py", "convert.py", "plot.py",
    "data/fineweb-edu.py", "data/train_tokenizer.py", "data/verify.py",
    "scripts/bench.py", "scripts/first_hour.py", "scripts/ladder.py", "scripts/sweep.py",
]  # fmt: skip
# The files below the scripts that declare or read options, and the scripts whose options they are.
OPTIONS_FILES = {
    "config.py": ["train.py", "finetune.py"],
    "training/options.py": ["train.py", "finetune.py"],
    "finetuning/options.py": ["finetune.py"],
}


@cache
def options_classes(script):
    """Return the dataclasses that flags become in a script; sweep.py also reads train.py's."""
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", script), ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    source = inspect.getsource(module)
    names = re.findall(r"(?:start_script\(main, |read_options\()(\w+)", source)
    return [getattr(module, name) for name in names]


def strings(node):
    """Return the strings in a syntax tree that are no docstrings. An f-string is one, with the
    expressions in it as they are written."""
    if isinstance(node, ast.JoinedStr):
        return [ast.unparse(node)]
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    children = [] if is_docstring else ast.iter_child_nodes(node)
    return [text for child in children for text in strings(child)]


def wrong_flags(text, script):
    """Return the flags in a text that neither the script has (None: no script) nor the command
    before them, as in "python plot.py --log"."""
    wrong = set()
    for clause in re.split(r"[;.:]\s|[()]", text.replace("sys.argv[0]", "bash")):
        owner = script
        is_command = False
        for word in re.findall(r"--\w+|[\w/-]+\.py|torchrun|bash", clause):
            if not word.startswith("--"):
                owner = next((path for path in SCRIPTS if path.endswith(word)), None)
                is_command = owner is None  # of torchrun, or of the script that runs
            elif not is_command:
                classes = options_classes(owner) if owner is not None else []
                names = [x.name for options in classes for x in fields(options)]
                # "" of f"--no_{name}"
                if word.removeprefix("--no_").removeprefix("--") not in [*names, "help", ""]:
                    wrong.add(word)
    return wrong


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_and_checks_of_options_name_flags_that_their_script_has(script):
    if script != "scripts/first_hour.py":  # whose strings are commands that it runs
        tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
        assert not {flag for text in strings(tree) for flag in wrong_flags(text, script)}
    for base in options_classes(script)[-1].__mro__[:-1]:
        assert not wrong_flags(inspect.getsource(base), script), base


@pytest.mark.parametrize("columns", ["50", "80", "200"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fills_its_lines_and_says_at_most_one_default_of_a_flag(
    script, columns, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", columns)
    options_class = options_classes(script)[-1]
    with pytest.raises(SystemExit):
        parse(options_class, ["--help"])
    text = capsys.readouterr().out
    assert text.count(" options ") > 4 or script not in ("train.py", "finetune.py")  # groups
    entries = re.findall(r"^  --(\w+)((?:.|\n(?!  --))*)", text, re.M)
    assert {name for name, _ in entries} == {field.name for field in fields(options_class)}
    assert len(entries) <= 50
    for name, text in entries:
        assert len(re.findall("default:", text, re.I)) <= 1, name
        assert not re.search(r"default:\s+(None)?\)", text), name
        lines = re.findall(r"^ {12,}\S.*", text, re.M)
        for line, next_line in pairwise(lines):
            assert len(f"{line} {next_line.split()[0]}") >= min(int(columns), 129), line
        if name == "sharding":
            assert re.search(r"\(default:\s+none\)", text)  # a value, not Python's None


@pytest.mark.parametrize("path", OPTIONS_FILES)
def test_a_file_of_options_names_flags_that_all_its_scripts_have(path):
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            continue  # a group of options is checked above, with its script
        is_of_train = "TrainOptions" in ast.unparse(node).partition("\n")[0]  # by its arguments
        for script in ["train.py"] if is_of_train else OPTIONS_FILES[path]:
            wrong = {flag for text in strings(node) for flag in wrong_flags(text, script)}
            assert not wrong, ast.unparse(node)[:100]


@pytest.mark.parametrize(
    "package", ["utils", "model", "data", "training", "evaluation", "finetuning"]
)
def test_other_files_below_the_scripts_name_no_flag(package):
    for file in (ROOT / package).rglob("*.py"):
        path = str(file.relative_to(ROOT))
        if path not in [*SCRIPTS, *OPTIONS_FILES]:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            wrong = {flag for text in strings(tree) for flag in wrong_flags(text, None)}
            assert not wrong, path
