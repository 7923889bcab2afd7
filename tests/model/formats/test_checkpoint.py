import errno
import os
from contextlib import nullcontext

import numpy
import pytest
import torch
from conftest import bad, train_args, user_error

from data.shards import inspect_shard
from model.config import GPTConfig
from model.formats import checkpoint, huggingface_weights
from model.formats.checkpoint import (
    BEST,
    LAST,
    NUMBERED,
    find_newest,
    join_float32,
    load_checkpoint,
    load_model,
    numbered_checkpoints,
    split_float32,
)
from model.formats.huggingface import load_pretrained


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
    checkpoint = torch.load(path, weights_only=True, mmap=True)
    assert all(x.dtype == torch.bfloat16 for x in checkpoint["model"].values())
    names = set(checkpoint["model"])
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias"} <= names
    assert set(checkpoint["optimizer"]) == names
    assert (checkpoint["step"], checkpoint["tokens"]) == (20, 20 * 512)
    assert checkpoint["tokenizer"] == "bytes"
    assert (checkpoint["script"], checkpoint["config"]["n_embd"]) == ("train.py", 32)
    num_weights = sum(x.numel() for x in checkpoint["model"].values())
    assert os.path.getsize(path) < 12.5 * num_weights + 60_000  # 2 + 2 + 4 + 4 bytes a weight


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_damaged_and_foreign_files_are_named_and_no_code_in_them_is_run(trained, tmp_path):
    path, damaged = tmp_path / "model.pt", "is damaged or not a checkpoint"
    last = trained / "checkpoints" / "model_last.pt"
    raw, checkpoint = last.read_bytes(), load_checkpoint(last)
    without_norm = {name: x for name, x in checkpoint["model"].items() if "ln_f" not in name}
    other_size = checkpoint["model_config"] | {"n_embd": 64}
    for file_content, message in (
        (raw[:-1000], damaged),
        (b"hello", damaged),
        ({"model": {}, "model_args": {}}, damaged),  # nanoGPT's
        ([1], damaged),
        (checkpoint | {"model": Code(tmp_path / "ran")}, damaged),
        (checkpoint | {"model": without_norm}, damaged),
        (checkpoint | {"model_config": other_size}, damaged),
        (checkpoint | {"format_version": 6}, f"{damaged}.* its format is 6, not 7; commit 67fa719"),
    ):
        if isinstance(file_content, bytes):
            path.write_bytes(file_content)
        else:
            torch.save(file_content, path)
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
    monkeypatch.setattr(huggingface_weights, "read_weights", fail)
    monkeypatch.setattr(huggingface_weights, "config_from_hf", lambda hf_config: GPTConfig())
    monkeypatch.setattr(numpy, "load", fail)
    for read, name in (
        (load_checkpoint, "checkpoints/model_last.pt"),
        (load_pretrained, "logs"),
        (inspect_shard, "logs/train.npy"),
    ):
        with pytest.raises(type(error)) as raised:
            read(trained / name)
        assert raised.value is error


@pytest.mark.parametrize("section", ["model", "model_low", "optimizer"])
def test_a_flipped_bit_is_found_by_all_that_read_it(shards, trained, tmp_path, section):
    path, name = tmp_path / "model_last.pt", "transformer.h.1.mlp.c_fc.weight"
    data = bytearray((trained / "checkpoints/model_last.pt").read_bytes())
    x = load_checkpoint(trained / "checkpoints/model_last.pt")[section][name]
    if section == "optimizer":
        x = x["exp_avg"]
    start = data.index(x.flatten()[:64].view(torch.uint8).numpy().tobytes())
    data[start + 39] ^= 128  # bit 63 of a word
    path.write_bytes(data)
    bad(
        train_args(shards, tmp_path, 30, "--resume", path),
        f"tensors of '{section}' do not have their checksum",
    )
    # sampling reads the first half alone
    with user_error("checksum") if section == "model" else nullcontext():
        assert not load_model(path)[0].training


def test_a_numbered_checkpoint_has_one_exact_name(tmp_path):
    own = [NUMBERED.format(step) for step in (12_345_678, 1_000_000, 999_999, 10, 0)]
    for name in own:
        stem = name.removesuffix(".pt")
        for suffix in ("", "_good", ".pt", " (1)"):
            (tmp_path / f"{stem}{suffix}.pt").touch()
        (tmp_path / name.replace("step_", "step_0")).touch()
    assert [path.name for path in numbered_checkpoints(tmp_path)] == own


def test_newest_has_the_latest_step_and_of_equal_ones_the_last(tmp_path, monkeypatch):
    assert find_newest(tmp_path) is None
    step_of = {BEST: 700, NUMBERED.format(650): 650, NUMBERED.format(700): 700, LAST: 673}
    monkeypatch.setattr(checkpoint, "step_of", lambda path: step_of[path.name])
    for name in (BEST, NUMBERED.format(650), LAST):
        (tmp_path / name).touch()
        assert find_newest(tmp_path).name == BEST
    (tmp_path / NUMBERED.format(700)).touch()
    assert find_newest(tmp_path).name == NUMBERED.format(700)
    step_of[LAST] = 700
    assert find_newest(tmp_path).name == LAST
