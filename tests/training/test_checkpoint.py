import errno
import os
import resource

import numpy
import pytest
import torch
from conftest import bad, script, train_args
from hypothesis import given, settings
from hypothesis import strategies as st

from data.shards import inspect_shard
from model import huggingface
from model.config import GPTConfig
from training.checkpoint import (
    BEST,
    checksum,
    find_newest,
    join_float32,
    load_checkpoint,
    load_model,
    open_model,
    split_float32,
)
from utils.errors import UserError


def as_bits(values):
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def survives(bits):
    """Return whether all numbers come back to the bit, and NaNs as NaNs, in both halves."""
    x = bits.view(torch.float32)
    high, low = split_float32(x)
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    joined, nan = join_float32(high, low), x.isnan()
    same = torch.equal(joined.view(torch.int32)[~nan], bits[~nan])
    return same and bool(high[nan].isnan().all() and joined[nan].isnan().all())


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_any_bit_pattern_survives_the_two_halves(values):
    assert survives(as_bits(values))


def test_ties_denormals_infinities_and_nans_survive_the_two_halves():
    low = torch.arange(2**16, dtype=torch.int64)
    for high in (0x0000, 0x8000, 0x0001, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FFF, 0xFFFF, 0x007F):
        assert survives(((high << 16) + low).to(torch.int32))


def test_a_checkpoint_holds_plain_values_and_bfloat16_weights_under_nanogpt_s_names(trained):
    path = trained / "checkpoints" / "model_last.pt"
    state = torch.load(path, weights_only=True, mmap=True)
    assert all(v.dtype == torch.bfloat16 for v in state["model"].values())
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias"} <= set(state["model"])
    assert state["step"] == 20 and state["tokens"] == 20 * 512 and state["tokenizer"] == "bytes"
    assert state["script"] == "train.py" and state["config"]["n_embd"] == 32
    assert set(state["optimizer"]) == set(state["model"])
    assert set(state["checksums"]) == {"model", "model_low", "optimizer"}
    weights = sum(v.numel() for v in state["model"].values())
    assert os.path.getsize(path) < 12.5 * weights + 60_000  # 2 + 2 + 4 + 4 bytes a weight


def test_a_file_a_run_s_folder_and_its_checkpoints_open_as_one_model(trained, tmp_path, capsys):
    best = trained / "checkpoints" / BEST
    idx = torch.zeros(1, 32, dtype=torch.long)
    for name in (best, trained / "checkpoints", trained):
        model, tokenizer, saved = open_model(name)
        assert not model.training and tokenizer == "bytes" and saved["step"] == 20
        assert torch.isfinite(model(idx)).all()
    assert f"reading {best}" in capsys.readouterr().err
    with pytest.raises(UserError, match="holds no checkpoint"):
        open_model(tmp_path)


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path):
    torch.save({"format_version": 3, "model": Code(tmp_path / "ran")}, tmp_path / "evil.pt")
    bad(["sample.py", "--checkpoint", tmp_path / "evil.pt"], "evil.pt is damaged or not a")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_foreign_files_are_named(trained, tmp_path):
    raw = (trained / "checkpoints" / "model_last.pt").read_bytes()
    for name, content in {"cut.pt": raw[:-1000], "empty.pt": b"", "text.pt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} is damaged or not a checkpoint"):
            load_checkpoint(tmp_path / name)
    state = load_checkpoint(trained / "checkpoints" / "model_last.pt")
    some = {k: v for k, v in state["model"].items() if "ln_f" not in k}
    for name, content in {
        "nanogpt.pt": {"model": {}, "model_args": {}},
        "list.pt": [1],
        "part.pt": state | {"model": some},
        "shape.pt": state | {"model_config": {**state["model_config"], "n_embd": 64}},
    }.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is damaged or not a checkpoint"):
            load_model(tmp_path / name)


def test_every_bit_of_the_tensors_and_their_names_count_for_the_checksum():
    tensors = {
        "weight": torch.linspace(-2, 2, 12).view(3, 4).bfloat16(),
        "low": torch.arange(-5, 6, dtype=torch.int16),
        "state": {"step": torch.tensor(7.0), "exp_avg": torch.linspace(0, 1, 5)},
    }
    expected = checksum(tensors)
    for x in (tensors["weight"], tensors["low"], *tensors["state"].values()):
        data = x.view(-1).view(torch.uint8)  # shares memory with the tensor
        for i in range(len(data)):
            for bit in range(8):
                data[i] ^= 1 << bit
                assert checksum(tensors) != expected
                data[i] ^= 1 << bit
    assert checksum(tensors) == expected
    tensors["wait"] = tensors.pop("state")
    assert checksum(tensors) != expected


def test_a_file_of_an_older_format_is_refused_in_a_sentence(trained, tmp_path):
    state = load_checkpoint(trained / "checkpoints" / "model_last.pt")
    torch.save(state | {"format_version": 2}, tmp_path / "old.pt")
    with pytest.raises(UserError, match="old.pt has format 2, and this code reads 4"):
        load_checkpoint(tmp_path / "old.pt")


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
    readers = {
        "checkpoints/model_last.pt": load_checkpoint,
        "logs": huggingface.load_pretrained,
        "logs/train.npy": inspect_shard,
    }
    for name, read in readers.items():
        with pytest.raises(type(error)) as raised:
            read(trained / name)
        assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize("part", ["model", "model_low", "optimizer"])
def test_a_flipped_bit_is_found_by_all_that_read_it(shards, trained, tmp_path, part):
    path, name = tmp_path / "model_last.pt", "transformer.h.1.mlp.c_fc.weight"
    data = bytearray((trained / "checkpoints/model_last.pt").read_bytes())
    x = load_checkpoint(trained / "checkpoints/model_last.pt")[part][name]
    if part == "optimizer":
        x = x["exp_avg"]
    data[data.index(x.flatten()[:64].view(torch.uint8).numpy().tobytes()) + 37] ^= 4
    path.write_bytes(data)
    problem = f"tensors of '{part}' do not have their checksum"
    if part == "optimizer":  # a resumed run alone reads it
        load_model(path, exact=True)
        bad(train_args(shards, tmp_path, 30, "--resume", path), problem)
        return
    with pytest.raises(UserError, match=problem):
        load_model(path, exact=True)
    if part == "model_low":  # sampling reads the first half alone
        load_model(path)


def test_newest_is_the_last_else_the_highest_number_else_the_best(tmp_path):
    assert find_newest(tmp_path) is None
    numbered = ("model_step_000020.pt", "model_step_999999.pt", "model_step_1000000.pt")
    for name in (BEST, *numbered, "model_last.pt"):
        (tmp_path / name).touch()
        assert find_newest(tmp_path).name == name


def test_a_disk_that_fills_during_a_save_leaves_the_previous_checkpoint(shards, tmp_path):
    args = train_args(shards, tmp_path, 5, "--eval_every", 0)
    script(*args)
    last = tmp_path / "checkpoints" / "model_last.pt"
    before = last.read_bytes()

    def limit_files():  # writes beyond 100 kB fail, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = script(*[*args, "--max_steps", 8, "--resume", "auto"], code=2, preexec_fn=limit_files)
    assert f"{last} could not be written" in done.stderr and "Traceback" not in done.stderr
    assert "the one before it is untouched" in done.stderr
    assert last.read_bytes() == before and not list(last.parent.glob("*.tmp"))
