"""Data of scripts/chat_demo.sh, which says what the demo teaches.

python -m scripts.chat_demo FOLDER SEED
"""

import itertools
import json
import random
import sys
from pathlib import Path


def worked_sum(a: int, b: int) -> str:
    """Return a sum of two numbers below 100, worked from the units: "7+8=15, 2+5+1=8, 85"."""
    # for 27 + 58: 7 + 8 = 15, carry 1, and 2 + 5 + 1 = 8
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{carry}={tens}, {a + b}"


def write_data(folder: Path, seed: int) -> None:
    """Write texts, dialogs and questions as .jsonl files; no stage sees the sums of the held-out
    questions."""
    pairs = list(itertools.product(range(10, 100), repeat=2))  # 8,100 pairs
    random.Random(seed).shuffle(pairs)
    # One row for each pair; each stage of the demo reads the fields that it needs.
    rows: list[dict[str, str]] = []
    for a, b in pairs:
        answer = worked_sum(a, b)
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
    # Pre-training reads six copies a little more than once, so that it meets a sum several times,
    # each time at another place of a sequence.
    write_rows(folder / "sums.jsonl", 6 * rows[200:])
    # Few dialogs: they teach the form of an answer, and rewards teach to answer.
    write_rows(folder / "dialogs.jsonl", rows[200:208])
    write_rows(folder / "questions.jsonl", rows[600:])  # 7,500, none from the dialogs


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a .jsonl file, one row a line."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


if __name__ == "__main__":
    write_data(Path(sys.argv[1]), seed=int(sys.argv[2]))
