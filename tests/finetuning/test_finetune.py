import json
import re
import shutil
import signal

import pytest
import torch
from conftest import (
    ROOT,
    bad,
    environment,
    folders,
    kill,
    rows_written,
    run_until,
    script,
    start,
    torchrun,
    train_args,
    weights,
)
from test_chat import CHATML, byte_level_engine, folder_with_tokenizer

from config.recipes import parse_recipe
from finetuning.answers import pass_at_k
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained
from training.checkpoint import checksum, load_checkpoint
from training.saver import save_checkpoint
from utils.logger import read_metrics

SMALL = "--batch_size 4 --micro_batch_size 2 --max_lr 1e-3 --dtype float32 --device cpu --seed 3"
METHODS = {
    "sft": "",
    "dpo": "",
    "reward": "",
    "grpo": "--reward letters.py:share --group_size 4 --max_new_tokens 8 --updates 2",
}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """A model of 64 tokens, and beside it rows, a file of rewards, and a run on plain text."""
    run = tmp_path_factory.mktemp("base")
    script(*train_args(shards, run, 10, "--block_size", 64, "--recipe", "speedrun"))
    rows = [
        {"prompt": f"{i}?", "completion": f"say {i}", "chosen": f"{i}", "rejected": "no"}
        | {"answer": i}
        for i in range(1, 13)
    ]
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "bad.jsonl").write_text('{"prompt": "a"}\n')
    (run / "letters.py").write_text(
        "def share(prompt, completion, row):\n"
        "    return completion.count('e') / (1 + len(completion))\n"
    )
    script(*finetune_args(run, run / "plain", "sft", "--plain", "--max_steps", 1))
    (run / "hf").mkdir()
    (run / "hf/config.json").write_text("{}")
    return run


def finetune_args(base, run, method, *extra) -> list:
    """The command line of a small run of finetune.py in the folder `run`."""
    folders = ["--checkpoint_dir", run / "checkpoints", "--log_dir", run / "logs"]
    options = METHODS[method].replace("letters.py", str(base / "letters.py")).split()
    data = ["--init_from", base, "--data", base / "rows.jsonl"]
    return ["finetune.py", "--method", method, *data, *folders, *SMALL.split(), *options, *extra]


def rows(run, split="train") -> list[dict]:
    """Rows of a log without times."""
    found = read_metrics(run / "logs")[split]
    return [{k: v for k, v in row.items() if not k.endswith(("ms", "per_s"))} for row in found]


def samples(run) -> dict[str, str]:
    """Samples of a log by step, of each step the newest."""
    blocks = (run / "logs/samples.txt").read_text().split("--- step ")[1:]
    return dict(block.split("\n", 1) for block in blocks)


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
    assert load_checkpoint(saved)["config"]["init_from"].endswith("model_best.pt")
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    split = "held_out" if method == "grpo" else "val"
    assert rows(tmp_path / "killed", split) == rows(tmp_path / "whole", split)
    assert samples(tmp_path / "killed") == samples(tmp_path / "whole")
    assert (len(samples(tmp_path / "whole")) == 8) == (method == "grpo")
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sigterm_ends_the_texts_of_grpo_and_the_step_is_done_again(base, tmp_path):
    """The completions of a step take 64 forwards, and the reference 8."""
    args = finetune_args(base, tmp_path / "run", "grpo", "--max_steps", 3)
    env = environment() | {"STOP": "0:80", "PYTHONPATH": str(ROOT)}
    stopped = script("tests/stopping_script.py", *args, code=128 + signal.SIGTERM, env=env)
    assert "saved at step 1" in stopped.stdout, stopped.stderr
    script(*args, "--resume", "auto")
    script(*finetune_args(base, tmp_path / "whole", "grpo", "--max_steps", 3))
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


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


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_run_learns_as_a_plain_one(base, tmp_path, method):
    """Of grpo the sampling is compiled; held-out rows of other shapes are scored between steps."""
    args = ("--max_steps", 4, "--eval_data", base / "rows.jsonl", "--eval_every", 2)
    script(*finetune_args(base, tmp_path / "plain", method, *args))
    script(*finetune_args(base, tmp_path / "compiled", method, *args, "--use_torch_compile"))
    assert_close(tmp_path / "plain", tmp_path / "compiled", 1e-5)


def test_rewards_are_learned(base, tmp_path):
    """The share of a letter in the completions rises."""
    options = ("--max_steps", 30, "--batch_size", 8, "--micro_batch_size", 32, "--kl", 0)
    script(*finetune_args(base, tmp_path, "grpo", *options, "--max_lr", 3e-3))
    rewards = [row["reward"] for row in rows(tmp_path)]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    row = read_metrics(tmp_path / "logs")["train"][-1]
    assert 0 < row["rollout_ms"] < row["ms"]


