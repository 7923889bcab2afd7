"""finetune.py as users run it: resumed, on two processes, compiled, and what it refuses."""

import functools
import json
import shutil
import signal
import sys

import pytest
import torch
from conftest import (
    ROOT,
    contents,
    environment,
    folders,
    read_rows,
    script,
    slow,
    torchrun,
    train_args,
    user_error,
    wandb_variables,
    weights,
    write_rows,
)
from test_chat import CHATML, byte_level_backend, folder_with_tokenizer

import finetune
from data.tokenizer import load_tokenizer
from finetuning.completions import Completion
from finetuning.examples import TextEncoder
from finetuning.rewards import load_reward_function
from model.config import GPTConfig
from model.formats.checkpoint import load_checkpoint, load_model
from model.formats.huggingface import save_pretrained
from model.gpt import GPT
from utils.distributed import ALONE
from utils.errors import UserError
from utils.logger import read_metrics

SMALL = "--batch_size 4 --micro_batch_size 2 --max_lr 1e-3 --dtype float32 --device cpu --seed 3"
STEPS = "--max_steps 4 --save_every 2 --keep_last 2 --sample_every 1 --eval_every 2"
METHODS = {
    "sft": "",
    "dpo": "",
    "reward": "--dropout 0.1",
    "grpo": "--reward letters.py:share --group_size 4 --max_new_tokens 8",
}


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory):
    """A model of 64 tokens, and beside it rows, rewards, and a run on plain text."""
    run = tmp_path_factory.mktemp("base")
    script(*train_args(shards, run, 10, "--block_size", 64, "--recipe", "modern"))
    rows = []
    for i in range(1, 13):
        row = {"prompt": f"{i}?", "completion": f"{i}", "chosen": f"{i}", "rejected": "no"}
        rows.append(row | {"answer": i})
    write_rows(run / "rows.jsonl", rows)
    write_rows(run / "few.jsonl", rows[:4])
    write_rows(run / "reversed.jsonl", rows[::-1])
    write_rows(run / "bad.jsonl", [{"prompt": "a"}])
    (run / "letters.py").write_text(
        "def share(prompt, completion, row):\n"
        "    return completion.count('e') / (1 + len(completion))\n"
        "def fails(prompt, completion, row):\n"
        "    return 1 / 0\n"
        "calls = []\n"
        "def fails_later(prompt, completion, row):\n"
        "    import math, os\n"
        "    calls.append(prompt)\n"
        "    return 1.0 if os.environ['RANK'] == '0' or len(calls) < 12 else math.nan\n"
    )
    script(*finetune_args(run, run / "plain", "sft", "--plain", "--max_steps", 1))
    (run / "hf").mkdir()
    (run / "hf/config.json").write_text("{}")  # of a reward model in Hugging Face's format
    return run


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A function that returns a run of a method which was never stopped, by STEPS."""

    @functools.cache
    def get(method):
        run = tmp_path_factory.mktemp(method)
        script(*steps_args(base, run, method))
        return run

    return get


def finetune_args(base, run, method, *extra):
    """The command line of a small run of finetune.py in the folder `run`."""
    options = METHODS[method].replace("letters.py", str(base / "letters.py"))
    data = ["--init_from", base, "--data", base / "rows.jsonl", *folders(run)]
    return ["finetune.py", "--method", method, *data, *SMALL.split(), *options.split(), *extra]


def steps_args(base, run, method, *extra):
    """The command line of a run by STEPS."""
    data = ("--eval_data", base / "few.jsonl")
    return finetune_args(base, run, method, *STEPS.split(), *data, *extra)


def metrics_of(run, split="train"):
    """Metrics of a log without times, and without the tokens, of which some are padding."""
    left_out = ("ms", "per_s", "split", "mfu", "tokens")
    return [
        {name: value for name, value in metrics.items() if not name.endswith(left_out)}
        for metrics in read_metrics(run / "logs").get(split, [])
    ]


def exact_share(run, questions, longest, *extra):
    """The share of questions that the model of a run answers exactly, by evaluate.py."""
    table = run / "table.json"
    asked = ("--tasks", questions, "--max_new_tokens", longest, "--out", table, *extra)
    script("evaluate.py", "--checkpoint", run, *asked)
    (result,) = json.loads(table.read_text())["results"]
    assert result["metric"] == "exact match"
    return result["value"]


def samples(run):
    return (run / "logs/samples.txt").read_text().split("--- step ")


def assert_close(run, other, tolerance):
    """Compare the weights of two runs, and their metrics from the first step of `run` on."""
    for split in ("train", "val", "held_out"):
        found, expected = metrics_of(run, split), metrics_of(other, split)
        for ours, theirs in zip(found, expected[-len(found) :], strict=True):
            assert ours == pytest.approx(theirs, abs=tolerance, rel=tolerance)
    torch.testing.assert_close(weights(run), weights(other), atol=tolerance, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_resumed_run_continues_to_the_last_digit(base, whole, tmp_path, method):
    """Completions, losses and weights equal those of a run that was never stopped."""
    complete = whole(method)
    checkpoint_path = complete / "checkpoints/model_step_000002.pt"
    resumed = script("finetune.py", "--resume", checkpoint_path, *folders(tmp_path))
    assert "resumed at step 2" in resumed.stdout
    assert load_checkpoint(checkpoint_path)["config"]["init_from"].endswith("model_best.pt")
    assert_close(tmp_path, complete, 0)
    assert len(samples(complete)) == (5 if method == "grpo" else 1)
    assert samples(tmp_path)[1:] == samples(complete)[3:]


def test_sigterm_ends_the_texts_of_grpo_and_the_step_is_done_again(base, whole, tmp_path):
    """Held-out completions take 16 forwards, those of a step 64, and the reference 8."""
    args = steps_args(base, tmp_path, "grpo")
    env = environment() | {"STOP": "0:108", "PYTHONPATH": str(ROOT)}
    stopped = script("tests/stopping_script.py", *args, code=128 + signal.SIGTERM, env=env)
    assert "saved at step 1" in stopped.stdout, stopped.stderr
    script(*args, "--resume", "auto")
    assert metrics_of(tmp_path) == metrics_of(whole("grpo"))


@pytest.mark.parametrize(
    "method, sharding",
    [
        ("sft", "zero2"),
        ("dpo", "none"),
        slow("grpo", "zero3"),
    ],
)
def test_two_processes_and_shardings_equal_one(base, whole, tmp_path, method, sharding):
    torchrun(2, *steps_args(base, tmp_path, method, "--sharding", sharding))
    assert_close(tmp_path, whole(method), 1e-4)


def test_a_compiled_run_learns_as_a_plain_one(base, whole, tmp_path):
    """As whole graphs, without the compiler's kernels."""
    patched = tmp_path / "finetune_by_graphs.py"
    patched.write_text(
        "import functools, torch\n"
        "torch.compile = functools.partial(torch.compile, backend='eager')\n"
        "import finetune\n"
        "finetune.call_and_exit(finetune.main)\n"
    )
    _, *args = steps_args(base, tmp_path, "dpo", "--use_torch_compile")
    script(patched, *args, env=environment() | {"PYTHONPATH": str(ROOT)})
    assert_close(tmp_path, whole("dpo"), 1e-5)


