"""Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test.

    python evaluate.py --checkpoint checkpoints/model_best.pt --tasks val hellaswag lambada
    python evaluate.py --model gpt2 --tasks hellaswag --data hellaswag_val.jsonl --limit 1000
    torchrun --standalone --nproc_per_node=8 evaluate.py --tasks hellaswag lambada cbt_cn cbt_ne

Prints a table (task, protocol, metric, number of examples, value with its standard error, published
value of OpenAI's GPT-2 of that size) and writes it as JSON. The number of correct answers depends
neither on the batch size nor on the number of processes.
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from config import ConfigError, TrainConfig
from data.loader import Sequences, TokenStream
from data.shards import corpus_name
from data.tokenizer import Tokenizer, bytes_per_token, load_tokenizer
from evaluation.metrics import Result, score_benchmark, validation_loss
from evaluation.published import PUBLISHED
from evaluation.scoring import score_items
from evaluation.tasks import read_rows_on_all
from model import cpu
from model.gpt import GPT
from training.checkpoint_folder import find_best, open_model, refuse_both_sources
from utils import distributed, malloc
from utils.cli import run
from utils.distributed import pick_dtype
from utils.files import atomic_write

Task = Literal["val", "hellaswag", "lambada", "cbt_cn", "cbt_ne"]
Protocol = Literal["build-nanogpt", "lm-eval"]


@dataclass
class EvalConfig:
    """Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py, or a folder: its best one, else its newest."""
    model: str | None = None
    """Score a Hugging Face GPT-2 instead: its name (gpt2, gpt2-medium, ...) or folder."""
    tasks: tuple[Task, ...] = ("hellaswag", "lambada")
    """Tasks to score."""
    data: tuple[Path, ...] = ()
    """Files in the original formats, one per benchmark of --tasks in order; else from the hub."""
    data_dir: Path | None = None
    """Folder of shards for the task val; by default the one the checkpoint was trained on."""
    hellaswag_protocols: tuple[Protocol, ...] = ("build-nanogpt", "lm-eval")
    """HellaSwag's raw text, or lm-evaluation-harness's clean text; each is a pass over the data."""
    limit: int | None = None
    """Score only the first examples of each benchmark."""
    val_tokens: int = 10_485_760
    """Validation tokens; all if there are fewer."""
    batch_size: int = 16
    """Examples in a forward pass."""
    out: Path | None = None
    """JSON file for the table; default: evaluation_NAME.json beside the checkpoint NAME.pt."""
    dump: Path | None = None
    """JSON lines file with one row per example and protocol."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Dtype of matmuls; auto: bfloat16 where the processor has it."""


@contextmanager
def naming_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a ConfigError that names the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} could not be written: {error.strerror}") from error


def default_out(config: EvalConfig) -> Path:
    """Return the path of the table: beside the checkpoint, in the folder of the model, or in logs/
    for a model of the hub."""
    if config.model is None:
        return config.checkpoint.with_name(f"evaluation_{config.checkpoint.stem}.json")
    if Path(config.model).is_dir():
        return Path(config.model) / "evaluation.json"
    return Path("logs") / f"evaluation_{config.model.replace('/', '_')}.json"


def checked_files(config: EvalConfig) -> dict[str, Path | None]:
    """Return the file of each benchmark, None for the hub; raise ConfigError for a wrong option."""
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
        if path.is_file() and path.suffix not in (".json", ".jsonl"):
            raise ConfigError(f"{path} exists and is no .json file; remove it or give another path")
        if path.is_dir():
            raise ConfigError(f"{path} could not be written: it is a folder")
        with naming_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
    return dict(zip(tasks, config.data or [None] * len(tasks), strict=True))


def open_validation(config: EvalConfig, model: GPT, tokenizer: Tokenizer, saved: dict) -> Sequences:
    """Return the validation split of --data_dir, or of the folder the model was trained on."""
    folder = config.data_dir
    if folder is None and saved:
        folder = TrainConfig.from_dict(saved["train_config"]).data_dir
    if folder is None:
        raise ConfigError("the task val needs --data_dir, a folder of shards")
    stream = TokenStream(folder, "val")
    if stream.tokenizer != tokenizer.name:
        raise ConfigError(
            f"{folder} holds {stream.tokenizer} tokens, but the model was trained on "
            f"{tokenizer.name} tokens; give another --data_dir"
        )
    return Sequences(stream, model.config.block_size)


