"""Teach a small model to answer questions: bash train.sh chat_demo, or python -m scripts.chat_demo.

Three stages on sums made on the spot. Training on worked sums teaches to add, but not to answer; 8
questions with answers teach the form of an answer, but few right ones; rewards for right answers do
the rest. --preferences instead compares DPO and a reward model on a preference: to show
the work. Killed, it continues where it was.
"""

import json
import math
import random
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import torch
from training.checkpoint_folder import open_model
from utils.log_files import read_metrics

from data.tokenizer import ByteTokenizer
from finetuning.answers import Questions
from finetuning.chat import encode_completion
from finetuning.examples import collate
from finetuning.methods import token_logprobs
from utils.cli import run
from utils.distributed import Process
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
NEXT = """What to try next:
  python sample.py --checkpoint {out}/grpo --chat           talk to it: What is 27+58?
  python -m scripts.chat_demo --preferences                 DPO and a reward model
  python finetune.py --method sft --init_from gpt2 --data chat.jsonl    a chat of your own"""
SETTINGS = {
    "train": "--recipe modern,window=None --n_layer 4 --n_head 4 --n_embd 128 --block_size 96 "
    "--micro_batch_size 32 --total_batch_size 3072 --max_steps 500 --warmup_steps 50 --beta2 0.99 "
    "--eval_every 100 --sample_every 0 --save_every 250 --val_tokens 49152",
    "sft": "--method sft --batch_size 4 --micro_batch_size 4 --max_steps 20 --max_lr 5e-4 "
    "--eval_every 10",
    "grpo": "--method grpo --reward exact --batch_size 16 --group_size 8 --micro_batch_size 128 "
    "--kl 0.01 --max_steps 80 --max_lr 3e-4 --eval_every 20",
    "mixed": "--method sft --batch_size 4 --micro_batch_size 4 --max_steps 60 --max_lr 1e-3",
    "dpo": "--method dpo --batch_size 16 --micro_batch_size 16 --max_steps 40 --max_lr 1e-4 "
    "--eval_every 20",
    "reward": "--method reward --batch_size 16 --micro_batch_size 16 --max_steps 40 "
    "--max_lr 3e-4 --eval_every 20",
}


@dataclass
class DemoConfig:
    """Teach a small model to answer questions, offline, in a few minutes on two cores."""

    out: Path = Path("runs/chat_demo")
    """Folder for data, checkpoints, logs and the picture."""
    seed: int = 1
    """Seed of sums, weights and completions."""
    preferences: bool = False
    """Compare DPO and a reward model on a preference instead of the last stage."""


def worked_sum(a: int, b: int) -> str:
    """Return a sum of two numbers below 100, worked from the units: "7+8=15, 2+5+1=8, 85"."""
    units = a % 10 + b % 10
    carry = units // 10
    tens = a // 10 + b // 10 + carry
    return f"{a % 10}+{b % 10}={units}, {a // 10}+{b // 10}+{carry}={tens}, {a + b}"


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a .jsonl file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(folder: Path, seed: int) -> None:
    """Write texts, questions and pairs; no stage sees the sums of the held-out questions."""
    seed_file = folder / "seed"
    if seed_file.exists() and seed_file.read_text() != str(seed):
        raise UserError(f"{folder} is of --seed {seed_file.read_text()}; give another --out")
    numbers = random.Random(seed)
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    numbers.shuffle(sums)
    held_out, known = sums[:200], sums[200:]

    def questions(some: list[tuple[int, int]]) -> list[dict]:
        return [{"prompt": f"What is {a}+{b}?", "answer": worked_sum(a, b)} for a, b in some]

    folder.mkdir(parents=True, exist_ok=True)
    seed_file.write_text(str(seed))
    texts = [{"text": f"{a}+{b}: {worked_sum(a, b)}"} for _ in range(6) for a, b in known]
    write_rows(folder / "sums.jsonl", texts)
    plain = [{"prompt": f"{a}+{b}: ", "answer": worked_sum(a, b)} for a, b in held_out]
    write_rows(folder / "held_out_sums.jsonl", plain)
    write_rows(folder / "held_out.jsonl", questions(held_out))
    write_rows(folder / "questions.jsonl", questions(known[400:]))
    answered = questions(known[:200])
    write_rows(
        folder / "dialogs.jsonl",
        [{"prompt": row["prompt"], "completion": row["answer"]} for row in answered[:8]],
    )
    # of two answers to each question one shows its work; the first stage sees both equally often
    short = [row["answer"].split()[-1] for row in answered]
    mixed = [
        {"prompt": row["prompt"], "completion": text}
        for row, number in zip(answered, short, strict=True)
        for text in (row["answer"], number)
    ]
    write_rows(folder / "mixed.jsonl", mixed)
    for name, some in (("pairs", known[400:800]), ("held_out_pairs", held_out)):
        rows = questions(some)
        write_rows(
            folder / f"{name}.jsonl",
            [
                {"prompt": r["prompt"], "chosen": r["answer"], "rejected": r["answer"].split()[-1]}
                for r in rows
            ],
        )


