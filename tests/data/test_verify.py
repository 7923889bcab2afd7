from conftest import script


def test_verify_proves_the_order_and_finds_a_flipped_bit(shards, tmp_path):
    done = script("data/verify.py", "--data_dir", shards, "--block_size", 32)
    assert "sequences of 32 tokens, each exactly once in an epoch" in done.stdout
    for path in shards.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "train_000000.npy"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    done = script("data/verify.py", "--data_dir", tmp_path, "--block_size", 32, code=2)
    assert "train_000000.npy differs from the manifest's checksum" in done.stderr
