import json

import pytest

from finetuning.options import FinetuneConfig
from scripts.chat_demo import SETTINGS, worked_sum, write_data
from utils.cli import parse
from utils.errors import UserError


def test_a_sum_is_worked_from_the_units():
    assert worked_sum(27, 58) == "7+8=15, 2+5+1=8, 85"
    assert worked_sum(10, 10) == "0+0=0, 1+1+0=2, 20"


def test_no_stage_sees_the_held_out_sums(tmp_path):
    write_data(tmp_path, seed=1)

    def rows(name):
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    asked = {row["prompt"].removeprefix("What is ").rstrip("?") for row in rows("held_out.jsonl")}
    assert len(asked) == 200
    assert not asked & {row["text"].partition(":")[0] for row in rows("sums.jsonl")}
    for name in ("dialogs", "mixed", "pairs", "questions"):
        prompts = {row["prompt"].removeprefix("What is ") for row in rows(f"{name}.jsonl")}
        assert prompts and not {f"{sum_}?" for sum_ in asked} & prompts
    with pytest.raises(UserError, match="is of --seed 1"):
        write_data(tmp_path, seed=2)


@pytest.mark.parametrize("stage", [name for name in SETTINGS if name != "train"])
def test_the_stages_have_valid_options(stage):
    args = [*SETTINGS[stage].split(), "--init_from", "x", "--data", "y"]
    parse(FinetuneConfig, args=args).check()
