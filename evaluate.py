"""Score a model: validation loss, HellaSwag, LAMBADA, Children's Book Test, CORE, own questions.

    python evaluate.py --checkpoint checkpoints/model_best.pt --tasks val hellaswag lambada
    python evaluate.py --model gpt2 --tasks hellaswag --data hellaswag_val.jsonl --limit 1000
    torchrun --standalone --nproc_per_node=8 evaluate.py --tasks hellaswag lambada cbt_cn cbt_ne
    python evaluate.py --checkpoint runs/sft --tasks questions.jsonl    # rows of prompt and answer

As soon as a task is scored, evaluate.py prints its table, with standard errors and published values
of OpenAI's GPT-2, and writes its results as JSON beside the checkpoint: model_best_hellaswag.json.
If the data of one of several tasks cannot be opened, the script names the task, scores the others
and exits with 1.
The batch size changes scores up to rounding. The number of processes changes no score.
"""

import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

from tqdm import tqdm

from data.loader import Mixture, folders_of
from data.named_tokenizer import Tokenizer
from data.open_model import open_model
from data.tokenizer import load_tokenizer
from evaluation.benchmarks import BENCHMARKS
from evaluation.core import FewShotTasks
from evaluation.scoring import open_benchmark, refuse_other_data
from evaluation.table import format_table, openai_model_type
from evaluation.tasks import (
    Benchmark,
    Result,
    ScoreBenchmark,
    TaskScores,
    exponential,
    spread_evenly,
)
from evaluation.validation import Scorer
from finetuning.answers import score_questions
from finetuning.chat import is_chat
from finetuning.examples import Question, TextEncoder, read_examples
from model.formats.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from model.inference import prepare_for_inference
from utils import distributed
from utils.cli import start_script
from utils.errors import UserError
from utils.files import to_json
from utils.ranges import Count

# On a CPU, oneDNN lays out the weights for batches of about this many tokens, as benchmarks have.
# The task val has larger ones: 16 x 1024 of GPT-2.
TOKENS_PER_BATCH = 2048


@dataclass(frozen=True)
class EvalOptions:
    """Score a model."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py or finetune.py, or a folder: takes its best checkpoint, else its
    newest."""
    model: str | None = None
    """Model to score in place of --checkpoint: a Hugging Face name (gpt2, gpt2-medium, ...) or
    folder, or a checkpoint of nanoGPT, build-nanogpt or llm.c."""
    tasks: tuple[str, ...] = ()
    """Benchmarks, val for the validation loss, .jsonl files of questions (prompt and answer), or
    folders of tasks in the layout of CORE; default: hellaswag and lambada with --data or without
    the folders of --data_dir, else val."""
    data: tuple[Path, ...] = ()
    """Local files in the original formats, for core a folder: one per benchmark, in the order of
    --tasks; default: download them."""
    data_dir: tuple[Path, ...] = ()
    """Folders of shards for the task val; default: the folders that the checkpoint was trained on.
    """
    limit: Count | None = None
    """Number of examples to score of each benchmark or file of questions, evenly spread over it;
    for folders like CORE the number of each task, chosen as nanochat does; default: all."""
    val_tokens: Count = 10_485_760
    """Validation tokens to score of each corpus; all if there are fewer."""
    max_new_tokens: Count = 64
    """Longest answer to a question in tokens."""
    chat: bool = False
    """Ask questions in the format of a chat; a model that has learned to chat always gets it."""
    batch_size: Count = 16
    """Examples in a forward pass."""
    out: Path | None = None
    """.json file for all results, replaced each time; default: a file for each task beside the
    checkpoint, such as model_best_val.json, or in logs for a model of another project."""
    dump: Path | None = None
    """.jsonl file with one row per example and protocol, replaced each time."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls. auto, as in training: bfloat16 where it is faster, float16 on old GPUs;
    float32: full precision, also on GPUs (no TF32), to compare with lm-evaluation-harness."""


def default_tasks(options: EvalOptions, checkpoint_path: Path | None) -> tuple[str, ...]:
    """Return the tasks without --tasks: val needs no network, but shards of --data_dir or of the
    run of the checkpoint (None for a model of another project)."""
    shard_folders = options.data_dir
    if checkpoint_path and not shard_folders:
        # (Path("data/edu_fineweb10B"),), --data_dir of its run; () if train.py has not made it
        shard_folders = training_folders(load_checkpoint(checkpoint_path))
    # folders_of drops weights: data/a of data/a:0.7
    has_folder = any(folder.is_dir() for folder in folders_of(shard_folders))
    if has_folder and not options.data:
        return ("val",)
    return ("hellaswag", "lambada")


