"""Data and results of scripts/chat_demo.sh, which says what the demo teaches.

python -m scripts.chat_demo data FOLDER SEED
python -m scripts.chat_demo results FOLDER
"""

import itertools
import json
import random
import sys
from pathlib import Path

# the stages of the demo, and their names in the results
STAGES = {"sums": "trained on sums", "sft": "8 dialogs", "grpo": "rewards"}


def worked_sum(a: int, b: int) -> str:
    """Return a sum of two numbers below 100, worked from the units: "7+8=15, 2+5+1=8, 85"."""
    # as by hand: the units, then the tens with what is carried over
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{carry}={tens}, {a + b}"


def write_data(folder: Path, seed: int) -> None:
    """Write texts, dialogs and questions; no stage sees the sums of the held-out questions."""
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(seed).shuffle(pairs)  # 8,100 pairs
    rows: list[dict] = []
    sums: list[dict] = []  # questions in the form of the texts
    for a, b in pairs:
        answer = worked_sum(a, b)
        row = {
            "text": f"{a}+{b}: {answer}",  # for data/fineweb-edu.py
            "prompt": f"What is {a}+{b}?",
            "completion": answer,  # that sft learns
            "answer": answer,  # that grpo and evaluate.py compare with
        }
        rows.append(row)
        sums.append({"prompt": f"{a}+{b}: ", "answer": answer})

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "held_out.jsonl", rows[:200])
    write_rows(folder / "held_out_sums.jsonl", sums[:200])
    # Training reads less than the six copies. Each has a sum at another place of a sequence.
    write_rows(folder / "sums.jsonl", 6 * rows[200:])
    # few dialogs: they teach the form of an answer, and rewards teach to answer
    write_rows(folder / "dialogs.jsonl", rows[200:208])
    write_rows(folder / "questions.jsonl", rows[600:])


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a .jsonl file."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


def print_results(folder: Path) -> None:
    """Print ten answers of the last stage, and the accuracy after each stage."""
    print("\nTen held-out questions and the model's answers:")
    lines = (folder / "grpo_held_out.jsonl").read_text().splitlines()
    for line in lines[:10]:
        row = json.loads(line)
        verdict = "right" if row["exact"] else "wrong"
        print(f"  {row['prompt']}  {row['completion']}  {verdict}")
    print("\nHeld-out questions that are answered exactly:")
    for stage, name in STAGES.items():
        scores = json.loads((folder / f"{stage}_held_out.json").read_text())
        exact = scores["results"][0]  # the only one: the share of exact answers
        print(f"  {name:16} {exact['value']:6.1%} ± {exact['stderr']:.1%}")


if __name__ == "__main__":
    demo_folder = Path(sys.argv[2])
    if sys.argv[1] == "data":
        write_data(demo_folder / "data", seed=int(sys.argv[3]))
    else:
        print_results(demo_folder)
