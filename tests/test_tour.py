"""docs/TOUR.md: every example prints what stands there, and every link leads to something."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOUR = (ROOT / "docs" / "TOUR.md").read_text(encoding="utf-8")


def test_every_example_of_the_tour_prints_what_stands_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the examples write below data/
    (commands,) = re.findall(r"```sh\n(.*?)```", TOUR, flags=re.DOTALL)
    commands = commands.replace("python data", f"python {ROOT}/data")
    commands = commands.replace("\npython ", f"\n{sys.executable} ")
    subprocess.run(["bash", "-ec", commands], check=True)

    # doctest would take a closing fence for expected output
    examples = doctest.DocTestParser().get_doctest(TOUR.replace("```", ""), {}, "tour", None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(examples) == (0, TOUR.count("\n>>> "))
    assert runner.tries > 150


def test_the_tour_names_files_and_functions_that_exist():
    links = re.findall(r"\[`(\w+)` in ([\w/.]+)\]\(\.\./(.+?)\)", TOUR)
    assert len(links) > 20
    for name, shown_path, path in links:
        assert shown_path == path
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"\b(def|class) {name}\b|^{name} = ", source, flags=re.MULTILINE), name
    for path in re.findall(r"\]\((\w+\.md)\)", TOUR):
        assert (ROOT / "docs" / path).is_file(), path
