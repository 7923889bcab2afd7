import os
import re
from itertools import permutations

import pytest
import torch
from conftest import script, train_args, user_error

from utils import devices
from utils.devices import host_memory, pick_dtype
from utils.logger import read_logged_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("seconds, dtype", [(0.9, torch.float32), (0.8, torch.bfloat16)])
def test_auto_takes_bfloat16_where_a_matmul_is_measured_to_be_faster(monkeypatch, seconds, dtype):
    measured = {torch.float32: 1.0, torch.bfloat16: seconds}
    monkeypatch.setattr(devices, "has_onednn", lambda dtype: True)
    monkeypatch.setattr(devices, "matmul_seconds", lambda n, dtype: measured[dtype])
    devices.is_bfloat16_faster.cache_clear()
    assert pick_dtype("auto", CPU) is dtype
    assert pick_dtype("auto", CPU, lambda _: False) is torch.float32  # another process is slower
    assert pick_dtype("float16", CPU) is torch.float16
    devices.is_bfloat16_faster.cache_clear()


def test_a_gpu_without_bfloat16_multiplies_in_float16_and_refuses_bfloat16(monkeypatch):
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: False)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    assert pick_dtype("auto", torch.device("cuda")) is torch.float16
    with user_error("this Tesla T4 has no bfloat16: take float16"):
        pick_dtype("bfloat16", torch.device("cuda"))


@pytest.mark.parametrize("cuda, hip, is_named", [(None, None, True), ("13.0", None, False)])
def test_a_wheel_without_cuda_beside_an_nvidia_driver_is_named(
    monkeypatch, capsys, cuda, hip, is_named
):
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.version.hip", hip)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")  # nvidia-smi
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = f"PyTorch {torch.__version__} is a wheel without CUDA, and this machine has an NVIDIA"
    devices.warn_without_cuda.cache_clear()
    for _ in range(2):
        assert devices.pick_device("auto") == CPU
    devices.warn_without_cuda.cache_clear()
    assert capsys.readouterr().err.count(f"warning: using the CPU: {message}") == is_named
    with user_error(f"this machine has cpu{f'; {re.escape(message)}' * is_named}"):
        devices.pick_device("cuda")


@pytest.mark.parametrize(
    "controller, name, unlimited",
    [("memory", "memory.limit_in_bytes", "9223372036854771712"), ("", "memory.max", "max")],
)
def test_memory_is_that_of_the_tightest_of_nested_control_groups(
    tmp_path, monkeypatch, controller, name, unlimited
):
    """Also where a container sees a part of the groups above its own alone."""
    monkeypatch.setattr(devices, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(devices, "CGROUPS", tmp_path / "cgroup")
    physical = host_memory()  # without control groups, as on macOS
    assert physical == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (tmp_path / "cgroup").write_text(f"7:cpu,cpuacct:/other\n4:{controller}:/docker/a:b/c\n")
    places = [tmp_path / controller / group for group in ("", "docker", "docker/a:b/c", "other")]
    for limits in permutations([physical // 2, physical // 3, unlimited]):
        for place, limit in zip(places, [*limits, 1], strict=True):
            place.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(f"{limit}\n")
        assert host_memory() == physical // 3


def test_a_run_keeps_the_dtype_that_auto_has_taken(shards, tmp_path):
    auto = script(*train_args(shards, tmp_path, 2, "--dtype", "auto")).stdout
    logged = read_logged_config(tmp_path / "logs")
    assert logged["script"] == "train.py" and f"torch.{logged['config']['dtype']}" in auto
