"""Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test, own questions.

    python evaluate.py --checkpoint checkpoints/model_best.pt --tasks val hellaswag lambada
    python evaluate.py --model gpt2 --tasks hellaswag --data hellaswag_val.jsonl --limit 1000
    torchrun --standalone --nproc_per_node=8 evaluate.py --tasks hellaswag lambada cbt_cn cbt_ne
    python evaluate.py --checkpoint runs/sft --tasks questions.jsonl    # rows of prompt and answer

Prints a table (task, protocol, metric, number of examples, value with its standard error, published
value of OpenAI's GPT-2 of that size) and writes it as JSON. The number of correct answers depends
neither on the batch size nor on the number of processes.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from config import TrainConfig
from data.loader import Sequences, TokenStream
from data.shards import corpus_name
from data.tokenizer import Tokenizer, bytes_per_token, load_tokenizer
from evaluation.metrics import Result, check_lengths, score_benchmark, validation_loss
from evaluation.scoring import score_items
from evaluation.table import (
    check_replaceable,
    format_table,
    is_dump,
    is_table,
    table_rows,
    write_dump,
    write_table,
)
from evaluation.tasks import read_rows_on_all
from finetuning.answers import Questions
from model import cpu
from model.gpt import GPT
from training.checkpoint import checksum
from training.checkpoint_folder import find_best, is_chat, open_model, refuse_both_sources
from utils import distributed, malloc
from utils.cli import run
from utils.devices import pick_dtype
from utils.errors import UserError, did_you_mean

TASKS = ("val", "hellaswag", "lambada", "cbt_cn", "cbt_ne")
Protocol = Literal["build-nanogpt", "lm-eval"]


@dataclass
class EvalConfig:
    """Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test, questions."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py, or a folder: its best one, else its newest."""
    model: str | None = None
    """Score a Hugging Face GPT-2 instead: its name (gpt2, gpt2-medium, ...) or folder."""
    tasks: tuple[str, ...] = ("hellaswag", "lambada")
    """val, hellaswag, lambada, cbt_cn, cbt_ne, or .jsonl files of questions: prompt and answer."""
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
    num_samples: int = 8
    """Completions of a question for pass@k; 0: none."""
    max_new_tokens: int = 64
    """Longest completion of a question in tokens."""
    temperature: float = 1.0
    """Sampling temperature of pass@k."""
    seed: int = 1337
    """Seed of the completions of pass@k."""
    chat: bool = False
    """Ask questions as in a chat; on for a model that finetune.py taught to."""
    batch_size: int = 16
    """Examples in a forward pass."""
    out: Path | None = None
    """JSON file for the table; default: evaluation_NAME.json beside the checkpoint NAME.pt."""
    dump: Path | None = None
    """JSON lines file with one row per example and protocol of this call, replaced each time."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Dtype of matmuls; auto: bfloat16 where the processor has it."""


def default_out(config: EvalConfig) -> Path:
    """Return the path of the table: beside the checkpoint, in the folder of the model, or in logs/
    for a model of the hub."""
    if config.model is None:
        return config.checkpoint.with_name(f"evaluation_{config.checkpoint.stem}.json")
    if Path(config.model).is_dir():
        return Path(config.model) / "evaluation.json"
    return Path("logs") / f"evaluation_{config.model.replace('/', '_')}.json"


