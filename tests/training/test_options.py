"""Options as people know them from elsewhere, and as files hold them."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, losses, script, train_args
from training.options import NANOGPT_OPTIONS, read_config_file
from training.resume import check_saved_min_lr, length_warnings, resume_warnings

from config import TrainConfig
from data.loader import Sequences, TokenStream
from training import options
from training.checkpoint import load_checkpoint
from utils.cli import given_options
from utils.devices import pick_dtype
from utils.errors import UserError

SMALL_FILE = """# a comment
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
micro_batch_size = 4
total_batch_size = 512
max_lr = 3e-3
sample_every = 0
val_tokens = 4096
device = "cpu"
"""


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--learning_rate=1e-3", "--max_lr is the learning rate"),
        ("--batch_size", "--micro_batch_size is"),
        ("--eval_only=True", "evaluate.py --tasks val"),
        ("--init_from=resume", "--resume auto continues a run"),
        ("--compile=False", "--use_torch_compile compiles"),
        ("--use_torch_compile=False", "--use_torch_compile takes no value"),
        ("--out-dir=x", "give --checkpoint_dir and --log_dir"),
    ],
)
def test_habits_of_nanogpt_get_the_right_flag(flag, message):
    done = script("train.py", flag, code=2)
    assert message in done.stderr and "Traceback" not in done.stderr


def test_no_option_of_nanogpt_is_called_as_one_of_ours():
    assert not NANOGPT_OPTIONS.keys() & TrainConfig.__dataclass_fields__.keys()
    table = (ROOT / "docs" / "NANOGPT.md").read_text()
    assert all(f"`{name}`" in table for name in NANOGPT_OPTIONS)


def test_a_file_of_options_is_read_and_the_command_line_wins(shards, tmp_path):
    (tmp_path / "my.toml").write_text(SMALL_FILE)
    folders = train_args(shards, tmp_path, 6)[1:7]
    script("train.py", "--config", tmp_path / "my.toml", *folders, "--max_steps", 6, "--seed", 3)
    saved = json.loads((tmp_path / "logs/config.json").read_text())["train_config"]
    assert (saved["n_embd"], saved["max_lr"], saved["seed"], saved["config"]) == (
        32,
        3e-3,
        3,
        str(tmp_path / "my.toml"),
    )
    # the run's own config.json gives the same run again, in other folders
    again = train_args(shards, tmp_path / "again", 6)[3:7]
    script("train.py", "--config", tmp_path / "logs/config.json", *again)
    assert losses(tmp_path / "again") == losses(tmp_path)
    # resumed, the file stands between command line and checkpoint
    (tmp_path / "my.toml").write_text(SMALL_FILE + "weight_decay = 0.3\n")
    last = ["--resume", "auto", "--max_steps", 7]
    script("train.py", "--config", tmp_path / "my.toml", *folders, *last)
    saved = json.loads((tmp_path / "logs/config.json").read_text())["train_config"]
    assert (saved["weight_decay"], saved["seed"], max(losses(tmp_path))) == (0.3, 3, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate = 1", "no option learning_rate: --max_lr"),
        ("n_layers = 2", "did you mean n_layer"),
        ("n_layer = two", "neither TOML"),
        ("n_layer = 'two'", "n_layer = 'two' is of a wrong type"),
        ("data_dir = ''", 'data_dir = "" has no value; give one, or leave it out'),
    ],
)
def test_a_file_with_a_wrong_option_is_named(tmp_path, text, message):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        TrainConfig.from_dict(read_config_file(path))
    assert "cannot be read" in script("train.py", "--config", tmp_path / "b.toml", code=2).stderr


@pytest.mark.parametrize("path", sorted((ROOT / "configs").iterdir()), ids=lambda path: path.name)
def test_the_worked_files_are_valid(path: Path):
    config = TrainConfig.from_dict(read_config_file(path))
    config.check()
    world = {"gpt2-124M.toml": 8, "gpt2-1558M.toml": 32}.get(path.name, 1)
    assert config.sequences_per_step(world) % (config.micro_batch_size * world) == 0
    script("train.py", "--config", path, "--dry_run", "--device", "cpu")


def test_warmup_follows_the_length_of_the_run_and_one_that_is_too_long_is_named():
    assert TrainConfig().resolved_warmup == 715
    assert TrainConfig(max_steps=500).resolved_warmup == 50
    long = TrainConfig(max_steps=500, warmup_steps=715)
    (warning,) = length_warnings(long, 16)
    assert "--warmup_steps 715" in warning and "give 50 or less" in warning
    assert length_warnings(TrainConfig(max_steps=500), 16) == []
    assert TrainConfig(max_steps=500).to_dict()["warmup_steps"] == 50  # a longer resume keeps it


@pytest.mark.parametrize(
    ("device", "args", "file", "expected"),
    [
        ("cpu", [], {}, False),
        ("cuda", [], {}, True),
        ("h100", ["--dry_run"], {}, True),
        ("cuda", ["--no_use_torch_compile"], {}, False),
        ("cuda", ["--no-use-torch-compile"], {}, False),
        ("cpu", ["--use_torch_compile"], {}, True),
        ("cuda", [], {"use_torch_compile": False}, False),
        ("cpu", ["--config", "gpu.toml"], {"use_torch_compile": True}, True),
    ],
)
def test_training_compiles_on_cuda_unless_told_otherwise(monkeypatch, device, args, file, expected):
    monkeypatch.setattr(options, "pick_device", torch.device)
    given = file.get("use_torch_compile", "--use_torch_compile" in args)
    config = TrainConfig(device=device, use_torch_compile=given)
    assert options.should_compile(config, {*file, *given_options(args)}) == expected


def test_auto_is_bfloat16_where_the_processor_has_it(monkeypatch):
    cpu, mps = torch.device("cpu"), torch.device("mps")
    for found, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda found=found: found)
        assert pick_dtype("auto", cpu) is dtype and pick_dtype("auto", mps) is torch.float32
        assert pick_dtype("float32", cpu) is torch.float32


def test_options_that_a_resumed_run_did_not_give_are_told_from_those_it_gave(shards, trained):
    with pytest.raises(UserError, match="--min_lr 0.001 of the checkpoint .* give --min_lr as w"):
        check_saved_min_lr(TrainConfig(min_lr=1e-3, max_lr=1e-4))
    check_saved_min_lr(TrainConfig(max_lr=1e-4))
    saved = load_checkpoint(trained / "checkpoints/model_last.pt")
    config = TrainConfig.from_dict({**saved["train_config"], "max_lr": 0.002, "grad_clip": 1.0})
    val = Sequences(TokenStream(shards, "val"), 32)
    notes = resume_warnings(config, saved, TokenStream(shards, "train"), val)
    assert notes == ["note: --max_lr was 0.003 and is 0.002"]