def validation(
    config: EvalConfig, model: GPT, tokenizer: Tokenizer, sequences: Sequences, **options
) -> list[Result]:
    """Return loss in nats per token, bits per byte and perplexity on a folder of shards."""
    options |= {"tokens": config.val_tokens, "token_bytes": bytes_per_token(tokenizer)}
    scores = validation_loss(model, sequences, **options)
    scores["perplexity"] = math.exp(scores["loss"])
    n = min(len(sequences), max(1, config.val_tokens // sequences.block_size))
    corpus = corpus_name(sequences.stream.shards[0].path.parent)
    return [Result("val", corpus, key, n * sequences.block_size, x) for key, x in scores.items()]


def format_table(rows: list[dict], size: str) -> str:
    """Format the rows of the JSON file as an aligned table with footnotes."""
    lines = [["task", "protocol", "metric", "n", "value", "", f"OpenAI's {size}"]]
    marks: dict[str, str] = {}  # by source
    for row in rows:
        stderr, theirs = "" if row["stderr"] is None else f"± {row['stderr']:.4f}", ""
        if row["published"]:
            value, source = row["published"]
            theirs = f"{value:.4f} {marks.setdefault(source, f'[{len(marks) + 1}]')}"
        numbers = [f"{row['n']:,}", f"{row['value']:.4f}", stderr, theirs]
        lines.append([row["task"], row["protocol"], row["metric"], *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
    notes = [f"{mark} {source}" for source, mark in marks.items()]
    return "\n".join([form.format(*line).rstrip() for line in lines] + notes)


def main(config: EvalConfig) -> None:
    refuse_both_sources(sys.argv[1:])
    if config.model is None:
        config.checkpoint = find_best(config.checkpoint)
    config.out = config.out or default_out(config)
    files = checked_files(config)
    process = distributed.start(config.device)
    torch.set_float32_matmul_precision("highest")  # no TF32
    model, name, saved = open_model(config.checkpoint, config.model, exact=True)
    tokenizer = load_tokenizer(name)
    # read everything before the first forward pass, so that a missing file costs no time
    val = open_validation(config, model, tokenizer, saved) if "val" in config.tasks else None
    rows = {task: read_rows_on_all(task, path, process) for task, path in files.items()}
    dtype = pick_dtype(config.dtype, process.device)
    model.to(process.device)
    if process.device.type == "cpu":
        cpu.for_inference(model, dtype, rows=2048)
    malloc.reuse_freed_memory()
    results: list[Result] = []
    examples: list[dict] = []
    options = {"batch_size": config.batch_size, "dtype": dtype}
    for task in config.tasks:
        if val is not None and task == "val":
            results += validation(config, model, tokenizer, val, process=process, **options)
            continue
        with tqdm(desc=task, unit="row", disable=None if process.is_main else True) as bar:
            score = partial(score_items, model, tokenizer, process, progress=bar.update, **options)
            chosen, protocols = rows[task][: config.limit], config.hellaswag_protocols
            found, more = score_benchmark(task, chosen, score, tokenizer, protocols)
        results += found
        examples += more
    if process.is_main:
        origin = {"run_id": saved["run_id"], "step": saved["step"]} if saved else {}
        report(config, origin, results, examples, model.config.size or "gpt2")
    distributed.stop()


def earlier_rows(path: Path, header: dict, rows: list[dict]) -> list[dict]:
    """Return the rows in an earlier JSON file of the same model that `rows` do not replace."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        found = earlier.pop("results") if earlier.items() >= header.items() else []
        names = ("task", "protocol", "metric")
        new = [[row[name] for name in names] for row in rows]
        return [row for row in found if [row[name] for name in names] not in new]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def report(
    config: EvalConfig, origin: dict, results: list[Result], examples: list[dict], size: str
) -> None:
    """Write the JSON files and print the table, beside the published figures of a size. Results of
    other tasks for the same model stay in the file."""
    rows = []
    for r in results:
        published = PUBLISHED.get((r.task, r.protocol, r.metric, size))
        rows.append(asdict(r) | {"published": published, "published_size": size})
    header = {"model": config.model or str(config.checkpoint), "dtype": config.dtype} | origin
    kept = earlier_rows(config.out, header, rows)
    texts = {config.out: json.dumps({**header, "results": kept + rows}, indent=1)}
    if config.dump is not None:
        texts[config.dump] = "".join(json.dumps(example) + "\n" for example in examples)
    print(format_table(rows, size))
    for path, text in texts.items():
        with naming_write_errors(path), atomic_write(path) as file:
            file.write(text.encode())
    print(f"wrote {', '.join(map(str, texts))}")


if __name__ == "__main__":
    run(main, EvalConfig)
