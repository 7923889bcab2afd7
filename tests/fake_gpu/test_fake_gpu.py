"""What runs only on GPUs, on a device that computes on the CPU: see fake_cuda.py."""

import json
import shutil

import pytest
import torch
from conftest import folders, losses, script, slow, train_args, write_rows

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None,
    reason="needs a build of PyTorch without CUDA, and a C++ compiler",
)
ITEM = {"ctx": "the cat", "ctx_a": "the", "ctx_b": "cat", "activity_label": "x", "label": 1}
# enough logits that the loss is that of large models
SIZES = ("--block_size", 512, "--micro_batch_size", 7, "--total_batch_size", 3584)


def check(folder, args, steps, once=0):
    """Check that a script computes on a GPU what it does on a CPU, and that its host waits for the
    GPU in one place, once in each step, and elsewhere `once` times at most."""
    script(*args, *folders(folder / "cpu"), "--device", "cpu")
    command = ("tests/fake_gpu/fake_cuda.py", *args, *folders(folder / "gpu"), "--device", "cuda")
    counted = json.loads(script(*command, fork=False).stderr.splitlines()[-1])
    assert losses(folder / "gpu") == pytest.approx(losses(folder / "cpu"), abs=1e-5)
    # cuDNN plans for each shape: it gets full contexts alone
    assert counted["attention"]
    for queries, _, has_mask, with_cudnn in counted["attention"]:
        assert with_cudnn == (queries in (32, 512) and not has_mask)
    files = ("train.py", "finetune.py", "methods.py", "examples.py", "distributed.py")
    in_steps = {
        line: count
        for line, count in counted["syncs"].items()
        if line.startswith(files) and ".to(process.device)" not in line  # weights, at the start
    }
    reads = [count for line, count in in_steps.items() if "tolist" in line]
    assert reads == [steps] and sum(in_steps.values()) - steps <= once, in_steps


@pytest.mark.parametrize("recipe", ["modern", slow("gpt2")])
def test_a_run_on_a_gpu_is_that_of_a_cpu_and_waits_once_a_step(shards, tmp_path, recipe):
    item = ITEM | {"endings": ["sat on", "ran"]}
    hellaswag = write_rows(tmp_path / "hellaswag.jsonl", [item])
    flags = ("--recipe", recipe, *SIZES, "--hellaswag_every", 2, "--hellaswag_data", hellaswag)
    flags += ("--val_tokens", 512, "--no_use_torch_compile")
    check(tmp_path, train_args(shards, tmp_path, 3, *flags), steps=3)


@pytest.mark.parametrize("method", ["sft", *(slow(x) for x in ("dpo", "grpo"))])
def test_fine_tuning_on_a_gpu_is_that_of_a_cpu_and_waits_once_a_step(trained, tmp_path, method):
    row = {"prompt": "2?", "completion": "2", "chosen": "2", "rejected": "no", "answer": 2}
    data = write_rows(tmp_path / "rows.jsonl", [row] * 8)
    args = ["finetune.py", "--method", method, "--init_from", trained, "--data", data, "--plain"]
    args += ["--max_steps", 2, "--batch_size", 4, "--micro_batch_size", 1, "--max_lr", 1e-3]
    args += ["--dtype", "float32", "--no_use_torch_compile", "--sample_every", 0]
    if method == "grpo":
        args += ["--reward", "exact", "--max_new_tokens", 4, "--group_size", 2]
    # DPO computes the log-probabilities of its reference once, in batches of one pair
    check(tmp_path, args, steps=2, once=8 if method == "dpo" else 0)
