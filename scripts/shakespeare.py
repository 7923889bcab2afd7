"""Train on a text and report nats per character; scripts/shakespeare.sh says how to run it."""

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Python puts scripts/ there instead

import numpy as np

from data.sharder import ShardWriter
from data.shards import write_manifest
from data.tokenizer import ByteTokenizer

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "runs" / "shakespeare"
TARGET = 1.886  # nats per character after nanoGPT's documented run for a CPU
# the last tenth of tinyshakespeare.txt is 507 sequences of 220 characters
SETTINGS = """--recipe modern --n_layer 4 --n_head 2 --n_embd 128 --block_size 220
    --micro_batch_size 9 --total_batch_size 1980 --max_steps 980 --warmup_steps 20 --dtype auto
    --device cpu --eval_every 196 --val_tokens 1000000000 --save_every 0 --sample_every 0"""


def write_shards(text: bytes, folder: Path) -> None:
    """Write the first nine tenths of a text as train tokens, the rest as validation tokens. Each
    part begins with end of text, so that its first character is predicted too."""
    folder.mkdir(parents=True, exist_ok=True)
    cut, shards, sizes = len(text) * 9 // 10, [], {}
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        writer = ShardWriter(folder, split, 0, ".npy")
        writer.append(np.array([ByteTokenizer.eot, *part], np.uint16))
        shards.append(writer.finish())
        sizes[split] = len(part)
    manifest = {"tokenizer": "bytes", "vocab_size": 257, "bytes": sizes, "shards": shards}
    write_manifest(folder, manifest)


def main() -> None:
    began, path, *flags = sys.argv[1:]
    text = Path(path).read_bytes()
    data_dir = RUN / f"data-{hashlib.sha256(text).hexdigest()[:8]}"  # other texts have others
    write_shards(text, data_dir)
    folders = ["--data_dir", data_dir, "--checkpoint_dir", RUN / "checkpoints"]
    command = [sys.executable, ROOT / "train.py", *folders]
    seconds_to_target, loss = None, None
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *SETTINGS.split(), *flags], **pipes) as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            if match := re.match(r"step \d+: validation loss ([\d.]+)", line):
                loss = float(match[1])
                if seconds_to_target is None and loss <= TARGET:
                    seconds_to_target = round(time.time() - float(began), 1)
    if run.returncode:
        sys.exit(run.returncode)
    if loss is not None:  # None: --help, --dry_run
        result = {"nats_per_character": loss, "seconds": round(time.time() - float(began), 1)}
        print(json.dumps({**result, f"seconds_to_{TARGET}": seconds_to_target}))


if __name__ == "__main__":
    main()
