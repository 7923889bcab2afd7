"""Score a model: validation loss, HellaSwag, LAMBADA, the Children's Book Test, own questions.

    python evaluate.py --checkpoint checkpoints/model_best.pt --tasks val hellaswag lambada
    python evaluate.py --model gpt2 --tasks hellaswag --data hellaswag_val.jsonl --limit 1000
    torchrun --standalone --nproc_per_node=8 evaluate.py --tasks hellaswag lambada cbt_cn cbt_ne
    python evaluate.py --checkpoint runs/sft --tasks questions.jsonl    # rows of prompt and answer

Prints a table with standard errors, beside published values of OpenAI's GPT-2, and writes the
results of each task as JSON beside the checkpoint: model_best_hellaswag.json. Neither the batch
size nor the number of processes changes the number of correct answers.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from data.mixture import Mixture
from data.tokenizer import load_tokenizer
from evaluation.evaluator import read_on_all
from evaluation.scoring import ItemScorer
from evaluation.table import format_table
from evaluation.tasks import Result, TaskScores, find_tasks
from evaluation.validation import too_few_tokens, weighted_mean
from finetuning.answers import Questions
from finetuning.chat import is_chat
from finetuning.examples import TextEncoder
from model.packed import for_inference
from training.checkpoint import find_checkpoint, open_model
from utils import distributed
from utils.cli import start_script
from utils.devices import pick_dtype
from utils.errors import UserError

TASKS = find_tasks()
Job = Callable[[], TaskScores]  # scores a task that is open


@dataclass
class EvalConfig:
    """Score a model."""

    checkpoint: Path | None = None
    """Checkpoint of train.py, or a folder: its best one, else its newest; default: checkpoints."""
    model: str | None = None
    """Score a Hugging Face GPT-2 instead: its name (gpt2, gpt2-medium, ...) or folder."""
    tasks: tuple[str, ...] = ("hellaswag", "lambada")
    """Benchmarks, val for the validation loss, or .jsonl files of questions: prompt and answer."""
    data: tuple[Path, ...] = ()
    """Files in the original formats, one per benchmark of --tasks in order; else from the hub."""
    data_dir: tuple[Path, ...] = ()
    """Folders of shards for the task val; by default those the checkpoint was trained on."""
    protocols: tuple[str, ...] = ()
    """Score a benchmark that has one of these protocols, as lm-eval, under them alone."""
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
    """JSON file for all results; default: one for each task beside the checkpoint, as in
    model_best_val.json, for a Hugging Face model in logs. Replaced each time."""
    dump: Path | None = None
    """JSON lines file with one row per example and protocol, replaced each time."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls. auto, as in training: bfloat16 where it is faster, float16 on old GPUs;
    float32: all of its bits, also on GPUs (no TF32), to compare with lm-evaluation-harness."""


def check(config: EvalConfig) -> None:
    """Raise UserError for a wrong option, before anything is read or scored."""
    if config.checkpoint and config.model:
        raise UserError("give --checkpoint (of train.py) or --model (Hugging Face), not both")
    for task in config.tasks:
        if task not in ("val", *TASKS) and not task.endswith(".jsonl"):
            raise UserError(f"--tasks has no {task}: val, {', '.join(TASKS)} or FILE.jsonl")
    if len(config.data) not in (0, count := sum(task in TASKS for task in config.tasks)):
        raise UserError(f"--data has {len(config.data)} files for {count} benchmarks")


def output_paths(config: EvalConfig, name: str, checkpoint: Path | None) -> dict[str, Path]:
    """Return the JSON file of each task: --out, or one of its name beside the checkpoint, in logs
    for a Hugging Face model `name`."""
    if config.out:
        return dict.fromkeys(config.tasks, config.out)
    model = Path("logs", Path(name).resolve().name)
    if checkpoint:
        model = checkpoint.with_suffix("")
    return {task: Path(f"{model}_{Path(task).stem}.json") for task in config.tasks}


def check_writable(path: Path) -> None:
    """Raise OSError now, not after hours of scoring, for a file that cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    open(path, "a").close()


