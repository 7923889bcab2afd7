import shutil
from importlib import import_module

import pytest

from utils.errors import UserError

verify = import_module("data.verify")


def test_verify_proves_the_order_and_finds_a_flipped_bit(shards, tmp_path, capsys):
    verify.main(verify.VerifyConfig((shards,), block_size=32))
    assert "sequences of 32 tokens, each exactly once in an epoch" in capsys.readouterr().out
    shutil.copytree(shards, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "train_000000.npy"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="train_000000.npy differs from the manifest's checksum"):
        verify.main(verify.VerifyConfig((tmp_path,), block_size=32))