def test_a_reward_model_rates_for_grpo_whose_log_is_sent_and_writes_no_text(base, tmp_path):
    reward = tmp_path / "reward"
    options = ("--max_steps", 20, "--eval_data", base / "rows.jsonl", "--max_lr", 3e-3)
    done = script(*finetune_args(base, reward, "reward", *options, "--dropout", 0))
    assert "chunked loss" not in done.stderr  # it has no loss of tokens
    assert metrics_of(reward, "val")[-1]["accuracy"] > 0.9
    args = finetune_args(base, tmp_path, "grpo", "--reward", reward, "--max_steps", 2, "--wandb")
    script(*args, env=environment() | wandb_variables(tmp_path))
    assert json.loads((tmp_path / "arrived").read_text()) == [0, 1, 2]
    assert len({metrics["reward"] for metrics in metrics_of(tmp_path)}) == 2
    with user_error("is a reward model"):
        load_model(reward / "checkpoints/model_last.pt")
    plain = TextEncoder(load_tokenizer("bytes"), False, 64)
    with user_error("another kind of text"):
        load_reward_function(str(reward), plain, ALONE)


def test_a_reward_file_is_a_module_of_its_own_folder(tmp_path, monkeypatch):
    """Its helpers win over this project's, and the processes of a pool find its functions."""
    (tmp_path / "utils.py").write_text("def count(text):\n    return len(text)\n")
    (tmp_path / "evaluate.py").write_text(
        "import multiprocessing\n"
        "import utils\n"
        "def grade(text):\n"
        "    return utils.count(text)\n"
        "def pool(prompt, completion, row):\n"
        "    with multiprocessing.Pool(1) as pool:\n"
        "        return sum(pool.map(grade, [completion]))\n"
    )
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)  # put back for other tests
    project_utils = sys.modules["utils"]
    function = load_reward_function(f"{tmp_path}/evaluate.py:pool", None, None)
    assert function([Completion({"prompt": "a"}, "abc", None, False)]) == [3.0]
    assert sys.modules["utils"] is project_utils


