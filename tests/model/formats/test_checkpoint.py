import errno
import os
from contextlib import nullcontext

import numpy
import pytest
import torch
from conftest import bad, train_args, user_error

from data.shards import inspect_shard
from model.config import GPTConfig
from model.formats import huggingface
from model.formats.checkpoint import (
    BEST,
    NUMBERED,
    find_newest,
    join_float32,
    load_checkpoint,
    load_model,
    numbered,
    split_float32,
)


def survives(bits):
    """Return whether all numbers come back to the bit, and NaNs as NaNs, in both halves."""
    x = bits.view(torch.float32)
    high, low = split_float32(x)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    joined, nan = join_float32(high, low), x.isnan()
    same = torch.equal(joined.view(torch.int32)[~nan], bits[~nan])
    return same and bool(high[nan].isnan().all() and joined[nan].isnan().all())


def test_any_float32_survives_the_two_halves():
    low = torch.arange(2**16, dtype=torch.int64)
    # ties, denormals, infinities, NaNs; then all exponents
    for high in (0x0000, 0x8000, 0x0001, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FFF, 0xFFFF, 0x007F):
        assert survives(((high << 16) + low).to(torch.int32))
    assert survives(torch.randint(-(2**31), 2**31, (2**20,)).to(torch.int32))


def test_a_checkpoint_holds_plain_values_and_bfloat16_weights_under_nanogpt_s_names(trained):
    path = trained / "checkpoints" / "model_last.pt"
    state = torch.load(path, weights_only=True, mmap=True)
    assert all(v.dtype == torch.bfloat16 for v in state["model"].values())
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias"} <= set(state["model"])
    assert set(state["optimizer"]) == set(state["model"])
    assert (state["step"], state["tokens"], state["tokenizer"]) == (20, 20 * 512, "bytes")
    assert (state["script"], state["config"]["n_embd"]) == ("train.py", 32)
    weights = sum(v.numel() for v in state["model"].values())
    assert os.path.getsize(path) < 12.5 * weights + 60_000  # 2 + 2 + 4 + 4 bytes a weight


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_damaged_and_foreign_files_are_named_and_no_code_in_them_is_run(trained, tmp_path):
    path, damaged = tmp_path / "model.pt", "is damaged or not a checkpoint"
    last = trained / "checkpoints" / "model_last.pt"
    raw, state = last.read_bytes(), load_checkpoint(last)
    without_norm = {k: v for k, v in state["model"].items() if "ln_f" not in k}
    other_size = state["model_config"] | {"n_embd": 64}
    for content, message in (
        (raw[:-1000], damaged),
        (b"hello", damaged),
        ({"model": {}, "model_args": {}}, damaged),  # nanoGPT's
        ([1], damaged),
        (state | {"model": Code(tmp_path / "ran")}, damaged),
        (state | {"model": without_norm}, damaged),
        (state | {"model_config": other_size}, damaged),
        (state | {"format_version": 2}, f"{damaged}.* its format is 2, not 6"),
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with user_error(f"model.pt {message}"):
            load_model(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("can't allocate memory: you tried to allocate"),
        MemoryError(),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
)
def test_a_machine_without_memory_or_rights_does_not_damage_a_file(trained, monkeypatch, error):
    """What says nothing of the file is not said of it: by readers of all formats."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(huggingface, "read_weights", fail)
    monkeypatch.setattr(huggingface, "config_from_hf", lambda values: GPTConfig())
    monkeypatch.setattr(numpy, "load", fail)
    for read, name in (
        (load_checkpoint, "checkpoints/model_last.pt"),
        (huggingface.load_pretrained, "logs"),
        (inspect_shard, "logs/train.npy"),
    ):
        with pytest.raises(type(error)) as raised:
            read(trained / name)
        assert raised.value is error


@pytest.mark.parametrize("part", ["model", "model_low", "optimizer"])
def test_a_flipped_bit_is_found_by_all_that_read_it(shards, trained, tmp_path, part):
    path, name = tmp_path / "model_last.pt", "transformer.h.1.mlp.c_fc.weight"
    data = bytearray((trained / "checkpoints/model_last.pt").read_bytes())
    x = load_checkpoint(trained / "checkpoints/model_last.pt")[part][name]
    if part == "optimizer":
        x = x["exp_avg"]
    start = data.index(x.flatten()[:64].view(torch.uint8).numpy().tobytes())
    data[start + 39] ^= 128  # bit 63 of a word
    path.write_bytes(data)
    bad(
        train_args(shards, tmp_path, 30, "--resume", path),
        f"tensors of '{part}' do not have their checksum",
    )
    # sampling reads the first half alone
    with user_error("checksum") if part == "model" else nullcontext():
        assert not load_model(path)[0].training


def test_a_numbered_checkpoint_has_one_exact_name(tmp_path):
    own = [NUMBERED.format(step) for step in (12_345_678, 1_000_000, 999_999, 10, 0)]
    for name in own:
        stem = name.removesuffix(".pt")
        for copy in ("", "_good", ".pt", " (1)"):
            (tmp_path / f"{stem}{copy}.pt").touch()
        (tmp_path / name.replace("step_", "step_0")).touch()
    assert [path.name for path in numbered(tmp_path)] == own


def test_newest_is_the_last_else_the_highest_number_else_the_best(tmp_path):
    assert find_newest(tmp_path) is None
    numbered = ("model_step_000020.pt", "model_step_999999.pt")
    for name in (BEST, *numbered, "model_last.pt"):
        (tmp_path / name).touch()
        assert find_newest(tmp_path).name == name
