"""The work of scripts/shakespeare.sh, which says how to use it."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.shards import ShardWriter, write_manifest  # noqa: E402
from data.tokenizer import ByteTokenizer  # noqa: E402

MARK = 1.886  # nats per character at which nanoGPT's documented run for a CPU ended here
RUN = ROOT / "runs" / "shakespeare"
# the last tenth of tinyshakespeare.txt is 858 sequences of 130 characters
SETTINGS = {
    "recipe": "modern,momentum_warmup=1000",
    "n_layer": 4,
    "n_head": 2,
    "n_embd": 128,
    "block_size": 130,
    "micro_batch_size": 16,
    "total_batch_size": 16 * 130,
    "max_steps": 1032,
    "warmup_steps": 20,
    "dtype": "bfloat16",
    "device": "cpu",
    "eval_every": 172,
    "val_tokens": 10**9,
    "save_every": 0,
    "sample_every": 0,
}


def shard(text: bytes, folder: Path) -> None:
    """The first nine tenths of a text as train tokens, the rest as validation tokens; each begins
    with end of text, so that every character has one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    cut = len(text) * 9 // 10
    shards = []
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        writer = ShardWriter(folder, split, 0, ".npy")
        writer.append(np.array([ByteTokenizer.eot], np.uint16))
        writer.append(np.frombuffer(part, np.uint8).astype(np.uint16))
        shards.append(writer.finish())
    kind = ByteTokenizer
    about = {"tokenizer": kind.name, "vocab_size": kind.vocab_size, "eot": kind.eot}
    write_manifest(folder, {**about, "source": ["text"], "shards": shards})


def main() -> None:
    began, text, *flags = sys.argv[1:]
    shard(Path(text).read_bytes(), RUN / "data")
    command = [sys.executable, str(ROOT / "train.py"), "--overwrite", "--data_dir", RUN / "data"]
    command += ["--checkpoint_dir", RUN / "checkpoints", "--log_dir", RUN / "logs"]
    for name, value in SETTINGS.items():
        command += [f"--{name}", value]
    passed, loss = None, None
    with subprocess.Popen([*map(str, command), *flags], stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            print(line, end="", flush=True)
            if found := re.match(r"step \d+: validation loss ([\d.]+)", line):
                loss = float(found[1])
                if passed is None and loss <= MARK:
                    passed = round(time.time() - float(began), 1)
    if run.returncode:
        sys.exit(run.returncode)
    figure = {"nats_per_character": loss, "seconds": round(time.time() - float(began), 1)}
    print(json.dumps({**figure, f"seconds_to_{MARK}": passed}))


if __name__ == "__main__":
    main()