def test_the_exact_answers_of_a_model_are_counted(base, tmp_path):
    """By evaluate.py, and by grpo as the reward of its held-out rows."""
    options = ("--batch_size", 12, "--max_steps", 60, "--max_lr", 1e-2, "--save_every", 0)
    script(*finetune_args(base, tmp_path, "sft", *options))
    rewards = ("--reward", "exact", "--eval_data", base / "rows.jsonl", "--max_new_tokens", 8)
    again = ("--init_from", tmp_path, "--max_lr", 0)
    script(*finetune_args(base, tmp_path / "grpo", "grpo", *rewards, *again))
    logged = read_metrics(tmp_path / "grpo/logs")["held_out"][-1]
    dump = tmp_path / "dump.jsonl"
    share = exact_share(tmp_path, base / "rows.jsonl", 8, "--dump", dump, "--dtype", "float32")
    assert share == pytest.approx(logged["reward"])
    dumped = read_rows(dump)
    assert sum(row["exact"] for row in dumped) == 12 * share > 6
    assert not any(row["cut"] for row in dumped)


@pytest.fixture
def refuse(monkeypatch):
    """A function that checks the sentence with which finetune.py ends, in this process."""
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # pytest keeps its own

    def check(problem, *args):
        monkeypatch.setattr(sys, "argv", ["finetune.py", *map(str, args)])
        with pytest.raises((UserError, OSError), match=problem):  # utils/cli.py prints both
            finetune.main()

    return check


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("", "give --method"),
        ("--method sft --data {base}/none.jsonl", "No such file or directory: .*none.jsonl"),
        ("--method grpo --reward exact --data {base}/bad.jsonl", 'line 1: there is no "answer"'),
        ("--method grpo", "give --reward"),
        ("--method grpo --reward {base}/letters.py:none", "cannot be loaded: AttributeError"),
        ("--method grpo --reward {base}/letters.py", "is none of exact, FILE.py:FUNCTION"),
        ("--method grpo --reward exakt", "exakt is none of exact, FILE.py:FUNCTION, and a check"),
        ("--method grpo --reward {base}/hf", "is none of exact, FILE.py:FUNCTION"),
        ("--method grpo --reward {base}", "is no reward model"),
        ("--method sft --block_size 128", "--block_size 128: .* has a context of 64"),
        ("--method dpo --init_from {base}/plain", "on another kind of text: change --plain"),
        ("--method dpo --batch_size 3", "3 examples of a step do not divide by 2"),
    ],
)
def test_a_mistake_gets_one_sentence(base, tmp_path, refuse, flags, problem):
    data = ("--init_from", base, "--data", base / "rows.jsonl")
    refuse(problem, *folders(tmp_path), *data, *SMALL.split(), *flags.format(base=base).split())


