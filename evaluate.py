"""Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test.

    python evaluate.py --checkpoint checkpoints/model_best.pt --tasks val hellaswag lambada
    python evaluate.py --model gpt2 --tasks hellaswag --data hellaswag_val.jsonl --limit 1000
    torchrun --standalone --nproc_per_node=8 evaluate.py --tasks hellaswag lambada cbt_cn cbt_ne

Prints a table (task, protocol, metric, number of examples, value and its standard error, what was
published for OpenAI's GPT-2 of that size) and writes it as JSON. The figures depend neither on the
batch size nor on the number of processes.
"""

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from config import ConfigError, EvalConfig, TrainConfig
from data.loader import Sequences, TokenStream
from data.shards import corpus_name
from data.tokenizer import Tokenizer, bytes_per_token, load_tokenizer
from evaluation.metrics import Result, benchmark, shared_rows, validation_loss
from evaluation.published import PUBLISHED
from evaluation.scoring import score_items
from model.gpt import GPT
from model.packed import packed
from training.checkpoint import open_model
from utils import distributed, malloc
from utils.cli import run
from utils.distributed import Process, pick_dtype
from utils.files import atomic_write


def check(config: EvalConfig) -> dict[str, Path | None]:
    """The file of each benchmark, None for the hub; ConfigError for the first wrong setting."""
    tasks = [task for task in config.tasks if task != "val"]
    if not config.tasks or len(set(config.tasks)) < len(config.tasks):
        raise ConfigError(f"--tasks {' '.join(config.tasks)}: give each task once")
    if config.data and len(config.data) != len(tasks):
        raise ConfigError(
            f"--data has {len(config.data)} files for the benchmarks {' '.join(tasks) or 'none'}; "
            "give one for each, in that order"
        )
    for name in ("limit", "val_tokens", "batch_size"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} must be at least 1")
    for path in filter(None, (config.out, config.dump)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{path} could not be written: {error.strerror}") from error
        if path.is_dir():
            raise ConfigError(f"{path} could not be written: it is a folder")
    return dict(zip(tasks, config.data or [None] * len(tasks), strict=True))


def open_validation(config: EvalConfig, model: GPT, tokenizer: Tokenizer, saved: dict) -> Sequences:
    """The validation sequences of --data_dir, or of the folder that the model was trained on."""
    folder = config.data_dir
    if folder is None and saved:
        folder = TrainConfig.from_dict(saved["train_config"]).data_dir
    if folder is None:
        raise ConfigError("the task val needs --data_dir, a folder of shards")
    stream = TokenStream(folder, "val")
    if stream.tokenizer != tokenizer.name:
        raise ConfigError(f"{folder} holds {stream.tokenizer} tokens, the model {tokenizer.name}")
    return Sequences(stream, model.config.block_size)


def validation(
    config: EvalConfig, model: GPT, tokenizer: Tokenizer, sequences: Sequences, process: Process
) -> list[Result]:
    """Loss in nats per token, perplexity and bits per byte on a folder of shards."""
    scores = validation_loss(
        model,
        sequences,
        process,
        tokens=config.val_tokens,
        batch_size=config.batch_size,
        dtype=pick_dtype(config.dtype, process.device),
        token_bytes=bytes_per_token(tokenizer),
    )
    n = min(len(sequences), max(1, config.val_tokens // sequences.block_size))
    values = {**scores, "perplexity": math.exp(scores["loss"])}
    tokens = n * sequences.block_size
    corpus = corpus_name(sequences.stream.shards[0].path.parent)
    return [Result("val", corpus, key, tokens, value) for key, value in values.items()]


def published(result: Result, size: str | None) -> tuple[float, str] | None:
    """Value and source for OpenAI's GPT-2 of a size, the smallest where the size has no name."""
    return PUBLISHED.get((result.task, result.protocol, result.metric), {}).get(size or "gpt2")


def table(results: list[Result], size: str | None) -> str:
    """The results as lines of text."""
    lines = [["task", "protocol", "metric", "n", "value", "", f"OpenAI's {size or 'gpt2'}"]]
    sources: list[str] = []
    for r in results:
        value, source = published(r, size) or (None, None)
        if source is not None and source not in sources:
            sources.append(source)
        spread = "" if r.stderr is None else f"± {r.stderr:.4f}"
        theirs = "" if source is None else f"{value:.4f} [{sources.index(source) + 1}]"
        lines.append([r.task, r.protocol, r.metric, f"{r.n:,}", f"{r.value:.4f}", spread, theirs])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
    notes = [f"[{i}] {source}" for i, source in enumerate(sources, 1)]
    return "\n".join([form.format(*line).rstrip() for line in lines] + notes)


def main(config: EvalConfig) -> None:
    files = check(config)
    process = distributed.start(config.device)
    torch.set_float32_matmul_precision("highest")  # float32 here means that, not TF32
    model, name, saved = open_model(config.checkpoint, config.model, exact=True)
    tokenizer = load_tokenizer(name)
    # whatever cannot be read or written is found before the first forward pass
    val = open_validation(config, model, tokenizer, saved) if "val" in config.tasks else None
    rows = {task: shared_rows(task, path, process)[: config.limit] for task, path in files.items()}
    model = packed(model.to(process.device), pick_dtype(config.dtype, process.device), rows=2048)
    malloc.shared()
    results: list[Result] = []
    examples: list[dict] = []
    for task in config.tasks:
        if val is not None and task == "val":
            results += validation(config, model, tokenizer, val, process)
            continue
        with tqdm(desc=task, unit="row", disable=None if process.is_main else True) as bar:
            score = partial(
                score_items,
                model,
                tokenizer,
                process,
                batch_size=config.batch_size,
                dtype=pick_dtype(config.dtype, process.device),
                progress=bar.update,
            )
            found, more = benchmark(task, rows[task], score, tokenizer, config.hellaswag_protocols)
        results += found
        examples += more
    if process.is_main:
        write(config, results, examples, model.config.size)
    distributed.stop()


def write(
    config: EvalConfig, results: list[Result], examples: list[dict], size: str | None
) -> None:
    """The files, and the table on standard output."""
    rows = [
        asdict(r) | {"published": published(r, size), "published_size": size or "gpt2"}
        for r in results
    ]
    report = {"model": config.model or str(config.checkpoint), "dtype": config.dtype}
    texts = {config.out: json.dumps({**report, "results": rows}, indent=1)}
    if config.dump is not None:
        texts[config.dump] = "".join(json.dumps(example) + "\n" for example in examples)
    for path, text in texts.items():
        try:
            with atomic_write(path) as file:
                file.write(text.encode())
        except OSError as error:
            raise ConfigError(f"{path} could not be written: {error.strerror}") from error
    print(table(results, size))
    print(f"wrote {', '.join(map(str, texts))}")


if __name__ == "__main__":
    run(main, EvalConfig)
