"""Damaged shards, manifests, checkpoints and logs: the cases of fuzzing.py, in processes that may
die of one."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import ROOT, environment


def run_cases(cases: range) -> list[str]:
    """A line of outcome for each case; where one kills the process, another goes on after it."""
    outcomes = []
    while cases:
        command = [sys.executable, "tests/fuzzing.py", str(cases.start), str(cases.stop)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=3000
        )
        lines = done.stdout.splitlines()
        if done.returncode:
            assert lines, done.stderr  # it did not come to a first case
            lines[-1] += f"FAILED: ended with {done.returncode}\n{done.stderr[-2000:]}"
        outcomes += lines
        cases = cases[len(lines) :]
    return outcomes


def check(count: int, share: int) -> None:
    """Runs so many cases, `share` to a process, and fails with those that failed."""
    with ThreadPoolExecutor(2) as pool:
        shares = [range(count)[i : i + share] for i in range(0, count, share)]
        outcomes = [line for lines in pool.map(run_cases, shares) for line in lines]
    failed = [line for line in outcomes if " FAILED" in line]
    assert not failed, "\n".join(failed)
    assert len(outcomes) == count and sum(line.endswith(" ok") for line in outcomes) > count / 20
    for error in ("UserError", "UserError", "UserError", "UserError"):
        assert any(f" {error}: " in line for line in outcomes), error


def test_damaged_files_are_named_or_read():
    check(150, share=150)


@pytest.mark.slow
def test_ten_thousand_damaged_files_are_named_or_read():
    check(10_000, share=1250)
