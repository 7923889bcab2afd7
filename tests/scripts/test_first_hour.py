"""The check of a machine, with its small model."""

import pytest
from conftest import script

from scripts import first_hour


@pytest.mark.slow
def test_a_small_model_reaches_its_stored_loss_and_resumes_exactly(tmp_path):
    said = script("scripts/first_hour.py", "--small", "--out", tmp_path).stdout
    assert "ok    validation loss at step 50" in said
    assert "ok    difference after a resume: 0," in said


@pytest.mark.parametrize("measured, word", [(1.0, "ok"), (1.2, "WRONG"), (float("nan"), "WRONG")])
def test_a_number_outside_of_its_range_is_called_wrong(capsys, measured, word):
    assert first_hour.print_verdict("number", measured, 0.9, 1.1) == (word == "ok")
    assert capsys.readouterr().out.startswith(word)
