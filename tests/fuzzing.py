"""Damaged files for the readers of this project: case N is the same damage on every machine.

    python tests/fuzzing.py 1234          # one case, its damage and its outcome
    python tests/fuzzing.py 0 10000       # a range, a line of outcome for each

Each case damages a small valid file and reads it as the scripts do. Named errors in one sentence
are fine, and so are sane values. Anything else is an outcome that begins with FAILED, or the end of
the process: another error, a warning, memory, code that is run; a signal, a case that takes long.
"""

import faulthandler
import json
import os
import random
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from damage import damage_bytes, damage_checkpoint, damage_json
from data.shard_writer import ShardWriter
from utils.log_files import logged_run, read_metrics

from config import TrainConfig
from data.loader import Sequences, TokenStream
from data.sharder import Sharder
from data.shards import corpus_name, read_manifest, write_manifest
from evaluation.figure import draw
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import load_pretrained, save_pretrained, weights_to_hf
from training.checkpoint import (
    assemble,
    config_values,
    load_checkpoint,
    load_model,
    load_weights,
    model_config,
    save_checkpoint,
)
from training.guard import Guard
from training.optim import make_optimizers
from training.parallel import gather_state, load_optimizer_state
from utils.errors import UserError

NAMED = (UserError, UserError, UserError, UserError, UserError)
SECONDS, MEMORY = 20, 2**30  # more than a second or a hundredth of it is never needed
CONFIG = GPTConfig(block_size=8, vocab_size=257, n_layer=1, n_head=2, n_embd=8)
CANARY = "ran"  # code that is run makes this file


def make_shards(folder: Path) -> None:
    suffix, entries = folder.suffix, []
    for split, index, tokens in (("train", 0, 90), ("train", 1, 41), ("val", 0, 30)):
        writer = ShardWriter(folder, split, index, suffix)
        writer.append(np.arange(tokens, dtype=np.uint16) % 257)
        entries.append(writer.finish())
    unfinished = {"val": {"index": 0, "tokens": 20}}
    state = {"source": None, "documents": 3, "tokens": 0, "open": unfinished}
    progress = {"complete": False, "state": state, "documents": 3, "skipped": {"empty": 1}}
    write_manifest(folder, {**settings_of(folder), "shards": entries, **progress})


def settings_of(folder: Path) -> dict:
    """What data/fineweb-edu.py would go on with."""
    text = {"tokenizer": "bytes", "vocab_size": 257, "eot": 256, "source": ["a.txt"]}
    return {**text, "shard_size": 90, "format": folder.suffix[1:]}


def read_shards(folder: Path, n: int) -> None:
    assert type(corpus_name(folder)) is str
    manifest = read_manifest(folder)
    assert manifest is None or all(type(s["tokens"]) is int for s in manifest["shards"])
    for split in ("train", "val"):
        sequences = Sequences(TokenStream(folder, split), 8)
        x, y = sequences.batch(np.arange(len(sequences)))
        assert x.shape == y.shape == (len(sequences), 8) and x.dtype == y.dtype == np.int64
        assert x.min() >= 0 and max(x.max(), y.max()) < sequences.stream.vocab_size <= 2**16
    sharder = Sharder(folder, settings_of(folder), None)
    assert sharder.tokens >= 0 and not sharder.full
    sharder.reopen()
    sharder.end(complete=True)


def make_model() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    (optimizer,) = make_optimizers(model, TrainConfig())
    model(torch.arange(8)[None], torch.arange(8)[None]).backward()
    optimizer.step()
    return model, optimizer


def make_checkpoint(folder: Path) -> None:
    model, optimizer = make_model()
    weights, moments = gather_state(model, [optimizer])
    state = assemble(
        weights,
        optimizer=moments,
        step=1,
        tokens=64,
        best_loss=5.5,
        seed=7,
        run_id="r",
        model_config=config_values(CONFIG),
        tokenizer="bytes",
        train_tokens=131,
        train_config=TrainConfig(n_layer=1, n_head=2, n_embd=8, block_size=8).to_dict(),
        guard=Guard(3.0, {"loss": [5.5], "grad_norm": [1.0]}).state,
    )
    save_checkpoint(folder / "model_last.pt", state)


def check_model(model: GPT) -> None:
    assert all(p.dtype == torch.float32 and p.is_contiguous() for p in model.parameters())
    with torch.no_grad():
        assert model(torch.zeros(1, 1, dtype=torch.long)).shape == (1, 1, model.config.vocab_size)


