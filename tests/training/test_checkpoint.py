import os
import resource
from pathlib import Path

import pytest
import torch
from conftest import SMALL, script
from hypothesis import given, settings
from hypothesis import strategies as st
from training.checkpoint_folder import BEST, LAST, STABLE, find_newest, remove_all

from training.checkpoint import join_float32, load_checkpoint, load_model, split_float32
from utils.errors import UserError


def as_bits(values):
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def survives(bits):
    high, low = split_float32(bits.view(torch.float32))
    assert high.dtype == torch.bfloat16 and low.dtype == torch.int16
    return torch.equal(join_float32(high, low).view(torch.int32), bits)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_any_bit_pattern_survives_the_two_halves(values):
    assert survives(as_bits(values))


def test_ties_denormals_infinities_and_nans_survive_the_two_halves():
    low = torch.arange(2**16, dtype=torch.int64)
    for high in (0x0000, 0x8000, 0x0001, 0x3F80, 0x7F7F, 0x7F80, 0xFF80, 0x7FFF, 0xFFFF, 0x007F):
        assert survives(((high << 16) + low).to(torch.int32))


def test_the_upper_half_is_the_nearest_bfloat16():
    x = torch.randn(100_000)
    high, _ = split_float32(x)
    spacing = (x.abs() * 2**-8).clamp(min=1e-38)
    assert ((high.float() - x).abs() <= spacing).all()
    assert (high == x.bfloat16()).float().mean() > 0.9999  # but for ties


def test_a_checkpoint_holds_plain_values_and_bfloat16_weights_under_nanogpt_s_names(trained):
    path = trained / "checkpoints" / "model_last.pt"
    state = torch.load(path, weights_only=True, mmap=True)
    assert all(v.dtype == torch.bfloat16 for v in state["model"].values())
    assert {"transformer.wte.weight", "transformer.h.1.attn.c_attn.bias"} <= set(state["model"])
    assert state["step"] == 20 and state["tokens"] == 20 * 512 and state["tokenizer"] == "bytes"
    assert set(state["optimizer"]) == set(state["model"])
    weights = sum(v.numel() for v in state["model"].values())
    assert os.path.getsize(path) < 12.5 * weights + 60_000  # 2 + 2 + 4 + 4 bytes a weight


def test_a_checkpoint_gives_a_model_by_itself(trained):
    model, state = load_model(trained / "checkpoints" / "model_best.pt")
    assert model.config.n_embd == 32 and not model.training
    assert torch.isfinite(model(torch.zeros(1, 32, dtype=torch.long))).all()


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_code_in_a_file_is_refused_and_not_run(tmp_path):
    torch.save({"format_version": 1, "model": Code(tmp_path / "ran")}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="evil.pt is damaged or not a checkpoint"):
        load_checkpoint(tmp_path / "evil.pt")
    done = script("sample.py", "--checkpoint", tmp_path / "evil.pt", code=2)
    assert "Traceback" not in done.stderr and not (tmp_path / "ran").exists()


def test_damaged_and_foreign_files_are_named(trained, tmp_path):
    raw = (trained / "checkpoints" / "model_last.pt").read_bytes()
    for name, content in {"cut.pt": raw[:-1000], "empty.pt": b"", "text.pt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name):
            load_checkpoint(tmp_path / name)
    torch.save({"model": {}, "model_args": {}}, tmp_path / "nanogpt.pt")
    with pytest.raises(UserError, match="not a checkpoint of this project"):
        load_checkpoint(tmp_path / "nanogpt.pt")
    state = load_checkpoint(trained / "checkpoints" / "model_last.pt")
    shape, weight = state["model_config"], {"transformer.wte.weight": torch.zeros(2).double()}
    for change in (
        {"step": "20"},
        {"step": -1},
        {"model": None},
        {"model": {**state["model"], **weight}},
        {"model_low": {**state["model_low"], **weight}},
        {"optimizer": weight},
        {"optimizer": dict.fromkeys(state["model"], {"step": torch.zeros(())})},
        {"model_config": {"n_layer": "many"}},
        {"model_config": {**shape, "n_layer": 10**9}},
        {"model_config": {**shape, "n_embd": 2**40}},
    ):
        torch.save({**state, **change}, tmp_path / "odd.pt")
        with pytest.raises(UserError, match="odd.pt"):
            load_model(tmp_path / "odd.pt")
    weights = {k: v for k, v in state["model"].items() if "ln_f" not in k}
    torch.save({**state, "model": weights}, tmp_path / "part.pt")
    with pytest.raises(UserError, match="part.pt does not fit its own architecture"):
        load_model(tmp_path / "part.pt")


def test_a_file_that_may_not_be_read_is_not_called_damaged(trained, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(UserError, match="model_best.pt cannot be read: Permission denied"):
        load_checkpoint(trained / "checkpoints/model_best.pt")


def test_newest_is_the_last_else_the_highest_number(tmp_path):
    assert find_newest(tmp_path) is None
    for when, name in enumerate(("model_stable.pt", "model_best.pt", "model_stable.pt"), 1):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (when, when))
        assert find_newest(tmp_path).name == name
    for name in ("model_step_000100.pt", "model_step_000020.pt", "model_best.pt"):
        (tmp_path / name).touch()
    assert find_newest(tmp_path).name == "model_step_000100.pt"
    (tmp_path / "model_last.pt").touch()
    assert find_newest(tmp_path).name == "model_last.pt"


def test_a_disk_that_fills_during_a_save_leaves_the_previous_checkpoint(shards, tmp_path):
    folders = ["--checkpoint_dir", tmp_path / "c", "--log_dir", tmp_path / "l"]
    args = ["train.py", "--data_dir", shards, *folders, *SMALL, "--eval_every", 0]
    script(*args, "--max_steps", 5)
    before = (tmp_path / "c" / "model_last.pt").read_bytes()

    def small_files():  # what a full disk looks like: writes beyond 100 kB fail
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = script(*args, "--max_steps", 8, "--resume", "auto", code=2, preexec_fn=small_files)
    assert "could not be written: File too large; the one before it is untouched" in done.stderr
    assert "auto" not in done.stdout and "--resume auto continues from model_last" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "c" / "model_last.pt").read_bytes() == before
    assert not list((tmp_path / "c").glob("*.tmp"))


def test_a_run_that_overwrites_removes_numbered_checkpoints_of_a_relative_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = Path("checkpoints")
    folder.mkdir()
    names = (LAST, BEST, STABLE, "model_step_000010.pt", "notes.txt")
    for name in names:
        (folder / name).touch()
    remove_all(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
