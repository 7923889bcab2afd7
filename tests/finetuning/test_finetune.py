import gzip
import json
import re
import shutil

import pytest
import torch
from conftest import kill, rows_written, run_until, script, start, torchrun, train_args, weights
from utils.log_files import read_metrics

from finetuning.answers import pass_at_k
from training.checkpoint import checksum, load_checkpoint, save_checkpoint

SMALL = "--batch_size 4 --micro_batch_size 2 --max_lr 1e-3 --dtype float32 --device cpu --seed 3"
METHODS = {
    "sft": "",
    "dpo": "",
    "reward": "",
    "grpo": "--reward letters.py:share --group_size 4 --max_new_tokens 8 --updates 2",
}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """A model of 64 tokens, and the folder of rows beside it."""
    run = tmp_path_factory.mktemp("base")
    script(*train_args(shards, run, 10, "--block_size", 64, "--recipe", "speedrun,conv=3"))
    rows = [
        {
            "prompt": f"{i}?",
            "completion": f"say {i}",
            "chosen": f"{i}",
            "rejected": "no",
            "answer": i,
        }
        for i in range(1, 13)
    ]
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "letters.py").write_text(
        "def share(prompt, completion, row):\n"
        "    return completion.count('e') / (1 + len(completion))\n"
        "def wrong(prompt, completion, row):\n    return 'good'\n"
        "def fails(prompt, completion, row):\n    return 1 / 0\n"
        "def huge(prompt, completion, row):\n    return 10**400\n"
        "def edits(prompt, completion, row):\n"
        "    assert prompt == row['prompt'] == f\"{row['answer']}?\"\n"
        "    row['prompt'] = row['answer'] = 'other'\n"
        "    return len(completion)\n"
        "def leaves(prompt, completion, row):\n    raise SystemExit(0)\n"
    )
    return run


@pytest.fixture(scope="module")
def plain(base, tmp_path_factory):
    """A run that was fine-tuned on plain text."""
    run = tmp_path_factory.mktemp("plain")
    script(*finetune_args(base, run, "sft", "--plain", "--max_steps", 1))
    return run


def finetune_args(base, run, method, *extra) -> list:
    """The command line of a small run of finetune.py in the folder `run`."""
    folders = ["--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs"]
    options = METHODS[method].replace("letters.py", str(base / "letters.py")).split()
    data = ["--init_from", base, "--data", base / "rows.jsonl"]
    return ["finetune.py", "--method", method, *data, *folders, *SMALL.split(), *options, *extra]


def rows(run, split="train") -> list[dict]:
    """Rows of a log without times."""
    times = ("ms", "per_s")
    return [
        {k: v for k, v in row.items() if not k.endswith(times)}
        for row in read_metrics(run / "logs")[split]
    ]


