"""Data and picture of scripts/chat_demo.sh.

python -m scripts.chat_demo data FOLDER SEED
python -m scripts.chat_demo picture FOLDER
"""

import json
import random
import sys
from pathlib import Path

from utils.logger import read_metrics


def worked_sum(a: int, b: int) -> str:
    """Return a sum of two numbers below 100, worked from the units: "7+8=15, 2+5+1=8, 85"."""
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{carry}={tens}, {a + b}"


def write_data(folder: Path, seed: int) -> None:
    """Write texts, dialogs and questions; no stage sees the sums of the held-out questions."""
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(sums)
    held_out, known = sums[:200], sums[200:]

    def questions(some: list[tuple[int, int]], form: str = "What is {}+{}?") -> list[dict]:
        return [{"prompt": form.format(a, b), "answer": worked_sum(a, b)} for a, b in some]

    dialogs = [{"prompt": x["prompt"], "completion": x["answer"]} for x in questions(known[:8])]
    files = {
        "sums": [{"text": f"{a}+{b}: {worked_sum(a, b)}"} for _ in range(6) for a, b in known],
        "dialogs": dialogs,
        "questions": questions(known[400:]),
        "held_out": questions(held_out),
        "held_out_sums": questions(held_out, "{}+{}: "),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def summarize(out: Path) -> None:
    """Print ten answers and the accuracy after each stage; draw it, and the rewards of the last."""
    import matplotlib.pyplot as plt

    names = {"trained on sums": "sums", "8 dialogs": "sft", "rewards": "grpo"}
    results = {}
    for name, stage in names.items():
        rows = json.loads((out / f"{stage}_held_out.json").read_text())["results"]
        results[name] = next(row for row in rows if row["metric"] == "exact match")
    print("\nTen held-out questions and the model's answers:")
    for line in (out / "grpo_held_out.jsonl").read_text().splitlines()[:10]:
        row = json.loads(line)
        print(f"  {row['prompt']}  {row['completion']}  {'right' if row['exact'] else 'wrong'}")
    print("\nHeld-out questions that are answered exactly:")
    for name, row in results.items():
        print(f"  {name:16} {row['value']:6.1%} ± {row['stderr']:.1%}")

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    values, errors = ([100 * r[key] for r in results.values()] for key in ("value", "stderr"))
    bars = left.bar(list(results), values, yerr=errors, color=["0.7", "tab:blue", "tab:orange"])
    left.bar_label(bars, fmt="%.0f %%", padding=3)
    left.set(ylabel="answered exactly (%)", ylim=(0, 112), title="200 held-out sums")
    rows = read_metrics(out / "grpo/logs")["train"]
    right.plot([r["step"] for r in rows], [100 * r["reward"] for r in rows], color="tab:orange")
    right.set(xlabel="step of grpo", ylabel="sampled answers that are right (%)", ylim=(0, 100))
    right.set_title("reward during the last stage")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "accuracy.png", dpi=150)


if __name__ == "__main__":
    if sys.argv[1] == "data":
        write_data(Path(sys.argv[2]) / "data", int(sys.argv[3]))
    else:
        summarize(Path(sys.argv[2]))
