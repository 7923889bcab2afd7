import json
import os
import random
from pathlib import Path

import pytest
import torch
from conftest import script, train_args

from utils import devices
from utils.devices import host_memory, missing_compiler, pick_dtype
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


@pytest.mark.parametrize("named", ["", "mine", "gone"])
@pytest.mark.parametrize("installed", ["gcc", "clang", "g++", ""])
def test_a_compiler_that_is_named_or_else_a_usual_one_has_to_be_there(
    monkeypatch, named, installed
):
    monkeypatch.setattr("shutil.which", lambda name: name if name in (installed, "mine") else None)
    for on_gpu, variable, usual in ((True, "CC", ("gcc", "clang")), (False, "CXX", ("g++",))):
        monkeypatch.setenv(variable, named)
        is_there = named == "mine" if named else installed in usual
        advice = f"install {usual[0]}, or name a compiler by {variable}"
        assert missing_compiler(on_gpu) == (None if is_there else advice)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_is_that_of_the_tightest_of_nested_control_groups(tmp_path, monkeypatch, version):
    """Also where a container sees a part of the groups above its own alone."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    controller, name, unlimited = "", "memory.max", "max"
    if version == 1:
        controller, name, unlimited = "memory", "memory.limit_in_bytes", "9223372036854771712"
    rng = random.Random(version)
    for case in range(50):
        root = tmp_path / str(case)
        monkeypatch.setattr(devices, "CGROUP_ROOT", root)
        monkeypatch.setattr(devices, "CGROUPS", root / "cgroup")
        names = [rng.choice(["docker", "a:b", "user.slice"]) for _ in range(rng.randint(0, 4))]
        expected = physical
        for depth in range(len(names) + 1):
            folder = Path(root, controller, *names[:depth])
            folder.mkdir(parents=True, exist_ok=True)
            limit = rng.choice([None, unlimited, str(rng.randint(1, physical))])
            if limit is not None:  # the file is not there, or not seen
                (folder / name).write_text(f"{limit}\n")
                expected = min(expected, int(limit) if limit != "max" else physical)
        (root / "other").mkdir()
        for file in ("memory.max", "memory.limit_in_bytes"):
            (root / "other" / file).write_text("1\n")
        lines = ["7:cpu,cpuacct:/other", f"4:{controller}:/{'/'.join(names)}", "1:name=systemd:/"]
        (root / "cgroup").write_text("\n".join(lines) + "\n")
        assert host_memory() == expected
    monkeypatch.setattr(devices, "CGROUPS", tmp_path / "none")  # as on macOS
    assert host_memory() == physical


def test_a_run_keeps_the_dtype_that_auto_has_taken(shards, tmp_path):
    auto = script(*train_args(shards, tmp_path, 2, "--dtype", "auto")).stdout
    config = json.loads((tmp_path / "logs/config.json").read_text())["config"]
    assert f"torch.{config['dtype']}" in auto
