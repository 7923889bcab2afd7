"""Data and picture of scripts/chat_demo.sh, which says what the demo teaches.

python -m scripts.chat_demo data FOLDER SEED
python -m scripts.chat_demo picture FOLDER
"""

import itertools
import json
import random
import sys
from pathlib import Path

# a stage of the demo, and its name in the picture
STAGES = {"sums": "trained on sums", "sft": "8 dialogs", "grpo": "rewards"}


def worked_sum(a: int, b: int) -> str:
    """Return a sum of two numbers below 100, worked from the units: "7+8=15, 2+5+1=8, 85"."""
    # as by hand: the units, then the tens with what is carried over
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{carry}={tens}, {a + b}"


def question_rows(
    pairs: list[tuple[int, int]], form: str = "What is {}+{}?", answer_field: str = "answer"
) -> list[dict]:
    """Return a row of prompt and worked sum for each pair of numbers."""
    return [{"prompt": form.format(a, b), answer_field: worked_sum(a, b)} for a, b in pairs]


def write_data(folder: Path, seed: int) -> None:
    """Write texts, dialogs and questions; no stage sees the sums of the held-out questions."""
    two_digits = range(10, 100)
    pairs = list(itertools.product(two_digits, two_digits))
    random.Random(seed).shuffle(pairs)  # 8,100 pairs
    held_out = pairs[:200]
    known = pairs[200:]
    folder.mkdir(parents=True, exist_ok=True)
    # Training reads less than the six copies. Each has a sum at another place of a sequence.
    texts = [{"text": f"{a}+{b}: {worked_sum(a, b)}"} for a, b in known]
    write_rows(folder / "sums.jsonl", 6 * texts)
    # few dialogs: they teach the form of an answer, and rewards teach to answer
    write_rows(folder / "dialogs.jsonl", question_rows(known[:8], answer_field="completion"))
    write_rows(folder / "questions.jsonl", question_rows(known[400:]))
    write_rows(folder / "held_out.jsonl", question_rows(held_out))
    write_rows(folder / "held_out_sums.jsonl", question_rows(held_out, "{}+{}: "))


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a .jsonl file."""
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))


def summarize(folder: Path) -> None:
    """Print ten answers and the accuracy after each stage, and draw the latter. The picture of the
    rewards is the one that finetune.py draws beside its log."""
    import matplotlib.pyplot as plt  # takes a second, which the data does without

    print("\nTen held-out questions and the model's answers:")
    for line in (folder / "grpo_held_out.jsonl").read_text().splitlines()[:10]:
        row = json.loads(line)
        verdict = "right" if row["exact"] else "wrong"
        print(f"  {row['prompt']}  {row['completion']}  {verdict}")

    print("\nHeld-out questions that are answered exactly:")
    percents: list[float] = []  # of each stage
    errors: list[float] = []
    for stage, name in STAGES.items():
        scores = json.loads((folder / f"{stage}_held_out.json").read_text())
        exact = scores["results"][0]  # share of greedy answers that are exact; pass@k follows
        percents.append(100 * exact["value"])
        errors.append(100 * exact["stderr"])
        print(f"  {name:16} {percents[-1]:5.1f}% ± {errors[-1]:.1f}%")

    figure, axes = plt.subplots(layout="constrained")
    bars = axes.bar(list(STAGES.values()), percents, yerr=errors)
    # the numbers stand above the bars, of which the highest are near 100 %
    axes.bar_label(bars, fmt="%.0f %%", padding=3)
    axes.set(ylabel="answered exactly (%)", ylim=(0, 112), title="200 held-out sums")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "accuracy.png", dpi=150)


if __name__ == "__main__":
    demo_folder = Path(sys.argv[2])
    if sys.argv[1] == "data":
        write_data(demo_folder / "data", seed=int(sys.argv[3]))
    else:
        summarize(demo_folder)
