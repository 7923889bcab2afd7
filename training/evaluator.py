"""Evaluator: the validation, benchmarks and text samples of a training run, every n steps.

train.py asks it at each step what is due. For a curve over the run it scores benchmarks by one
protocol and, without --eval_full, on a part of their examples. evaluate.py scores a finished model
by all protocols and examples. validation.py, scoring.py and benchmarks.py compute the scores.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from config import SamplingConfig, TrainOptions
from data.loader import Mixture
from data.named_tokenizer import Tokenizer
from data.tokenizer import load_tokenizer
from evaluation.benchmarks import BENCHMARKS
from evaluation.scoring import open_benchmark
from evaluation.tasks import ScoreBenchmark
from evaluation.validation import Scorer
from model.execution import uncompiled
from model.generate import complete
from model.gpt import GPT
from utils.distributed import Process
from utils.errors import UserError

SUBSET_EXAMPLES = 500  # of each benchmark, for CORE of each task, without --eval_full
SAMPLE_TOKENS = 128  # most tokens of a text sample


def is_due(every: int, step: int) -> bool:
    """Return True if what happens every `every` steps, 0 for never, is due after `step` steps."""
    return every > 0 and step % every == 0


class Evaluator:
    """Evaluate a model while it trains, at the intervals of its TrainOptions and at the last step.
    All processes call each method at the same steps and get the same metrics. If the tokenizer
    cannot be downloaded, there are no benchmarks and no samples."""

    def __init__(self, options: TrainOptions, model: GPT, val: Mixture, process: Process) -> None:
        self.options = options  # max_steps, val_tokens, sample_every, seed, use_torch_compile
        self.val = val  # the validation split of all corpora
        self.steps_between = {
            "eval": options.eval_every,
            "sample": options.sample_every,
            "hellaswag": options.hellaswag_every,
            "lambada": options.lambada_every,
            "core": options.core_every,
        }
        """Steps between validations, samples or scores of a benchmark. With 0, validation runs only
        after the last step, there are no samples, and the benchmark is not opened."""
        # batches of as many sequences as in training, because these fit into memory
        self.scorer = Scorer(model, process, options.sequences_per_pass)
        self.tokenizer: Tokenizer | None = None  # stays None if it cannot be downloaded
        self.score_benchmarks: list[tuple[str, ScoreBenchmark]] = []
        """Name of each benchmark, and the function that scores it, always on equal examples. It
        returns Results (evaluation/tasks.py) and rows for --dump."""
        # The vocabulary may have to be downloaded. Training itself needs only ids, so a run on a
        # machine without network goes on.
        try:
            # The tokenizer that made the shards, by its spec, such as "gpt2". An error of one
            # process is raised on all.
            self.tokenizer = process.read_on_all(partial(load_tokenizer, val.stream.tokenizer_spec))
        except UserError as error:
            process.print(f"{error}; so there are no samples and no benchmarks")
            return
        # Where to read each benchmark: a file, for core a folder; None: download it
        data_paths = {
            "hellaswag": options.hellaswag_data,
            "lambada": options.lambada_data,
            "core": options.core_data,
        }
        for name, path in data_paths.items():
            if self.steps_between[name] > 0:
                score_benchmark = self.open_for_curve(name, path, self.tokenizer)
                self.score_benchmarks.append((name, score_benchmark))

    def open_for_curve(self, name: str, path: Path | None, tokenizer: Tokenizer) -> ScoreBenchmark:
        """Read the examples of a benchmark from `path`, or download them, and return the function
        that scores them by one protocol. Raises UserError if they cannot be read."""
        benchmark = BENCHMARKS[name]  # "hellaswag" -> HellaSwag()
        limit = None if self.options.eval_full else SUBSET_EXAMPLES  # None: all examples
        first_protocol = benchmark.protocols[:1]  # ("build-nanogpt",)
        try:
            return open_benchmark(benchmark, path, limit, self.scorer, tokenizer, first_protocol)
        except UserError as error:  # its message does not name the options
            raise UserError(
                f"--{name}_every cannot score {name}: {error}, by --{name}_data"
            ) from error

    def due(self, step: int, name: str = "eval") -> bool:
        """Return True if `name` is due after `step` steps, as it always is after the last one:
        "eval" (a validation), "sample", or the name of a benchmark."""
        return step == self.options.max_steps or is_due(self.steps_between[name], step)

    def validate(self) -> dict[str, float]:
        """Return the validation "loss" in nats per token, the number "n" of tokens and, if the
        shards record the size of their text, "bits_per_byte". For several corpora these are of the
        weighted mean of the corpora, and "loss_NAME" is the loss of each."""
        # {"books": {"loss": 3.1, "n": 98304, ...}, "code": {...}, "weighted mean": {...}}; a single
        # corpus has no mean
        metrics_by_corpus = self.scorer.metrics_by_corpus(self.val, self.options.val_tokens)
        *_, metrics = metrics_by_corpus.values()  # the last: of the mean, or of the only corpus
        if len(metrics_by_corpus) > 1:
            for name in self.val.names:
                metrics[f"loss_{name}"] = metrics_by_corpus[name]["loss"]
        return metrics

    def due_benchmarks(self, step: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the name and the metrics of each benchmark that is due after `step` steps. Its
        first protocol gives the metrics."""
        for name, score_benchmark in self.score_benchmarks:
            if not self.due(step, name):
                continue
            # Blocks are compiled for one shape: each new length of text would compile them again.
            with uncompiled(self.options.use_torch_compile):
                # [Result(task="hellaswag", metric="acc_norm", value=0.29, n=500, ...), ...]; the
                # second output, rows for --dump, is for evaluate.py
                results, _ = score_benchmark()
            # The last result is of the whole benchmark. For CORE, n counts the items of all tasks.
            metrics: dict[str, float] = {"n": results[-1].n}
            for result in results:
                if result.task == name:  # not a single task of CORE
                    metrics[result.metric] = result.value
            yield name, metrics

    def sample(self, step: int) -> str | None:
        """Return a short text that the model writes from an empty prompt. Return None if no sample
        is due, or without a tokenizer."""
        tokenizer = self.tokenizer
        if tokenizer is None or not self.due(step, "sample"):
            return None
        # At step 0 a new model writes noise. With --sample_every 0 the last step is due, too.
        if step == 0 or self.options.sample_every == 0:
            return None
        process = self.scorer.process
        model = self.scorer.model
        max_new_tokens = min(SAMPLE_TOKENS, model.config.block_size)  # 128, or a shorter context
        # Another seed at each step, so that samples.txt does not repeat one text. The temperature
        # is the default, 0.8.
        sampling = SamplingConfig(max_new_tokens, seed=self.options.seed + step)
        prompts = [list(tokenizer.start_ids)]  # [[50256]]: what begins a document in the shards
        model.eval()  # no dropout
        # All processes write the same text, because a forward pass under FSDP2 needs all of them.
        with process.autocast(), uncompiled(self.options.use_torch_compile):
            # all_done lets all processes stop together, and raises Stopped after a signal.
            [completion] = complete(model, prompts, tokenizer.end_ids, sampling, process.all_done)
        model.train()
        # "replace": the text may end in the middle of a character
        # completion.tokens are those after the prompt
        return tokenizer.decode_bytes(completion.tokens).decode(errors="replace")
