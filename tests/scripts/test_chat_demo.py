import re
import shlex

from conftest import ROOT, read_rows

from finetuning.options import FinetuneOptions
from scripts.chat_demo import worked_sum, write_data
from utils.cli import parse


def test_a_sum_is_worked_from_the_units():
    assert worked_sum(27, 58) == "7+8=15, 2+5+1=8, 85"
    assert worked_sum(10, 10) == "0+0=0, 1+1+0=2, 20"


def test_no_stage_sees_the_held_out_sums(tmp_path):
    write_data(tmp_path, seed=1)

    def sums(name, field="prompt"):
        return {re.search(r"\d+\+\d+", row[field])[0] for row in read_rows(tmp_path / name)}

    held_out = sums("held_out.jsonl")
    assert len(held_out) == 200
    for seen in (sums("sums.jsonl", "text"), sums("dialogs.jsonl"), sums("questions.jsonl")):
        assert seen and not seen & held_out


def test_the_stages_have_valid_options():
    text = (ROOT / "scripts/chat_demo.sh").read_text().replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith("run finetune.py")]
    for command in commands:
        args = shlex.split(re.sub(r"\$\(.*?\)|\$asked", "", command))[2:]
        config = parse(FinetuneOptions, args)
        assert config.batch_size * config.group_size % config.micro_batch_size == 0
    assert [shlex.split(command)[3] for command in commands] == ["sft", "grpo"]