def call(script: str, *options: str | Path) -> None:
    """Show a command and run it; end with its exit code if it fails."""
    command = [script, *map(str, options)]
    print(f"\n$ python {shlex.join(command)}", flush=True)
    found = subprocess.run([sys.executable, str(ROOT / script), *command[1:]])
    if found.returncode:
        sys.exit(found.returncode)


def train(out: Path, seed: int) -> None:
    """Train a model on worked sums."""
    call(
        *("data/fineweb-edu.py", "--input", out / "data/sums.jsonl", "--tokenizer", "bytes"),
        *("--local_dir", out / "shards"),
    )
    folders = ["--checkpoint_dir", out / "sums/checkpoints", "--log_dir", out / "sums/logs"]
    call(
        *("train.py", "--data_dir", out / "shards", *folders, "--seed", str(seed)),
        *("--resume", "auto", *SETTINGS["train"].split()),
    )


def finetune(
    out: Path, seed: int, stage: str, init_from: str, rows: str, *options: str | Path
) -> None:
    """Fine-tune the model of the stage `init_from` on rows."""
    folders = ["--checkpoint_dir", out / stage / "checkpoints", "--log_dir", out / stage / "logs"]
    call(
        *("finetune.py", *SETTINGS[stage].split(), "--init_from", out / init_from),
        *("--data", out / "data" / f"{rows}.jsonl", *folders, "--max_new_tokens", "32"),
        *("--seed", str(seed), "--resume", "auto", *options),
    )


def accuracies(out: Path, stage: str, name: str, *options: str) -> dict[str, dict]:
    """Return the metrics of a stage on held-out questions, those of evaluate.py."""
    table = out / f"{stage}_{name}.json"
    call(
        *("evaluate.py", "--checkpoint", out / stage, "--tasks", out / "data" / f"{name}.jsonl"),
        *("--num_samples", "4", "--max_new_tokens", "32", "--batch_size", "200"),
        *("--out", table, "--dump", out / f"{stage}_{name}.jsonl", *options),
    )
    rows = json.loads(table.read_text())["results"]
    return {row["metric"]: row for row in rows}


def teach(config: DemoConfig) -> None:
    """Run the three stages; print and draw the accuracy after each."""
    out, seed = config.out, config.seed
    train(out, seed)
    continued = accuracies(out, "sums", "held_out_sums")
    stages = {"trained on sums": accuracies(out, "sums", "held_out", "--chat")}
    held_out = ("--questions", out / "data/held_out.jsonl")
    finetune(out, seed, "sft", "sums", "dialogs", *held_out)
    stages["8 dialogs"] = accuracies(out, "sft", "held_out")
    finetune(out, seed, "grpo", "sft", "questions", *held_out)
    stages["rewards"] = accuracies(out, "grpo", "held_out")
    draw(stages, out)
    print("\nTen held-out questions and the model's answers:")
    for line in (out / "grpo_held_out.jsonl").read_text().splitlines()[:10]:
        row = json.loads(line)
        print(f"  {row['prompt']}  {row['completion']}  {'right' if row['exact'] else 'wrong'}")
    print(
        "\nHeld-out questions that are answered exactly (sums continued in their own form: "
        f"{continued['exact match']['value']:.1%}):"
    )
    for name, metrics in stages.items():
        exact, sampled = metrics["exact match"], metrics["pass@1"]
        error = exact["stderr"]
        print(f"  {name:16} {exact['value']:6.1%} ± {error:.1%}, of samples {sampled['value']:.1%}")
    result = {name: metrics["exact match"]["value"] for name, metrics in stages.items()}
    (out / "result.json").write_text(json.dumps(result))
    print(f"\nThe picture is {out}/accuracy.png. {NEXT.format(out=out)}")