def test_a_reward_that_fails_costs_no_checkpoint(base, whole, refuse):
    """It is tried once before --overwrite removes anything."""
    run = whole("sft")
    before = contents(run)
    args = finetune_args(base, run, "grpo", "--reward", f"{base}/letters.py:fails")[1:]
    refuse("letters.py:fails fails for the prompt '1.'", *args, "--overwrite")
    assert contents(run) == before


def test_a_reward_that_fails_on_one_process_saves_on_all(base, tmp_path):
    reward = ("--reward", f"{base}/letters.py:fails_later", "--max_steps", 3)
    ranks = torchrun(2, *finetune_args(base, tmp_path, "grpo", *reward), code=2)
    for rank in ranks:
        assert "fails for the prompt" in rank.stderr and "it returned nan" in rank.stderr
    assert load_checkpoint(tmp_path / "checkpoints/model_last.pt")["step"] == 1


@pytest.mark.slow
def test_other_rows_are_warned_of_and_other_weights_refused(base, whole, tmp_path, refuse):
    """Weights that were moved are no others."""
    resumed = ("--resume", whole("dpo") / "checkpoints/model_step_000002.pt")
    moved = shutil.copy(base / "checkpoints/model_best.pt", tmp_path / "moved.pt")
    of_grpo = ("--resume", whole("grpo") / "checkpoints/model_step_000002.pt")
    same = shutil.copy(base / "letters.py", tmp_path / "same.py")
    edited = tmp_path / "edited.py"
    edited.write_text(f"{same.read_text()}# one more line\n")
    for begun, flag, value, num_warnings in (
        (resumed, "--init_from", moved, 0),
        (resumed, "--data", base / "reversed.jsonl", 1),
        (of_grpo, "--reward", f"{same}:share", 0),
        (of_grpo, "--reward", f"{edited}:share", 1),
    ):
        done = script("finetune.py", *begun, *folders(tmp_path / f"{value}.run"), flag, value)
        assert done.stdout.count("data order changes") == num_warnings
    for flag, value, problem in (
        ("--init_from", base / "plain", "does not hold the weights that the run"),
        ("--block_size", 32, "--block_size 32: .* has a context of 64"),
    ):
        refuse(problem, *resumed, *folders(tmp_path / problem[:9]), flag, value)


@pytest.mark.slow
def test_defaults_teach_dialogs_of_one_kind_and_their_end_by_the_chat_template(tmp_path):
    """Of a model whose end of text is another token: in scores, samples and exports."""
    tokenizer = folder_with_tokenizer(tmp_path, byte_level_backend(), CHATML, eos_token_id=256)
    torch.manual_seed(0)
    save_pretrained(GPT(GPTConfig(64, tokenizer.vocab_size, 1, 1, 32)), tmp_path, tokenizer.eot)
    dialogs = [{"prompt": f"{i}?", "completion": "yes", "answer": "yes"} for i in range(200)]
    write_rows(tmp_path / "rows.jsonl", dialogs)
    write_rows(tmp_path / "questions.jsonl", dialogs[:2])
    data = ["--init_from", tmp_path, "--data", tmp_path / "rows.jsonl", *folders(tmp_path)]
    script("finetune.py", "--method", "sft", *data, "--device", "cpu")
    assert metrics_of(tmp_path)[-1]["loss"] < 0.1
    assert exact_share(tmp_path, tmp_path / "questions.jsonl", 16) == 1
    chat = ["--chat", "--prompt", "1?", "--temperature", 0]
    assert script("sample.py", "--checkpoint", tmp_path, *chat).stdout == "yes\n"
    script("convert.py", "--checkpoint", tmp_path, "--out", tmp_path / "hf")
    ends = json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"]
    assert ends == [tokenizer.eot, tokenizer.turn_end]
