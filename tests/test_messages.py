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
    "training/minutes.py": ["train.py"],
    "training/options.py": ["train.py", "finetune.py"],
    "training/run.py": ["train.py", "finetune.py"],
    "training/saver.py": ["train.py", "finetune.py"],
    "training/start.py": ["train.py", "finetune.py"],
    "finetuning/options.py": ["finetune.py"],
    "data/source.py": ["data/fineweb-edu.py", "data/train_tokenizer.py"],
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


def wrong_flags(text, scripts):
    """Return the flags in a text that neither a script has that may show it nor the command before
    them, as in "python plot.py --log"."""
    wrong = set()
    for clause in re.split(r"[;.:]\s|[()]", text.replace("sys.argv[0]", "bash")):
        owners = scripts
        is_command = False
        for word in re.findall(r"--\w+|[\w/-]+\.py|torchrun|bash", clause):
            if not word.startswith("--"):
                owners = [path for path in SCRIPTS if path.endswith(word)]
                is_command = not owners  # of torchrun, or of the script that runs
            elif not is_command:
                classes = [options for owner in owners for options in options_classes(owner)]
                names = [x.name for options in classes for x in fields(options)]
                # "" of f"--no_{name}"
                if word.removeprefix("--no_").removeprefix("--") not in [*names, "help", ""]:
                    wrong.add(word)
    return wrong


def test_messages_name_flags_of_the_scripts_that_show_them():
    packages = ("utils", "model", "data", "training", "evaluation", "finetuning")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    paths = {*SCRIPTS, *OPTIONS_FILES, *(str(file.relative_to(ROOT)) for file in files)}
    for path in paths - {"scripts/first_hour.py"}:  # whose strings are commands that it runs
        scripts = OPTIONS_FILES.get(path, [path] if path in SCRIPTS else [])
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        wrong = {flag for text in strings(tree) for flag in wrong_flags(text, scripts)}
        assert not wrong, path
        if path in SCRIPTS:  # its help shows the commands of its docstring
            assert re.search(rf"^ *python {path}", ast.get_docstring(tree), re.M), path


@pytest.mark.parametrize("columns", ["50", "80", "200"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_names_flags_of_its_script_and_fills_its_lines_with_one_default_of_each(
    script, columns, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", columns)
    options_class = options_classes(script)[-1]
    for base in options_class.__mro__[:-1]:
        assert not wrong_flags(inspect.getsource(base), [script]), base
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
            assert len(f"{line} {next_line.split()[0]}") > min(int(columns), 129), line
        if name == "sharding":
            assert re.search(r"\(default:\s+none\)", text)  # a value, not Python's None