def draw(stages: dict[str, dict], out: Path) -> None:
    """Draw the accuracy after each stage, and the mean reward during the last one."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    exact = [metrics["exact match"] for metrics in stages.values()]
    values, errors = ([100 * row[key] for row in exact] for key in ("value", "stderr"))
    bars = left.bar(list(stages), values, yerr=errors, color=["0.7", "tab:blue", "tab:orange"])
    left.bar_label(bars, fmt="%.0f %%", padding=3)
    left.set(ylabel="answered exactly (%)", ylim=(0, 112), title="200 held-out sums")
    rows = read_metrics(out / "grpo/logs")["train"]
    right.plot([r["step"] for r in rows], [100 * r["reward"] for r in rows], color="tab:orange")
    right.set(xlabel="step of grpo", ylabel="sampled answers that are right (%)", ylim=(0, 100))
    right.set_title("reward during the last stage")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "accuracy.png", dpi=150)


def prefer(config: DemoConfig) -> None:
    """Teach both ways to answer, then the preferred one by DPO; train a reward model on the same
    pairs."""
    out, seed = config.out, config.seed
    train(out, seed)
    finetune(out, seed, "mixed", "sums", "mixed")
    held_out = ("--eval_data", out / "data/held_out_pairs.jsonl")
    for method in ("dpo", "reward"):
        finetune(out, seed, method, "mixed", "pairs", *held_out)
    before, _ = preferred_share(out, "mixed", seed)
    after, kl = preferred_share(out, "dpo", seed)
    ranked = read_metrics(out / "reward/logs")["val"][-1]["accuracy"]
    print(f"\nSampled answers that show the work: {before:.1%} before DPO, {after:.1%} after it")
    print(f"KL divergence of an answer from the model before DPO: {kl:.2f} nats")
    print(f"Held-out pairs that the reward model ranks right: {ranked:.1%}")
    result = {"before": before, "after": after, "kl": kl, "ranked": ranked}
    (out / "preferences.json").write_text(json.dumps(result))


def preferred_share(out: Path, stage: str, seed: int) -> tuple[float, float]:
    """Return the share of sampled answers to held-out questions that show their work, and their
    mean log-probability in nats beyond that by the model before DPO: the KL divergence."""
    alone, path = Process(0, 0, 1, torch.device("cpu")), out / "data/held_out.jsonl"
    model, before = (open_model(out / name, None, exact=True)[0] for name in (stage, "mixed"))
    setup = (ByteTokenizer(), model.config.block_size, alone, torch.float32)
    asked = Questions(path, *setup, chat=True, max_new_tokens=32, batch_size=256)
    texts = asked.texts(model, temperature=1.0, seed=seed)
    examples = [
        encode_completion(row["prompt"], text, asked.tokenizer, chat=True)
        for row, text in zip(asked.rows, texts, strict=True)
    ]
    batch = collate(examples, model.config.block_size)
    batch = {name: torch.from_numpy(values) for name, values in batch.items()}
    with torch.no_grad():
        nats = token_logprobs(model, batch).sum(1) - token_logprobs(before, batch).sum(1)
    return sum("=" in text for text in texts) / len(texts), nats.mean().item()


def main(config: DemoConfig) -> None:
    began = time.monotonic()
    print(NEXT.format(out=config.out) if not config.preferences else __doc__.splitlines()[0])
    write_data(config.out / "data", config.seed)
    (prefer if config.preferences else teach)(config)
    print(f"took {math.ceil(time.monotonic() - began)} s")


if __name__ == "__main__":
    run(main, DemoConfig)