def open_validation(config: EvalConfig, scorer: ItemScorer, saved: dict) -> Job:
    """Open the validation split of --data_dir, or of the shards the model was trained on."""
    folders = config.data_dir or saved.get("config", {}).get("data_dir", ())
    if not folders:
        raise UserError("the task val needs --data_dir, folders of shards")
    val = Mixture(folders, "val", scorer.model.config.block_size)
    if val.stream.tokenizer_identity != scorer.tokenizer.identity:
        raise UserError(
            f"{folders[0]} holds tokens of {val.stream.tokenizer_identity}, the model takes those "
            f"of {scorer.tokenizer.identity}"
        )
    for name, part in zip(val.names, val.parts, strict=True):
        if len(part) * part.block_size < config.val_tokens:
            scorer.process.print(too_few_tokens(name, part, config.val_tokens))

    def score() -> TaskScores:
        counts = [part.count_within(config.val_tokens) * part.block_size for part in val.parts]
        scores = [scorer.validation_loss(part, config.val_tokens) for part in val.parts]
        corpora = list(zip(val.names, counts, scores, strict=True))
        if len(corpora) > 1:
            corpora.append(("weighted mean", sum(counts), weighted_mean(scores, val.weights)))
        results = []
        for corpus, n, values in corpora:
            metrics = {**values, "perplexity": math.exp(values["loss"])}
            results += [Result("val", corpus, metric, n, x) for metric, x in metrics.items()]
        return results, []

    return score


def open_task(
    name: str, path: Path | None, config: EvalConfig, scorer: ItemScorer, saved: dict
) -> Job:
    """Read what a task needs, and return the function that scores it."""
    if name == "val":
        return open_validation(config, scorer, saved)
    if name in TASKS:
        task = TASKS[name]
        rows = read_on_all(partial(task.read, path), scorer.process)[: config.limit]
        protocols = [p for p in task.protocols if p in config.protocols] or task.protocols
        return lambda: task.score(rows, scorer.score, protocols)
    encoder = TextEncoder(scorer.tokenizer, config.chat, scorer.model.config.block_size)
    sizes = (config.max_new_tokens, config.batch_size)
    questions = Questions(Path(name), encoder, scorer.process, scorer.dtype, *sizes)
    questions.examples = questions.examples[: config.limit]
    sampling = (config.num_samples, config.temperature, config.seed)
    return lambda: questions.score(scorer.model, *sampling, scorer.progress)


def main(config: EvalConfig) -> None:
    check(config)
    name = str(config.model or config.checkpoint or "checkpoints")
    process = distributed.start(config.device)
    checkpoint = find_checkpoint(name)
    model, tokenizer, saved = open_model(checkpoint or name, exact=True)
    if any(weights.isnan().any() for weights in model.parameters()):
        raise UserError(f"{checkpoint or name} has weights that are NaN (not a number)")
    config.chat = config.chat or is_chat(saved, name, tokenizer)
    dtype = pick_dtype(config.dtype, process.device, process.all_agree)
    scorer = ItemScorer(model, load_tokenizer(tokenizer), process, dtype, config.batch_size)
    paths, jobs = iter(config.data), {}
    for task in config.tasks:  # open all before the first forward pass: a mistake costs no time
        path = next(paths, None) if task in TASKS else None
        jobs[task] = open_task(task, path, config, scorer, saved)
    outputs = output_paths(config, name, checkpoint)
    for path in (*outputs.values(), config.dump):
        if path and process.is_main:
            check_writable(path)
    for_inference(model.to(process.device), process.device, dtype, rows=2048)
    header = {
        "run_id": saved.get("run_id"),
        "step": saved.get("step"),
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
    }
    results, examples = [], []
    for task, job in jobs.items():
        try:
            with tqdm(desc=task, unit="row", disable=None if process.is_main else True) as bar:
                scorer.progress = bar.update
                found, more = job()
        except UserError as error:
            process.print(f"{task} is left out: {error}")
            del outputs[task]
            continue
        results, examples = results + found, examples + more
        if process.is_main:  # at once, so that an end before the last task loses none
            rows = results if config.out else found
            content = {**header, "results": [row._asdict() for row in rows]}
            outputs[task].write_text(json.dumps(content, indent=1))
    if not results:
        raise UserError("no task could be scored")
    if process.is_main:
        if config.dump:
            config.dump.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
        print(format_table(results, model.config.size or "gpt2"))
        print(f"wrote {', '.join(map(str, dict.fromkeys(outputs.values())))}")
    distributed.stop()


if __name__ == "__main__":
    start_script(main, EvalConfig)