def training_folders(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Return the folders of training shards of a checkpoint, (Path("data/edu_fineweb10B"),); () if
    finetune.py, convert.py or another project made the model."""
    # "config": the options of its run by name, for train.py {"data_dir": ["data/a"], ...}
    return tuple(map(Path, checkpoint.get("config", {}).get("data_dir", ())))


def check_options(options: EvalOptions) -> dict[str, Path]:
    """Return the path of --data by benchmark, {"hellaswag": Path("hellaswag_val.jsonl")}, {}
    without --data. Raise UserError for a wrong option, before anything is downloaded or scored."""
    # a/sums.jsonl and b/sums.jsonl would both write CHECKPOINT_sums.json
    if len({Path(task_name).stem for task_name in options.tasks}) < len(options.tasks):
        raise UserError(
            f"--tasks {' '.join(options.tasks)}: two tasks have one name, so one would "
            "replace the results of the other; rename one"
        )
    # the benchmarks in --tasks: each takes one path of --data
    benchmark_names = [name for name in options.tasks if name != "val" and not is_path(name)]
    for task_name in benchmark_names:
        if task_name not in BENCHMARKS:
            names = ", ".join(["val", *BENCHMARKS, "FILE.jsonl"])
            raise UserError(
                f"there is no task {task_name}; --tasks takes {names} or a FOLDER with core.yaml"
            )
    # The script replaces earlier results, but no checkpoint (.pt) and no file that it reads.
    input_paths = {Path(task_name).resolve() for task_name in options.tasks}
    input_paths |= {path.resolve() for path in options.data}
    for flag, path, suffix in (("out", options.out, ".json"), ("dump", options.dump, ".jsonl")):
        if path and (path.suffix != suffix or path.resolve() in input_paths):
            raise UserError(
                f"--{flag} {path} must end in {suffix}, and not be a file of --tasks or --data: "
                "each evaluation replaces it"
            )
    if options.data and len(options.data) != len(benchmark_names):
        raise UserError(
            f"--data has {len(options.data)} files for {len(benchmark_names)} benchmarks"
        )
    return dict(zip(benchmark_names, options.data, strict=False))  # {} without --data


def is_path(task_name: str) -> bool:
    """Return True if an entry of --tasks is a file of questions or a folder of tasks. A path takes
    precedence over a benchmark with the same name."""
    return Path(task_name).is_file() or Path(task_name, "core.yaml").is_file()


def open_validation(options: EvalOptions, block_size: int, tokenizer: Tokenizer) -> Mixture:
    """Return the validation text of --data_dir, in sequences of the model's context length."""
    if not options.data_dir:
        raise UserError("the task val needs --data_dir, folders of shards")
    val = Mixture(options.data_dir, "val", block_size)  # all corpora, cut into sequences
    # The loss is meaningless if the shards hold ids of another tokenizer.
    if val.stream.tokenizer_identity != tokenizer.identity:
        raise UserError(
            f"{options.data_dir[0]} holds tokens of {val.stream.tokenizer_identity}, the model "
            f"takes those of {tokenizer.identity}"
        )
    return val


def score_validation(val: Mixture, num_tokens: int, scorer: Scorer) -> TaskScores:
    """Return loss, bits per byte and perplexity of each corpus of --data_dir, and the weighted mean
    of several corpora. Result.protocol is the name of the corpus, or "weighted mean"."""
    # {"FineWeb-Edu": {"loss": 3.29, "n": 10_485_760, "bits_per_byte": 0.98}}, over about
    # num_tokens targets of each corpus, or all if it has fewer; all processes share the work
    metrics_by_corpus = scorer.metrics_by_corpus(val, num_tokens)
    results: list[Result] = []
    for corpus, metrics in metrics_by_corpus.items():
        num_targets = int(metrics.pop("n"))  # the metrics that remain become Results
        metrics["perplexity"] = exponential(metrics["loss"])  # e^loss, per token
        for metric, value in metrics.items():
            results.append(Result("val", corpus, metric, num_targets, value))
    return results, []  # no rows for --dump


def open_questions(path: Path, options: EvalOptions, encoder: TextEncoder) -> list[Question]:
    """Return the questions of a file, at most --limit of them."""
    # `to_question` turns a row into a Question, whose prompt is ids. read_examples raises UserError
    # for a row without an answer, and for a prompt that leaves no room for max_new_tokens.
    to_question = partial(encoder.question, max_new_tokens=options.max_new_tokens, has_answer=True)
    questions = read_examples(path, to_question)  # one for each line that is not empty
    return spread_evenly(questions, options.limit)  # at equal distances over the file


def open_task(
    task_name: str, path: Path | None, options: EvalOptions, scorer: Scorer, tokenizer: Tokenizer
) -> ScoreBenchmark:
    """Open the data of an entry of --tasks, and return the function that scores it. `path` has a
    benchmark's data; None: download it. If one process cannot open the data, or has other data than
    the others, all processes raise an error. Every process must call this function."""
    block_size = scorer.model.config.block_size
    if Path(task_name).is_file():
        # encodes prompts as fine-tuning does, so that the model sees the tokens that it has learned
        encoder = TextEncoder(tokenizer, options.chat, block_size)
        with scorer.process.raise_on_all():
            questions = open_questions(Path(task_name), options, encoder)
        refuse_other_data(scorer.process, task_name, questions)
        stem = Path(task_name).stem  # "sums" of own/sums.jsonl, for the table
        return partial(score_questions, stem, questions, encoder, options.max_new_tokens, scorer)
    if is_path(task_name):  # a folder of the user's own tasks
        path = Path(task_name)
        benchmark: Benchmark = FewShotTasks(path.resolve().name)  # `resolve` gives "." a name
    elif task_name in BENCHMARKS:
        benchmark = BENCHMARKS[task_name]
    else:  # val
        with scorer.process.raise_on_all():
            val = open_validation(options, block_size, tokenizer)
        refuse_other_data(scorer.process, task_name, val.checksum)
        return partial(score_validation, val, options.val_tokens, scorer)
    return open_benchmark(benchmark, path, options.limit, scorer, tokenizer, benchmark.protocols)


def default_results_path(
    model_name: str | Path, checkpoint_path: Path | None, task_name: str
) -> Path:
    """Return the file for the results of a task without --out: model_best_hellaswag.json beside the
    checkpoint, or logs/gpt2_hellaswag.json for a model of another project."""
    prefix = Path("logs", Path(model_name).resolve().name)  # `resolve` gives "." and ".." a name
    if checkpoint_path is not None:
        prefix = checkpoint_path.with_suffix("")
    return Path(f"{prefix}_{Path(task_name).stem}.json")


def write_file(path: Path, text: str) -> None:
    """Write a file, and make its folders if they are missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def main(options: EvalOptions) -> None:
    model_name = options.model or options.checkpoint  # a path, or a name on the Hugging Face hub
    checkpoint_path = find_checkpoint(model_name)  # None for a model of another project
    options = replace(options, tasks=options.tasks or default_tasks(options, checkpoint_path))
    path_by_benchmark = check_options(options)  # {"hellaswag": Path(...)}; or raises UserError
    process = distributed.start(options.device, options.dtype)  # a Process: rank, device, dtype

    # float32: with all bits of the weights, the validation loss is the one that training logged.
    # `checkpoint` is the content of the file, {} for a model of another project; the spec of
    # GPT-2's tokenizer is "gpt2".
    model, tokenizer_spec, checkpoint = open_model(checkpoint_path or model_name, float32=True)
    model.to(process.device)
    # in place: evaluation mode, and faster linear layers for this device and dtype
    prepare_for_inference(model, process.device, process.dtype, num_tokens=TOKENS_PER_BATCH)

    options = replace(
        options,
        data_dir=options.data_dir or training_folders(checkpoint),
        # A model that has learned to chat gets questions in the format of its chats.
        chat=options.chat or is_chat(checkpoint, tokenizer_spec),
    )
    # Only the main process shows the bar. None: tqdm shows it only if stderr is a terminal.
    bar = tqdm(unit="row", disable=None if process.is_main else True)
    tokenizer = load_tokenizer(tokenizer_spec)
    # for benchmarks, the scorer calls bar.update with the rows that all processes score together
    scorer = Scorer(model, process, options.batch_size, bar.update)

    # Print and write the results of each task at once, because a later task may fail.
    results: list[Result] = []  # of all tasks so far
    dump_rows: list[dict] = []  # [{"task": "lambada", "protocol": "lm-eval", "index": 0, ...}, ...]
    failed_tasks: list[str] = []
    for task_name in options.tasks:
        bar.reset()
        bar.set_description(task_name)
        try:
            data_path = path_by_benchmark.get(task_name)  # None: download it, or no benchmark
            score_task = open_task(task_name, data_path, options, scorer, tokenizer)
        # raised on every process, as for a failed download or a missing file: all go on
        except (UserError, OSError) as error:
            if len(options.tasks) == 1:
                raise
            bar.clear()
            process.print(f"{task_name} could not be scored: {error}")
            failed_tasks.append(task_name)
            continue
        # Each process scores its share, and all processes get the same results. An error here may
        # be of this process alone, so it ends the script: the others would wait for it.
        task_results, task_dump_rows = score_task()  # list[Result]; rows for --dump
        results += task_results
        dump_rows += task_dump_rows
        if process.is_main:
            bar.clear()  # otherwise the table would begin in the line of the bar
            # before writing, because the disk may be full
            print(format_table(task_results, openai_model_type(model.config)), flush=True)
            results_path = options.out
            results_to_write = results
            if results_path is None:  # a file for each task
                results_path = default_results_path(model_name, checkpoint_path, task_name)
                results_to_write = task_results
            content = {
                "step": checkpoint.get("step"),  # None for a model of another project
                "model": str(model_name),
                "dtype": str(process.dtype).removeprefix("torch."),
                "results": [asdict(result) for result in results_to_write],
            }
            write_file(results_path, to_json(content, indent=1))  # NaN, no valid JSON, becomes null
            if options.dump:
                write_file(options.dump, "".join(f"{to_json(row)}\n" for row in dump_rows))
            print(f"wrote {results_path}", flush=True)
    bar.close()
    distributed.stop()
    if failed_tasks:
        process.print(f"not scored: {', '.join(failed_tasks)}")
        sys.exit(1)


if __name__ == "__main__":
    start_script(main, EvalOptions)
