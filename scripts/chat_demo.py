"""Make the data of scripts/chat_demo.sh. That script explains what the demo teaches.

python -m scripts.chat_demo FOLDER SEED
"""

import itertools
import json
import random
import sys
from pathlib import Path


def worked_sum(a: int, b: int) -> str:
    """Return the written addition of two numbers below 100, from the units to the tens: "7+8=15,
    2+5+1=8, 85" for 27 + 58."""
    # 27 + 58: the units 7 + 8 = 15 carry 1, and the tens are 2 + 5 + 1 = 8
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{carry}={tens}, {a + b}"


def write_data(folder: Path, seed: int) -> None:
    """Write texts, dialogs and questions as .jsonl files. No stage trains on the sums of the
    held-out questions."""
    pairs = list(itertools.product(range(10, 100), repeat=2))  # 8,100 pairs
    random.Random(seed).shuffle(pairs)
    # One row per pair. Each stage of the demo reads the fields that it needs.
    rows: list[dict[str, str]] = []
    for a, b in pairs:
        answer = worked_sum(a, b)  # "7+8=15, 2+5+1=8, 85" for 27 + 58
        # `text` is for pre-training, `completion` for sft, `answer` for grpo and evaluate.py.
        row = {
            "text": f"{a}+{b}: {answer}",
            "prompt": f"What is {a}+{b}?",
            "completion": answer,
            "answer": answer,
        }
        rows.append(row)

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "held_out.jsonl", rows[:200])
    # Pre-training reads the six copies a little more than once. So it sees each sum several times,
    # at different places of a sequence.
    write_rows(folder / "sums.jsonl", 6 * rows[200:])
    # A few dialogs are enough: they teach the form of an answer, and rewards teach right answers.
    write_rows(folder / "dialogs.jsonl", rows[200:208])
    write_rows(folder / "questions.jsonl", rows[600:])  # 7,500 questions, none is a dialog


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a .jsonl file with one row per line."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


if __name__ == "__main__":
    write_data(Path(sys.argv[1]), seed=int(sys.argv[2]))
