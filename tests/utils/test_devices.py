import json

import pytest
import torch
from conftest import script, train_args

from utils import devices
from utils.devices import has_c_compiler, pick_dtype
from utils.errors import UserError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("seconds", "dtype"), [(0.9, torch.float32), (0.8, torch.bfloat16)])
def test_auto_takes_bfloat16_where_a_matmul_is_measured_to_be_faster(monkeypatch, seconds, dtype):
    measured = {torch.float32: 1.0, torch.bfloat16: seconds}
    monkeypatch.setattr(devices, "has_onednn", lambda dtype: True)
    monkeypatch.setattr(devices, "matmul_seconds", lambda n, dtype: measured[dtype])
    devices.is_bfloat16_faster.cache_clear()
    assert pick_dtype("auto", CPU) is dtype
    assert pick_dtype("auto", CPU, lambda _: False) is torch.float32  # another process is slower
    assert pick_dtype("float16", CPU) is torch.float16
    devices.is_bfloat16_faster.cache_clear()


@pytest.fixture
def t4(monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    return torch.device("cuda")


def test_a_gpu_without_bfloat16_multiplies_in_float16_and_refuses_bfloat16(t4):
    assert pick_dtype("auto", t4) is torch.float16
    with pytest.raises(UserError, match="this Tesla T4 has none; give --dtype float16"):
        pick_dtype("bfloat16", t4)


@pytest.mark.parametrize("compiler", ["gcc", "clang", "CC", None])
def test_triton_takes_one_of_three_compilers(monkeypatch, compiler):
    monkeypatch.setenv("CC", "mine" if compiler == "CC" else "")
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)
    assert has_c_compiler() == (compiler is not None)


def test_a_run_keeps_the_dtype_that_auto_has_taken(shards, tmp_path):
    auto = script(*train_args(shards, tmp_path, 2, "--dtype", "auto")).stdout
    config = json.loads((tmp_path / "logs/config.json").read_text())["config"]
    assert f"torch.{config['dtype']}" in auto