def test_the_defaults_of_sft_teach_a_few_dialogs_of_one_kind(trained, tmp_path):
    dialogs = [{"prompt": f"{i}?", "completion": "yes"} for i in range(200)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dialogs))
    options = ["--method", "sft", "--init_from", trained, "--data", tmp_path / "data.jsonl"]
    script("finetune.py", *options, *folders(tmp_path), "--device", "cpu", "--dtype", "float32")
    assert rows(tmp_path)[-1]["loss"] < 0.1
    config = json.loads((tmp_path / "logs/config.json").read_text())["config"]
    assert config["batch_size"] * config["max_steps"] >= 3 * len(dialogs)


def test_a_reward_model_rates_for_grpo_and_writes_no_text(base, tmp_path):
    trained = tmp_path / "reward"
    options = ("--max_steps", 20, "--eval_data", base / "rows.jsonl", "--max_lr", 3e-3)
    script(*finetune_args(base, trained, "reward", *options))
    assert rows(trained, "val")[-1]["accuracy"] > 0.9
    options = ("--reward", trained, "--max_steps", 2)
    script(*finetune_args(base, tmp_path / "grpo", "grpo", *options))
    assert len({row["reward"] for row in rows(tmp_path / "grpo")}) == 2
    found = script("sample.py", "--checkpoint", trained, code=2)
    assert "is a reward model" in found.stderr
    found = script(*finetune_args(base, tmp_path, "grpo", "--reward", base), code=2)
    assert "model_best.pt is no reward model" in found.stderr
    state = load_checkpoint(trained / "checkpoints/model_last.pt")
    save_checkpoint(tmp_path / "gpt2.pt", state | {"tokenizer": "gpt2"})
    args = finetune_args(base, tmp_path, "grpo", "--reward", tmp_path / "gpt2.pt")
    assert "has another tokenizer" in script(*args, code=2).stderr