def checked_files(config: EvalConfig) -> dict[str, Path | None]:
    """Return the file of each benchmark, None for the hub; raise UserError for a wrong option."""
    tasks = [task for task in config.tasks if task in TASKS and task != "val"]
    for task in config.tasks:
        if task not in TASKS and not task.endswith(".jsonl"):
            hint = did_you_mean(task, TASKS)
            raise UserError(f"--tasks has no {task}{hint}: {', '.join(TASKS)} or FILE.jsonl")
    if not config.tasks or len(set(config.tasks)) < len(config.tasks):
        raise UserError(f"--tasks {' '.join(config.tasks)}: give each task once")
    names = [Path(task).stem for task in config.tasks]
    if same := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"--tasks has two files called {same}: rename one, or score it alone")
    if config.data and not tasks:
        raise UserError(
            "--data gives the files of benchmarks, and --tasks names none; leave it out, and give "
            "the shards of the task val by --data_dir"
        )
    if config.data and len(config.data) != len(tasks):
        raise UserError(
            f"--data has {len(config.data)} files for the benchmarks {' '.join(tasks)}; "
            "give one for each, in that order"
        )
    if config.num_samples < 0 or not 0 < config.temperature < math.inf:
        raise UserError("--num_samples must be at least 0, --temperature above 0")
    for name in ("limit", "val_tokens", "batch_size", "max_new_tokens"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    if config.dump and config.dump.resolve() == config.out.resolve():
        raise UserError(f"--out and --dump are both {config.out}; give two files")
    check_replaceable(config.out, "--out", is_table)
    if config.dump and set(config.tasks) == {"val"}:
        raise UserError("--dump has a row per example of a benchmark, and --tasks has none")
    if config.dump:
        check_replaceable(config.dump, "--dump", is_dump)
    return dict(zip(tasks, config.data or [None] * len(tasks), strict=True))


def open_validation(config: EvalConfig, model: GPT, tokenizer: Tokenizer, saved: dict) -> Sequences:
    """Return the validation split of --data_dir, or of the folder the model was trained on."""
    folder = config.data_dir
    if folder is None and saved:
        folder = TrainConfig.from_dict(saved["train_config"]).data_dir
        if not folder.is_dir():
            raise UserError(
                f"there is no folder {folder}, the --data_dir stored in the checkpoint; give the "
                "folder of its shards by --data_dir"
            )
    if folder is None:
        raise UserError("the task val needs --data_dir, a folder of shards")
    stream = TokenStream(folder, "val")
    if stream.tokenizer != tokenizer.name:
        raise UserError(
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
    n = sequences.count_within(config.val_tokens)
    corpus = corpus_name(sequences.stream.shards[0].path.parent)
    return [Result("val", corpus, key, n * sequences.block_size, x) for key, x in scores.items()]


def main(config: EvalConfig) -> None:
    refuse_both_sources(sys.argv[1:])
    if config.model is None:
        config.checkpoint = find_best(config.checkpoint)
    config.out = config.out or default_out(config)
    files = checked_files(config)
    process = distributed.start(config.device)
    model, name, saved = open_model(config.checkpoint, config.model, exact=True)
    tokenizer = load_tokenizer(name)
    # read everything before the first forward pass, so that a missing file costs no time
    val = open_validation(config, model, tokenizer, saved) if "val" in config.tasks else None
    rows = {task: read_rows_on_all(task, path, process) for task, path in files.items()}
    for task, items in rows.items():
        check_lengths(task, items[: config.limit], tokenizer, model.config.block_size)
    weights = f"{checksum(model.state_dict()):08x}"
    dtype = pick_dtype(config.dtype, process.device)
    chat = config.chat or is_chat(saved, config.model)
    setup = (tokenizer, model.config.block_size, process, dtype)
    names = ("max_new_tokens", "batch_size", "limit")
    asking = {name: getattr(config, name) for name in names}
    questions = {
        task: Questions(Path(task), *setup, chat=chat, **asking)
        for task in config.tasks
        if task not in TASKS
    }
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
            if task in questions:
                names = ("num_samples", "temperature", "seed")
                sampling = {name: getattr(config, name) for name in names}
                found, more = questions[task].score(model, **sampling, progress=bar.update)
                results += found
                examples += more
                continue
            score = partial(score_items, model, tokenizer, process, progress=bar.update, **options)
            chosen, protocols = rows[task][: config.limit], config.hellaswag_protocols
            found, more = score_benchmark(task, chosen, score, tokenizer, protocols)
        results += found
        examples += more
    if process.is_main:
        origin = {"model": config.model or str(config.checkpoint), "weights": weights}
        origin |= {"dtype": str(dtype).removeprefix("torch.")}
        origin |= {name: saved[name] for name in ("run_id", "step") if saved}
        size = model.config.size or "gpt2"
        table = table_rows(results, origin, size)
        write_table(config.out, table, origin)
        if config.dump:
            write_dump(config.dump, examples)
        print(format_table(table, size))
        print(f"wrote {', '.join(map(str, filter(None, (config.out, config.dump))))}")
    distributed.stop()


if __name__ == "__main__":
    run(main, EvalConfig)