def read_checkpoint(folder: Path, n: int) -> None:
    path = folder / "model_last.pt"
    state = load_checkpoint(path)
    for key in ("step", "tokens", "seed", "train_tokens"):
        assert type(state[key]) is int and 0 <= state[key] < 2**63, key
    assert type(state["best_loss"]) is float
    TrainConfig.from_dict(state["train_config"]).check()
    assert Guard(3.0, state["guard"]).check(5.0, 1.0) is None
    check_model(load_model(path)[0])
    model = GPT(model_config(state, path))
    load_weights(model, state, exact=True)
    check_model(model)
    (optimizer,) = make_optimizers(model, TrainConfig())
    load_optimizer_state(model, [optimizer], state["optimizer"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def make_metrics(folder: Path) -> None:
    train = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 100.0, "mfu": None, "ms": 30.5}
    rows = [
        {"step": s, "split": "train", "loss": 5.5 - s / 10, "tokens": 64 * s, **train}
        for s in range(1, 6)
    ]
    rows.append({"step": 4, "split": "val", "loss": 5.25, "bits_per_byte": 7.5})
    rows.append({"step": 4, "split": "hellaswag", "n": 500, "acc": 0.25, "acc_norm": 0.26})
    rows.append({"step": 2, "split": "resume"})
    rows += [{**rows[s], "step": s + 1} for s in range(2, 5)]
    rows.append({"step": 5, "split": "val", "loss": 5.0, "bits_per_byte": 7.25})
    rows.append({"step": 5, "split": "hellaswag", "n": 500, "acc": 0.25, "acc_norm": 0.27})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {"train_config": {"checkpoint_dir": "c", "max_steps": 5, "data_dir": "edu_fineweb10B"}}
    run["model_config"] = {"vocab_size": 50257}
    (folder / "config.json").write_text(json.dumps(run))


def read_log(folder: Path, n: int) -> None:
    assert type(logged_run(folder)) in (dict, type(None))
    splits = read_metrics(folder)
    for rows in splits.values():
        steps = [row["step"] for row in rows]
        assert steps == sorted(set(steps)) and all(type(s) is int and s >= 0 for s in steps)
        numbers = [v for row in rows for k, v in row.items() if k != "split" and v is not None]
        assert all(type(v) in (int, float) for v in numbers)
    if n % 10 < 2:  # a picture takes a third of a second
        draw([folder], folder / "a.png", "gpt2", ("step", "tokens", "hours")[n // 10 % 3])
        assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


def make_pretrained(folder: Path) -> None:
    model, _ = make_model()
    save_pretrained(model, folder)
    if folder.suffix != ".safetensors":
        (folder / "model.safetensors").unlink()
        torch.save(
            weights_to_hf(model.state_dict(), CONFIG),
            folder / "pytorch_model.bin",
            _use_new_zipfile_serialization=folder.suffix == ".zip",
        )


def read_pretrained(folder: Path, n: int) -> None:
    check_model(load_pretrained(folder))


# kind -> (makes a valid folder, reads one, {file: damages that fit it})
Damage = Callable[[random.Random, bytes], bytes]
SHARDS = [damage_bytes]
KINDS: dict[str, tuple[Callable, Callable, dict[str, list[Damage]]]] = {
    "shards.npy": (
        make_shards,
        read_shards,
        {"train_000000.npy": SHARDS, "manifest.json": [damage_bytes, damage_json, damage_json]},
    ),
    "a.pt": (make_checkpoint, read_checkpoint, {"model_last.pt": [damage_checkpoint]}),
    "metrics": (
        make_metrics,
        read_log,
        {"metrics.jsonl": [damage_bytes, damage_json, damage_json], "config.json": [damage_json]},
    ),
    "b.pt": (make_checkpoint, read_checkpoint, {"model_last.pt": [damage_checkpoint]}),
    "shards.bin": (
        make_shards,
        read_shards,
        {"train_000001.bin": SHARDS, "manifest.json": [damage_json]},
    ),
    "hf.safetensors": (
        make_pretrained,
        read_pretrained,
        {"model.safetensors": [damage_bytes], "config.json": [damage_json, damage_bytes]},
    ),
    "hf.zip": (make_pretrained, read_pretrained, {"pytorch_model.bin": [damage_checkpoint]}),
    "hf.legacy": (make_pretrained, read_pretrained, {"pytorch_model.bin": [damage_bytes]}),
}


def template(kind: str) -> dict[str, bytes]:
    """The valid files of a kind."""
    with tempfile.TemporaryDirectory(suffix=Path(kind).suffix) as folder:
        KINDS[kind][0](Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def run_case(n: int, kind: str, files: dict[str, bytes]) -> str:
    """Damages one of the files, reads them all and gives the named error, "ok" or "FAILED"."""
    _, read, damages = KINDS[kind]
    rng = random.Random(n)
    name = rng.choice(list(damages))
    with tempfile.TemporaryDirectory(suffix=Path(kind).suffix) as folder:
        os.chdir(folder)
        for file, content in files.items():
            damaged = rng.choice(damages[name])(rng, content) if file == name else content
            Path(folder, file).write_bytes(damaged)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for message in (  # torch's own, before it gives up; matplotlib's on a loss of 1e308
                "Detected pickle protocol",
                "TypedStorage is deprecated",
                "overflow encountered in exp",
            ):
                warnings.filterwarnings("ignore", message)
            try:
                read(Path(folder), n)
                outcome = "ok"
            except NAMED as error:
                outcome = f"{type(error).__name__}: {error}"
            except Exception as error:  # what is to be found
                traceback.print_exc()
                outcome = f"FAILED with {type(error).__name__}: {error}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        for wrong, what in (
            (not outcome.isprintable() or len(outcome) > 1000, f"no sentence: {outcome!a}"),
            (said, f"warned: {[str(w.message) for w in said]}"),
            (Path(CANARY).exists(), "ran code"),
            (grown * 1024 > MEMORY, f"took {grown:,} kB"),
        ):
            if wrong:
                outcome = f"FAILED: {what}"
        os.chdir("/")
    return outcome


def main(first: int, stop: int) -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (16 * MEMORY, 16 * MEMORY))
    templates = {kind: template(kind) for kind in KINDS}
    for n in range(first, stop):
        kind = list(KINDS)[n % len(KINDS)]
        print(f"{n} {kind}", end=" ", flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(run_case(n, kind, templates[kind]))
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    numbers = list(map(int, sys.argv[1:]))
    main(numbers[0], numbers[1] if numbers[1:] else numbers[0] + 1)
