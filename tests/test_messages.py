"""A message names what its reader can do: each flag in it is one of the script that prints it, or
stands behind the script that has it. A script may print the messages of all modules that it
imports."""

import ast
import importlib.util
import inspect
import os
import re
import sys
from dataclasses import fields
from functools import cache
from modulefinder import ModuleFinder

import pytest
from conftest import ROOT

SCRIPTS = [
    "train.py", "finetune.py", "sample.py", "evaluate.py", "convert.py", "plot.py",
    "data/fineweb-edu.py", "data/train_tokenizer.py", "data/verify.py",
    "scripts/bench.py", "scripts/first_hour.py", "scripts/ladder.py", "scripts/sweep.py",
]  # fmt: skip
# Flags in messages of modules that scripts without these flags import for something else.
EXCEPTIONS = {
    "config.py": "--total_batch_size --min_lr --max_lr --sharding --tensor_parallel --shard_across",
    "data/loader.py": "--data_dir",
    "data/shards.py": "--data_dir",
    "training/options.py": "--recipe --model_type",
    "training/run.py": "--resume --run_dir --overwrite",
    "training/start.py": "--init_from --checkpoint_dir",
    "training/tensor_parallel.py": "--tensor_parallel",
    "utils/devices.py": "--device --dtype",
    "utils/distributed.py": "--resume --device",
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


def modules(script):
    """Return the files of the project that a script imports, and its own."""
    finder = ModuleFinder([str(ROOT)])
    finder.run_script(str(ROOT / script))
    files = [module.__file__ for module in finder.modules.values() if module.__file__]
    paths = {os.path.relpath(file, ROOT) for file in files}
    return paths - {"scripts/first_hour.py"}  # whose strings are commands that it runs


@cache
def strings(path):
    """Return the strings in a file that are no docstrings."""
    nodes = list(ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    constants = [node for node in nodes if isinstance(node, ast.Constant)]
    return [str(node.value) for node in constants if node not in docstrings]


def wrong_flags(text, script):
    """Return the flags in a text that neither the script has nor the command before them, as in
    "python plot.py --log"."""
    wrong = set()
    for clause in re.split(r"[;.:]\s|[()]", text):
        owner = script
        for word in re.findall(r"--\w+|[\w/-]+\.py|torchrun|bash", clause):
            if not word.startswith("--"):
                owner = next((path for path in SCRIPTS if path.endswith(word)), None)
            elif owner is not None:  # None for torchrun and bash
                names = [x.name for options in options_classes(owner) for x in fields(options)]
                # "" of f"--no_{name}"
                if word.removeprefix("--no_").removeprefix("--") not in [*names, "help", ""]:
                    wrong.add(word)
    return wrong


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_message_names_flags_that_its_script_has(script):
    for base in options_classes(script)[-1].__mro__[:-1]:  # the text of --help
        assert not wrong_flags(inspect.getsource(base), script), base
    for path in modules(script):
        wrong = set.union(*(wrong_flags(text, script) for text in [""] + strings(path)))
        assert wrong <= set(EXCEPTIONS.get(path, "").split()), path