def assert_close(run, other, tolerance=1e-4):
    """Compare the losses and the weights of two runs."""
    for a, b in zip(rows(run), rows(other), strict=True):
        for name in ("loss", "grad_norm", "reward", "kl", "margin"):
            if name in a:
                assert a[name] == pytest.approx(b[name], abs=tolerance, rel=tolerance), (a, b)
    theirs = weights(other)
    for name, weight in weights(run).items():
        torch.testing.assert_close(weight, theirs[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_continues_to_the_last_digit(base, tmp_path, method):
    """Completions, losses and weights equal those of a run that was never stopped."""
    steps = ("--max_steps", 8, "--save_every", 3, "--sample_every", 1)
    steps += ("--dropout", 0.1) if method in ("sft", "reward") else ()
    evaluations = ("--eval_data", base / "rows.jsonl", "--eval_every", 4)
    args = [*steps, *evaluations]
    script(*finetune_args(base, tmp_path / "whole", method, *args))
    killed = finetune_args(base, tmp_path / "killed", method, *args, "--resume", "auto")
    process = start(*killed)
    saved = tmp_path / "killed/checkpoints/model_last.pt"
    run_until(process, lambda: saved.exists() and rows_written(tmp_path / "killed") >= 4)
    kill(process)
    assert rows_written(tmp_path / "killed") < 8
    assert "resumed at step" in script(*killed).stdout
    assert load_checkpoint(saved)["finetune"]["init_from"].endswith("model_best.pt")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    split = "held_out" if method == "grpo" else "val"
    assert rows(tmp_path / "killed", split) == rows(tmp_path / "whole", split)
    texts = [(tmp_path / run / "logs/samples.txt").read_bytes() for run in ("whole", "killed")]
    assert texts[0] == texts[1] and (len(texts[0]) > 100) == (method == "grpo")
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    "method, sharding",
    [("sft", "zero2"), ("reward", "zero1"), ("dpo", "none"), ("grpo", "none"), ("grpo", "zero3")],
)
def test_two_processes_and_shardings_equal_one(base, tmp_path, method, sharding):
    args = ("--max_steps", 4, "--eval_data", base / "rows.jsonl")
    script(*finetune_args(base, tmp_path / "one", method, *args))
    two = finetune_args(base, tmp_path / "two", method, *args, "--sharding", sharding)
    torchrun(2, *two)
    assert_close(tmp_path / "one", tmp_path / "two")
    split = "held_out" if method == "grpo" else "val"
    for a, b in zip(rows(tmp_path / "one", split), rows(tmp_path / "two", split), strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_micro_batches_change_only_the_rounding(base, tmp_path):
    for size in (1, 4):
        run = tmp_path / str(size)
        script(*finetune_args(base, run, "sft", "--max_steps", 3, "--micro_batch_size", size))
    assert_close(tmp_path / "1", tmp_path / "4", 1e-5)


def test_rewards_are_learned(base, tmp_path):
    """The share of a letter in the completions rises."""
    options = ("--max_steps", 30, "--batch_size", 8, "--micro_batch_size", 32, "--kl", 0)
    script(*finetune_args(base, tmp_path, "grpo", *options, "--max_lr", 3e-3))
    rewards = [row["reward"] for row in rows(tmp_path)]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    row = read_metrics(tmp_path / "logs")["train"][-1]
    parts = row["rollout_ms"] + row["scoring_ms"] + row["update_ms"]
    assert parts == pytest.approx(row["ms"]) and row["rollout_tokens_per_s"] > 0


def test_a_reward_model_rates_for_grpo_and_writes_no_text(base, tmp_path):
    trained = tmp_path / "reward"
    options = ("--max_steps", 20, "--eval_data", base / "rows.jsonl", "--max_lr", 3e-3)
    script(*finetune_args(base, trained, "reward", *options))
    assert rows(trained, "val")[-1]["accuracy"] > 0.9
    options = ("--reward", trained, "--max_steps", 2)
    script(*finetune_args(base, tmp_path / "grpo", "grpo", *options))
    assert len({row["reward"] for row in rows(tmp_path / "grpo")}) == 2
    for command in (("sample.py",), ("evaluate.py", "--tasks", base / "rows.jsonl")):
        found = script(*command, "--checkpoint", trained, code=2)
        assert "is a reward model" in found.stderr
    found = script("convert.py", "--checkpoint", trained, "--out", tmp_path / "hf", code=2)
    assert "is a reward model" in found.stderr


def test_questions_are_scored_during_and_after_fine_tuning(base, tmp_path):
    """The exact matches that are logged are those of evaluate.py."""
    questions = ("--questions", base / "rows.jsonl", "--max_new_tokens", 8)
    options = ("--max_steps", 60, "--max_lr", 1e-2, "--save_every", 0)
    pairs = [{"prompt": f"{i}?", "completion": str(i)} for i in range(1, 13)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    args = finetune_args(base, tmp_path, "sft", *questions, *options)
    args[args.index(base / "rows.jsonl")] = tmp_path / "data.jsonl"
    script(*args)
    logged = read_metrics(tmp_path / "logs")["answers"][-1]
    command = ("evaluate.py", "--checkpoint", tmp_path, "--tasks", base / "rows.jsonl")
    options = ("--max_new_tokens", 8, "--out", tmp_path / "t.json", "--dump", tmp_path / "d.jsonl")
    script(*command, *options)
    results = {r["metric"]: r for r in json.loads((tmp_path / "t.json").read_text())["results"]}
    assert results["exact match"]["value"] == logged["exact"] > 0.5
    assert list(results) == ["exact match", "pass@1", "pass@2", "pass@4", "pass@8"]
    values = [results[f"pass@{k}"]["value"] for k in (1, 2, 4, 8)]
    assert values == sorted(values) and 0 < values[0] < 1
    dumped = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert sum(row["exact"] for row in dumped) == 12 * logged["exact"]
    assert sum(row["right_samples"] for row in dumped) / 96 == pytest.approx(values[0])
    chat = ("sample.py", "--checkpoint", tmp_path, "--chat", "--temperature", 0)
    chat += ("--dtype", "float32")
    said = script(*chat, "--prompt", "7?")
    assert said.stdout.strip() == dumped[6]["completion"]
    talk = "7?\n8?\n/new\n7?\n/quit\n"
    out = script(*chat, input=talk)
    assert out.stdout.count(f"> {dumped[6]['completion']}\n") >= 2


def test_a_chat_is_exported_with_its_template(base, tmp_path):
    transformers = pytest.importorskip("transformers")
    args = finetune_args(base, tmp_path / "sft", "sft", "--max_steps", 1)
    args[args.index(base)] = gpt2 = tmp_path / "gpt2.pt"
    from model.config import GPTConfig
    from model.gpt import GPT
    from model.huggingface import save_pretrained

    shape = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 64}
    save_pretrained(GPT(GPTConfig(vocab_size=257, **shape)), tmp_path / "hf")
    script("convert.py", "--model", tmp_path / "hf", "--out", gpt2)
    script(*args)
    script("convert.py", "--checkpoint", tmp_path / "sft", "--out", tmp_path / "chat")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "chat")
    messages = [{"role": "user", "content": "7?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|endoftext|>User: 7?<|endoftext|>Assistant:"


@pytest.mark.parametrize(
    "extra, problem",
    [
        ("--method sft --data {base}/none.jsonl", "none.jsonl cannot be read"),
        ("--method dpo --data {base}/bad.jsonl", 'bad.jsonl, line 1: there is no "chosen"'),
        ("--method grpo --reward exact --data {base}/bad.jsonl", 'line 1: there is no "answer"'),
        ("--method grpo", "needs --reward"),
        ("--method grpo --reward {base}/letters.py:none", "has no function 'none'"),
        (
            "--method grpo --reward {base}/letters.py:wrong --max_new_tokens 8",
            "line [0-9]+.*returned 'good'",
        ),
        (
            "--method grpo --reward {base}/letters.py:fails --max_new_tokens 8",
            "line [0-9]+.*ZeroDivisionError",
        ),
        ("--method grpo --reward {base}", "is no reward model"),
        ("--method grpo --reward exact --max_new_tokens 60", "line 1: a prompt of .* exceeds"),
        ("--method sft --block_size 16", "line 1: the prompt has 20 tokens"),
        ("--method sft --block_size 128", "--block_size 128 is more than the context"),
        ("--method dpo --init_from {plain}", "was fine-tuned on plain text: give --plain"),
        ("--method sft --data {base}/list.jsonl", "line 1: expected a JSON object.*jq -c"),
        ("--method sft --data {base}/pretty.jsonl", "line 1, is not JSON.*one object a line"),
        ("--method sft --data {base}/rows.jsonl.gz", "is not UTF-8 text: unpack it"),
        ("--method sft --data {base}/bad.jsonl", 'needs "messages", or "prompt" and "completion"'),
        ("--resume auto", "give --method"),
        ("--resume {plain} --max_steps 0", "at step 1, after --max_steps 0"),
        ("--method sft --batch_size 3", "--batch_size 3 is not divisible by --micro_batch_size 2"),
        ("--method sft --max_lr -1", "--max_lr"),
        ("--method sft --resume {base}", "written by train.py"),
        ("--init_from {base}", "give --method"),
        ("--method sft --data {base}/empty.jsonl", "holds no rows"),
        ("--method ppo", "invalid choice"),
        ("--method sft --updates 2", "--method sft has no use for --updates"),
        ("--method dpo --dropout 0.1", "--method dpo has no use for --dropout"),
        ("--method reward --questions {base}/rows.jsonl", "has no use for --questions"),
        ("--method grpo {short} --reward {base}/letters.py", "names no function"),
        (
            "--method grpo {short} --reward {base}/letters.py:huge",
            "a number from -1e.100 to 1e.100",
        ),
        ("--method grpo {short} --reward {base}/letters.py:leaves", "line [0-9]+.*SystemExit"),
    ],
)
def test_a_mistake_gets_one_sentence(base, plain, tmp_path, extra, problem):
    (base / "bad.jsonl").write_text('{"prompt": "a"}\n')
    (base / "empty.jsonl").write_text("")
    (base / "list.jsonl").write_text("[{}]")
    (base / "pretty.jsonl").write_text('{\n"prompt": "a"}\n')
    (base / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    given = extra.format(base=base, plain=plain, short="--max_new_tokens 8").split()
    defaults = {"--init_from": base, "--data": base / "rows.jsonl"}
    defaults = [x for k, v in defaults.items() if k not in given for x in (k, v)]
    folders = ["--checkpoint_dir", tmp_path / "c", "--log_dir", tmp_path / "l"]
    small = zip(SMALL.split()[::2], SMALL.split()[1::2], strict=True)
    small = [x for k, v in small if k not in given for x in (k, v)]
    found = script("finetune.py", *small, *defaults, *folders, *given, code=2)
    assert re.search(problem, found.stderr), found.stderr
    assert "Traceback" not in found.stderr and len(found.stderr.strip().splitlines()) <= 12


def test_a_run_does_not_continue_with_another_reference_model(base, tmp_path):
    """Another file of rows is a warning."""
    start_from, rows = tmp_path / "start.pt", tmp_path / "rows.jsonl"
    shutil.copy(base / "checkpoints/model_best.pt", start_from)
    shutil.copy(base / "rows.jsonl", rows)
    args = finetune_args(base, tmp_path, "dpo", "--init_from", start_from, "--data", rows)
    script(*args, "--max_steps", 2)
    rows.write_text(rows.read_text() * 2)
    again = ("finetune.py", "--resume", tmp_path, "--max_steps")
    assert "rows.jsonl has changed" in script(*again, 3).stdout
    state = load_checkpoint(start_from)
    state["model"]["transformer.wte.weight"][0, 0] += 1
    state["checksums"]["model"] = checksum(state["model"])
    save_checkpoint(tmp_path / "other.pt", state)
    (tmp_path / "other.pt").replace(tmp_path / "changed.pt")
    changed = script(*again, 4, "--init_from", tmp_path / "changed.pt", code=2)
    assert "changed.pt has changed since this run began" in changed.stderr
    start_from.rename(tmp_path / "moved.pt")
    assert "give its new place by --init_from" in script(*again, 4, code=2).stderr
    script(*again, 4, "--init_from", tmp_path / "moved.pt")


def test_a_resumed_run_keeps_its_method_and_forgets_the_best_loss_of_other_rows(base, tmp_path):
    args = finetune_args(base, tmp_path, "sft", "--eval_data", base / "rows.jsonl")
    script(*args, "--max_steps", 2)
    again = ("finetune.py", "--resume", tmp_path, "--max_steps", 3)
    for option in (("--method", "dpo"), ("--dropout", 0.5), ("--block_size", 40), ("--plain",)):
        found = script(*again, *option, code=2)
        assert f"is of a run with {option[0]}" in found.stderr
    (tmp_path / "other.jsonl").write_text((base / "rows.jsonl").read_text().replace("say", "xqz"))
    script(*again, "--eval_data", tmp_path / "other.jsonl", "--eval_every", 0, "--block_size", 64)
    best = load_checkpoint(tmp_path / "checkpoints/model_best.pt")
    assert best["step"] == 3 and best["best_loss"] == rows(tmp_path, "val")[-1]["loss"]


def test_a_best_loss_of_other_rows_stays_forgotten(base, tmp_path):
    """Also where the run was stopped before it was evaluated on its new rows."""
    evaluated = ("--eval_data", base / "rows.jsonl", "--eval_every", 2)
    script(*finetune_args(base, tmp_path, "sft", *evaluated, "--max_steps", 2, "--max_lr", 0))
    (tmp_path / "other.jsonl").write_text((base / "rows.jsonl").read_text().replace("say", "xqz"))
    again = ("finetune.py", "--resume", tmp_path, "--eval_data", tmp_path / "other.jsonl")
    again += ("--eval_every", 1000, "--save_every", 1, "--max_steps", 1000)
    process = start(*again)
    run_until(process, lambda: rows_written(tmp_path) > 4)
    kill(process)
    last = load_checkpoint(tmp_path / "checkpoints/model_last.pt")
    script(*again, "--max_steps", last["step"] + 1)
    best = load_checkpoint(tmp_path / "checkpoints/model_best.pt")
    assert best["step"] > 2 and best["best_loss"] == rows(tmp_path, "val")[-1]["loss"]


def test_a_run_killed_before_its_first_checkpoint_begins_again_with_its_options(base, tmp_path):
    script(*finetune_args(base, tmp_path / "whole", "sft", "--max_steps", 6))
    process = start(*finetune_args(base, tmp_path / "killed", "sft", "--max_steps", 6))
    run_until(process, lambda: rows_written(tmp_path / "killed") >= 2)
    kill(process)
    for path in (tmp_path / "killed/checkpoints").glob("*.pt"):
        path.unlink()
    run = tmp_path / "killed"
    folders = ("--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs")
    found = script("finetune.py", *folders, "--resume", "auto")
    assert "beginning again with those of" in found.stdout
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")


def test_a_reward_function_may_change_its_row(base, tmp_path):
    run = finetune_args(base, tmp_path, "grpo", "--max_steps", 6, "--updates", 1)
    run[run.index(f"{base}/letters.py:share")] = f"{base}/letters.py:edits"
    script(*run, "--sample_every", 1)
    assert "other" not in (tmp_path / "logs/samples.txt").read_text()


def test_steps_that_are_not_finite_end_a_run_before_them(base, tmp_path):
    """Also with several updates a step."""
    state = load_checkpoint(base / "checkpoints/model_best.pt")
    state["model"]["transformer.ln_f.weight"][0] = torch.nan
    state["checksums"]["model"] = checksum(state["model"])
    save_checkpoint(tmp_path / "nan.pt", state)
    options = ("--init_from", tmp_path / "nan.pt", "--max_steps", 20)
    found = script(*finetune_args(base, tmp_path, "grpo", *options), code=2)
    assert "5 steps in a row had no finite loss" in found.stderr
    state = load_checkpoint(tmp_path / "checkpoints/model_last.pt")
    assert (state["step"], state["tokens"]) == (0, 0)


def test_another_tokenizer_and_other_scripts_are_refused(base, shards, tmp_path):
    trained = tmp_path / "reward"
    script(*finetune_args(base, trained, "reward", "--max_steps", 1))
    state = load_checkpoint(trained / "checkpoints/model_last.pt")
    save_checkpoint(tmp_path / "gpt2.pt", state | {"tokenizer": "gpt2"})
    args = finetune_args(base, tmp_path / "grpo", "grpo", "--reward", tmp_path / "gpt2.pt")
    assert "has gpt2 tokens, the model bytes" in script(*args, code=2).stderr
    script(*finetune_args(base, tmp_path / "sft", "sft", "--max_steps", 1))
    small = ("--block_size", 64, "--data_dir", shards)
    found = script("train.py", "--init_from", trained, *small, code=2)
    assert "a reward model is trained by finetune.py" in found.stderr
    found = script("train.py", "--resume", tmp_path / "sft", code=2)
    assert "was written by finetune.py" in found.stderr
    again = script(*finetune_args(base, tmp_path / "sft", "sft", "--max_steps", 1), code=2)
    assert "holds the checkpoints of another run" in again.stderr
    script(*finetune_args(base, tmp_path / "sft", "sft", "--max_steps", 1, "--overwrite"))


def test_pass_at_k_is_the_chance_that_one_of_k_draws_is_right():
    assert pass_at_k(8, 0, 8) == 0 and pass_at_k(8, 1, 8) == 1
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == pytest.approx(0.5)
