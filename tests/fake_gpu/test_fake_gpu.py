"""What runs only on GPUs, on a device that computes on the CPU: see fake_cuda.py."""

import json
import shutil

import pytest
import torch
from conftest import folders, gap, losses, script, train_args

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None,
    reason="needs a build of PyTorch without CUDA, and a C++ compiler",
)
ITEM = {"ctx": "the cat", "ctx_a": "the", "ctx_b": "cat", "activity_label": "x", "label": 1}
# enough logits that the loss is that of large models
SIZES = ("--block_size", 512, "--micro_batch_size", 7, "--total_batch_size", 3584)


def on_gpu(*args):
    """Run a script on the fake GPU; return what it counted."""
    done = script("tests/fake_gpu/fake_cuda.py", *args, fork=False)
    return json.loads(done.stderr.splitlines()[-1])


@pytest.fixture
def hellaswag(tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    path.write_text(json.dumps(ITEM | {"endings": ["sat on", "ran"]}) + "\n")
    return path


@pytest.mark.parametrize("recipe", ["speedrun", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_run_on_a_gpu_is_that_of_a_cpu_and_waits_once_a_step(shards, tmp_path, recipe, hellaswag):
    flags = ("--recipe", recipe, *SIZES, "--hellaswag_every", 3)
    flags += ("--hellaswag_data", hellaswag, "--no_use_torch_compile")
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    script(*train_args(shards, cpu, 5, *flags))
    counted = on_gpu(*train_args(shards, gpu, 5, *flags, "--device", "cuda"))
    assert gap(gpu, cpu) < 1e-5
    in_steps = {line: n for line, n in counted["syncs"].items() if "train.py" in line}
    reads = {line: n for line, n in in_steps.items() if "tolist" in line}
    assert list(reads.values()) == [5], in_steps  # one in each step
    assert len(in_steps) == 2, in_steps  # and the weights, which move to the GPU once
    # cuDNN plans for each shape: it gets full contexts alone
    for queries, _, has_mask, with_cudnn in counted["attention"]:
        assert with_cudnn == (queries == 512 and not has_mask)


@pytest.mark.parametrize(
    "method", ["sft", *(pytest.param(x, marks=pytest.mark.slow) for x in ("dpo", "grpo"))]
)
def test_fine_tuning_on_a_gpu_is_that_of_a_cpu_and_waits_once_a_step(trained, tmp_path, method):
    rows = [
        {"prompt": f"{i}?", "completion": f"{i}", "chosen": f"{i}", "rejected": "no", "answer": i}
        for i in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--method", method, "--init_from", trained, "--data", data, "--max_steps", 3)
    flags += ("--batch_size", 4, "--micro_batch_size", 1, "--dtype", "float32", "--max_lr", 1e-3)
    flags += ("--no_use_torch_compile", "--plain", "--sample_every", 0)
    if method == "grpo":
        flags += ("--reward", "exact", "--max_new_tokens", 4, "--group_size", 2)
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    script("finetune.py", *flags, *folders(cpu), "--device", "cpu")
    counted = on_gpu("finetune.py", *flags, *folders(gpu), "--device", "cuda")
    for step, loss in losses(cpu).items():
        assert losses(gpu)[step] == pytest.approx(loss, abs=1e-5)
    in_steps = {
        line: count
        for line, count in counted["syncs"].items()
        if line.startswith(("finetune.py", "methods.py", "examples.py"))
        and ".to(process.device)" not in line  # weights, at the start
    }
    reads = {line: count for line, count in in_steps.items() if "tolist" in line}
    assert list(reads.values()) == [3], in_steps  # one in each step
    # DPO computes the log-probabilities of its reference once, in batches of one pair
    once = 8 if method == "dpo" else 0
    assert sum(in_steps.values()) - 3 <= once, in_steps
