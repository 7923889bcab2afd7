import json

import pytest
import torch
from conftest import script, train_args

from utils import devices
from utils.devices import autocast, onednn_speedup, pick_dtype

CPU = torch.device("cpu")


@pytest.mark.parametrize(("speedup", "dtype"), [(1.3, torch.float32), (1.4, torch.bfloat16)])
def test_auto_takes_bfloat16_where_a_matmul_is_measured_to_be_faster(monkeypatch, speedup, dtype):
    speedups = {torch.float32: 1.1, torch.bfloat16: speedup}  # of oneDNN beside MKL in float32
    monkeypatch.setattr(devices, "onednn_speedup", speedups.get)
    assert not devices.is_faster(torch.float32)
    assert pick_dtype("auto", CPU) is dtype
    assert pick_dtype("auto", CPU, lambda _: False) is torch.float32  # another process is slower
    assert pick_dtype("float16", CPU) is torch.float16


def test_attention_on_cuda_does_without_cudnn_where_shapes_vary_until_the_next_call():
    for fixed_shapes in (True, False):
        with autocast(CPU, torch.bfloat16, fixed_shapes=fixed_shapes):
            assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.cudnn_sdp_enabled() == fixed_shapes


def test_the_speedup_is_that_of_a_large_matmul():
    if not onednn_speedup(torch.bfloat16):
        pytest.skip("no instructions for bfloat16")
    assert 0.1 < onednn_speedup(torch.bfloat16) < 10
    assert onednn_speedup(torch.bfloat16) == onednn_speedup(torch.bfloat16)


def test_a_run_keeps_the_dtype_that_auto_has_taken_and_names_a_faster_one(shards, tmp_path):
    auto = script(*train_args(shards, tmp_path, 2, "--dtype", "auto")).stdout
    config = json.loads((tmp_path / "logs/config.json").read_text())["config"]
    assert f"torch.{config['dtype']}" in auto and "warning: --dtype" not in auto
    slower = {"float32": "bfloat16", "bfloat16": "float32"}[config["dtype"]]
    args = train_args(shards, tmp_path, 3, "--dtype", slower, "--overwrite")
    assert f"auto would take torch.{config['dtype']}" in script(*args).stdout
