"""docs/TOUR.md: every block prints what stands below it, and every link leads to something."""

import ast
import code
import doctest
import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOUR = (ROOT / "docs" / "TOUR.md").read_text(encoding="utf-8")


def test_every_block_of_the_tour_prints_what_stands_below_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the blocks write below data/
    (commands,) = re.findall(r"```sh\n(.*?)```", TOUR, flags=re.DOTALL)
    commands = commands.replace("python data", f"python {ROOT}/data")
    commands = commands.replace("\npython ", f"\n{sys.executable} ")
    subprocess.run(["bash", "-ec", commands], check=True)

    # Each start of torch.distributed, as in other tests, puts "[rank0]: " in front of tracebacks.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shown = []
    monkeypatch.setattr(sys, "displayhook", shown.append)
    prompt = code.InteractiveConsole()  # where a loop ends with an empty line
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", TOUR, flags=re.DOTALL)
    assert len(blocks) == TOUR.count("```python") == TOUR.count("```text") + 1
    for block, expected in blocks:
        shown.clear()
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
            for line in [*block.splitlines(), ""]:
                prompt.push(line)
        values = [repr(value) for value in shown if value is not None]
        printed = out.getvalue() + "\n".join(values)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        assert doctest.OutputChecker().check_output(expected, f"{printed}\n", flags), printed
        # of a pasted block, Python 3.13 shows the value of the last statement only
        assert len(values) <= isinstance(ast.parse(block).body[-1], ast.Expr), block


def test_the_tour_names_files_and_functions_that_exist():
    links = re.findall(r"\[`(\w+)`\]\(\.\./(.+?)\)", TOUR)
    assert len(links) > 20
    for name, path in links:
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {name}\b|^{name} = ", source, flags=re.MULTILINE), name
    for path in re.findall(r"\]\((\w+\.md)\)", TOUR):
        assert (ROOT / "docs" / path).is_file(), path
