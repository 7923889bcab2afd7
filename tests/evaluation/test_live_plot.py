import os
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import kill, run_until, script, start, train_args
from evaluation.live_plot import LivePlot

from evaluation import live_plot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition, timeout=60):
    began = time.monotonic()
    while not condition() and time.monotonic() - began < timeout:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def run(shards, tmp_path):
    """A run of many validations, which does not end by itself."""
    args = train_args(shards, tmp_path, 100_000, "--eval_every", 5, "--val_tokens", 256)
    process = start(*args, fork=False)
    yield process
    kill(process)


def test_the_picture_is_there_while_the_run_goes_on(run, tmp_path):
    picture = tmp_path / "logs" / "log_plot.png"
    run_until(run, picture.exists)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    assert wait_for(lambda: not children(run.pid))  # not even a zombie stays
    written = picture.stat().st_mtime_ns
    rows = tmp_path / "logs" / "metrics.jsonl"
    size = rows.stat().st_size
    run_until(run, lambda: rows.stat().st_size > size + 4_000)
    assert not children(run.pid) and picture.stat().st_mtime_ns == written  # once a minute


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_killed_leaves_no_drawing_process(run, tmp_path, number):
    run_until(run, lambda: children(run.pid))
    (drawing,) = children(run.pid)
    os.kill(run.pid, number)
    code = run.wait(60)
    if number == signal.SIGTERM:
        assert code == 128 + number and not Path(f"/proc/{drawing}").exists()
    state = Path(f"/proc/{drawing}/stat")  # without a parent, init may leave a zombie
    assert wait_for(lambda: not state.exists() or ") Z " in state.read_text(), 20)
    assert not (tmp_path / "logs" / "log_plot.png.tmp").exists()


def test_drawing_needs_no_pytorch():
    script("-c", "import sys, evaluation.figure; assert 'torch' not in sys.modules")


@pytest.fixture
def plot(tmp_path):
    plot = LivePlot(tmp_path, None)
    plot.command = [sys.executable, "-c", "import sys; sys.stdin.read()"]  # draws until `close`
    yield plot
    plot.close()


def test_a_drawing_starts_once_a_minute_and_after_the_one_before(plot, monkeypatch):
    plot.redraw()
    first = plot.process
    monkeypatch.setattr(live_plot, "SECONDS", 0)
    plot.due = 0.0
    plot.redraw()
    assert plot.process is first and first.poll() is None  # it is still drawing
    plot.close()
    assert first.returncode == 0
    plot.due = time.monotonic() + 60
    plot.redraw()
    assert plot.process is first
    plot.due = 0.0
    plot.redraw()
    assert plot.process is not first


def test_a_drawing_that_cannot_start_is_no_error(plot, tmp_path):
    plot.command = [str(tmp_path / "nothing")]
    plot.redraw()
    plot.close()


def test_a_drawing_that_fails_is_no_error(tmp_path):
    plot = LivePlot(tmp_path / "nothing", "gpt2")
    plot.redraw()
    assert wait_for(lambda: plot.process.poll() is not None)
    plot.close()
