"""A message names what its reader can do: each flag in it is one of the script that prints it, or
stands behind the script that has it."""

import ast
import importlib.util
import re
import sys
from dataclasses import fields
from functools import cache

import pytest
from conftest import ROOT

# These pass their strings to other scripts; tests/scripts runs them.
RUN_SCRIPTS = {"scripts/first_hour.py", "scripts/sweep.py"}
SCRIPTS = [
    "train.py", "finetune.py", "sample.py", "evaluate.py", "convert.py", "plot.py",
    "data/fineweb-edu.py", "data/train_tokenizer.py", "data/verify.py",
    "scripts/bench.py", "scripts/first_hour.py", "scripts/ladder.py", "scripts/sweep.py",
]  # fmt: skip
# flags of commands that are not in Python, or not ours
OTHERS = {"torchrun": {"nproc_per_node", "standalone"}, "bash": {"overwrite", "recipe", "yes"}}


@cache
def tree(path):
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


@cache
def definitions(path):
    """Return the top-level statements of a module by the names that they define, and the imports of
    its functions with those of the module: {name: (path, name or None for a module)}."""
    defined, imported = {}, {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = alias.asname or alias.name
                module = node.module.replace(".", "/")
                if (ROOT / f"{module}.py").exists():
                    imported[name] = (f"{module}.py", alias.name)
                elif (ROOT / module / f"{alias.name}.py").exists():
                    imported[name] = (f"{module}/{alias.name}.py", None)
    others = ast.Module([], [])
    defined["its own lines"] = others
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    defined[target.id] = node
        elif not isinstance(node, ast.Expr):  # the docstring
            others.body.append(node)
    return defined, imported


@cache
def neighbours(path, name):
    """Return the definitions that one mentions, as (path, name)."""
    defined, imported = definitions(path)
    found = set()
    for node in ast.walk(defined[name]):
        if isinstance(node, ast.Name):
            if node.id in defined:
                found.add((path, node.id))
            elif node.id in imported and imported[node.id][1]:
                found.add(imported[node.id])
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, own_name = imported.get(node.value.id, (None, ""))
            if module and own_name is None:  # module.name
                found.add((module, node.attr))
    return {(module, own_name) for module, own_name in found if own_name in definitions(module)[0]}


def reached(script):
    """Return the definitions that a script may run: those that its own mention, and so on. The
    methods of a class count with it."""
    todo = [(script, name) for name in definitions(script)[0]]
    seen = set(todo)
    while todo:
        for neighbour in neighbours(*todo.pop()) - seen:
            seen.add(neighbour)
            todo.append(neighbour)
    return seen


@cache
def options_class(script):
    """Return the dataclass that the command line of a script becomes."""
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", script), ROOT / script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    for call in ast.walk(tree(script)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            if call.func.id == "start_script":
                return getattr(module, call.args[1].id)
            if call.func.id == "read_options":
                return getattr(module, call.args[0].id)
    raise AssertionError(f"{script} has no command line")


@cache
def own_flags(script):
    return {field.name for field in fields(options_class(script))} | {"help"}


def texts(node, script):
    """Yield each string of a definition that the script may print. Those are no docstrings, but for
    the docstrings of its options, which are its --help."""
    is_help = getattr(node, "name", "") in [base.__name__ for base in options_class(script).__mro__]
    left_out = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and not (is_help and inner is node):
            docstrings = [line.value for line in inner.body if isinstance(line, ast.Expr)]
            left_out |= {id(docstring) for docstring in docstrings}
        if isinstance(inner, ast.JoinedStr):
            left_out |= {id(part) for part in inner.values}
            yield "".join(part.value if is_text(part) else "?" for part in inner.values)
        elif is_text(inner) and id(inner) not in left_out:
            yield inner.value


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def named_flags(text):
    """Yield (command or None, flag) for each flag in a text. The command that has a flag may stand
    before it, as in "python plot.py --log"."""
    command = None
    for word in re.findall(r"--\w+|[\w/-]+\.py|torchrun|bash|[;.:]\s|[()]", text):
        if word.startswith("--"):
            yield command, word.removeprefix("--").removeprefix("no_")
        elif word[0] in ";.:()":
            command = None
        else:
            command = word


def wrong_flags(script):
    """Return what a script may print and its reader cannot do, as (module, name, flag)."""
    wrong = set()
    for path, name in reached(script):
        for text in texts(definitions(path)[0][name], script):
            for command, flag in named_flags(text):
                if command in OTHERS:
                    allowed = OTHERS[command]
                else:
                    others = [other for other in SCRIPTS if command and other.endswith(command)]
                    allowed = own_flags((others or [script])[0])
                if flag and flag not in allowed:
                    wrong.add((path, name, flag))
    return wrong


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_message_names_flags_that_its_script_has(script):
    wrong = {row for row in wrong_flags(script) if row[0] not in RUN_SCRIPTS}
    assert not wrong, [f"{path}: {name} names --{flag}" for path, name, flag in sorted(wrong)]


def test_scripts_reach_what_they_may_print():
    remedy = ("training/run.py", "REMEDY")
    assert remedy in reached("train.py") and remedy not in reached("sample.py")
    assert all(("utils/cli.py", "user_message") in reached(script) for script in SCRIPTS)
