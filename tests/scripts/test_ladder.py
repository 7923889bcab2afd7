import pytest

from scripts import ladder
from scripts.ladder import RUNGS, LadderOptions
from scripts.measure import measure
from utils.cli import parse, to_flags

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "seconds": 0, "device": "cpu"}


@pytest.mark.slow
def test_all_rungs_stand_in_a_table_with_equal_losses(tmp_path, monkeypatch, capsys):
    def measure_here(programs, options):  # once, in this process
        return {rung: measure(build, options) for rung, build in programs.items()}

    monkeypatch.setattr(ladder, "measure_in_turn", measure_here)
    # test_execution.py compiles; it takes half a minute
    monkeypatch.setattr("model.execution.compile_static", lambda function: function)
    ladder.main(parse(LadderOptions, to_flags(TINY | {"out": tmp_path / "ladder.svg"})))

    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [f"| {rung}" for rung in RUNGS]
    losses = [float(row[3]) for row in rows]
    assert losses[:5] == pytest.approx([losses[0]] * 5, rel=1e-6)  # those before bfloat16
    picture = (tmp_path / "ladder.svg").read_text()
    assert all(f"<!-- {rung} -->" in picture for rung in RUNGS)
    assert losses[5:] == pytest.approx([losses[0]] * 3, rel=1e-4)