def test_questions_are_scored_during_and_after_fine_tuning(base, tmp_path):
    """The exact matches that are logged are those of evaluate.py."""
    questions = ("--questions", base / "rows.jsonl", "--max_new_tokens", 8)
    options = ("--batch_size", 12, "--max_steps", 60, "--max_lr", 1e-2, "--save_every", 0)
    pairs = [{"prompt": f"{i}?", "completion": str(i)} for i in range(1, 13)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    args = finetune_args(base, tmp_path, "sft", *questions, *options)
    args[args.index(base / "rows.jsonl")] = tmp_path / "data.jsonl"
    script(*args)
    logged = read_metrics(tmp_path / "logs")["answers"][-1]
    command = ("evaluate.py", "--checkpoint", tmp_path, "--tasks", base / "rows.jsonl")
    options = ("--max_new_tokens", 8, "--out", tmp_path / "t.json", "--dump", tmp_path / "d.jsonl")
    script(*command, *options, "--dtype", "float32")
    results = {r["metric"]: r for r in json.loads((tmp_path / "t.json").read_text())["results"]}
    assert results["exact match"]["value"] == logged["exact"] > 0.5
    assert list(results) == ["exact match", "pass@1", "pass@2", "pass@4", "pass@8"]
    values = [results[f"pass@{k}"]["value"] for k in (1, 2, 4, 8)]
    assert values == sorted(values) and 0 < values[0] < 1
    dumped = [json.loads(line) for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    assert sum(row["exact"] for row in dumped) == 12 * logged["exact"]
    assert sum(row["right_samples"] for row in dumped) / 96 == pytest.approx(values[0])
    chat = ("sample.py", "--checkpoint", tmp_path, "--chat", "--temperature", 0, "--prompt", "7?")
    assert script(*chat, "--dtype", "float32").stdout.strip() == dumped[6]["completion"]


@pytest.mark.parametrize(
    "extra, problem",
    [
        ("", "give --method"),
        ("--method sft --data {base}/none.jsonl", "none.jsonl cannot be read"),
        ("--method dpo --data {base}/bad.jsonl", 'bad.jsonl, line 1: there is no "chosen"'),
        ("--method grpo --reward exact --data {base}/bad.jsonl", 'line 1: there is no "answer"'),
        ("--method grpo", "needs --reward"),
        ("--method grpo --reward {base}/letters.py:none", "cannot be loaded: KeyError"),
        ("--method grpo --reward exakt", "exakt is none of exact, FILE.py:FUNCTION, and a chec"),
        ("--method grpo --reward {base}/letters.py", "is none of exact, FILE.py:FUNCTION"),
        ("--method grpo --reward {base}/hf", "is none of exact, FILE.py:FUNCTION"),
        ("--method sft --block_size 128", "--block_size 128 exceeds .* context of 64"),
        ("--method dpo --init_from {base}/plain", "on another kind of text: change --plain"),
        ("--method dpo --batch_size 3", "3 examples of a step do not divide by 2"),
        ("--method sft --max_lr -1", "--max_lr"),
        ("--method sft --resume {base}", "is of train.py"),
        ("--method ppo", "invalid choice"),
    ],
)
def test_a_mistake_gets_one_sentence(base, tmp_path, extra, problem):
    folders = ["--checkpoint_dir", tmp_path / "c", "--log_dir", tmp_path / "l"]
    defaults = ["--init_from", base, "--data", base / "rows.jsonl", *SMALL.split()]
    found = script("finetune.py", *folders, *defaults, *extra.format(base=base).split(), code=2)
    assert re.search(problem, found.stderr), found.stderr
    assert "Traceback" not in found.stderr and len(found.stderr.strip().splitlines()) <= 12


def test_answers_end_as_the_chat_template_ends_them(tmp_path):
    """Of a LLaMA whose end of text is another token: in scores, samples and the export."""
    engine = byte_level_engine()
    tokenizer = folder_with_tokenizer(tmp_path, engine, CHATML, eos_token_id=256)
    torch.manual_seed(0)
    shape = parse_recipe("llama").shape(32, 64, tokenizer.vocab_size)
    save_pretrained(GPT(GPTConfig(**shape, n_layer=1, n_head=1)), tmp_path, tokenizer.eot)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1?", "completion": "yes", "answer": "yes"}')
    data = ["--init_from", tmp_path, "--data", tmp_path / "rows.jsonl", *folders(tmp_path)]
    steps = ["--max_steps", 40, "--max_lr", 1e-2, "--batch_size", 1, "--device", "cpu"]
    questions = ["--questions", tmp_path / "rows.jsonl", "--max_new_tokens", 16]
    script("finetune.py", "--method", "sft", *data, *steps, *questions, "--dtype", "float32")
    answers = read_metrics(tmp_path / "logs")["answers"][-1]
    assert (answers["exact"], answers["cut"]) == (1, 0)
    checkpoint = tmp_path / "checkpoints/model_last.pt"
    chat = ["--chat", "--prompt", "1?", "--temperature", 0, "--json"]
    sample = json.loads(script("sample.py", "--checkpoint", checkpoint, *chat).stdout)
    assert (sample["text"], sample["finish"]) == ("yes", "end of text")
    script("convert.py", "--checkpoint", checkpoint, "--out", tmp_path / "hf")
    generation = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert generation["eos_token_id"] == [256, engine.token_to_id("<|im_end|>")]


def test_a_reward_that_fails_costs_no_checkpoint(base, tmp_path):
    script(*finetune_args(base, tmp_path, "sft", "--max_steps", 1))
    (tmp_path / "wrong.py").write_text("def reward(prompt, completion, row):\n    return 1 / 0\n")
    reward = ["--reward", f"{tmp_path}/wrong.py:reward", "--overwrite"]
    args = finetune_args(base, tmp_path, "grpo", *reward)
    bad(args, "wrong.py:reward fails for the first row", tmp_path)


def test_a_run_does_not_continue_with_another_reference_model(base, tmp_path):
    start_from = tmp_path / "start.pt"
    shutil.copy(base / "checkpoints/model_best.pt", start_from)
    script(*finetune_args(base, tmp_path, "dpo", "--init_from", start_from, "--max_steps", 2))
    state = load_checkpoint(start_from)
    state["model"]["transformer.wte.weight"][0, 0] += 1
    state["checksums"]["model"] = checksum(state["model"])
    save_checkpoint(tmp_path / "other.pt", state)
    again = ("finetune.py", "--resume", tmp_path, "--max_steps", 4, "--init_from")
    changed = script(*again, tmp_path / "other.pt", code=2)
    assert "other.pt has changed since this run began" in changed.stderr
    script(*again, start_from.rename(tmp_path / "moved.pt"))


def test_other_scripts_and_runs_are_refused(base, tmp_path):
    assert "is of finetune.py" in script("train.py", "--resume", base / "plain", code=2).stderr
    args = finetune_args(base, tmp_path, "sft", "--max_steps", 1)
    script(*args)
    assert "holds the checkpoints of another run" in script(*args, code=2).stderr
    script(*args, "--overwrite")


def test_pass_at_k_is_the_chance_that_one_of_k_draws_is_right():
    assert pass_at_k(8, 0, 8) == 0 and pass_at_k(8, 1, 8) == 1
    assert pass_at_k(4, 1, 1) == 0.25 and pass_at_k(4, 1, 2) == pytest.approx(0.5)
