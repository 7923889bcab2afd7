"""Evaluator: the validation, benchmarks and text samples of a training run, every n steps.

train.py asks it at each step; it knows what is due. evaluate.py scores a finished model by all
protocols and examples of a benchmark; here one protocol and, without --eval_full, a part of the
examples give a curve. How scores are computed is in validation.py, scoring.py and benchmarks.py.
"""

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

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

Content = TypeVar("Content")

SUBSET_EXAMPLES = 500  # examples of each benchmark without --eval_full
SAMPLE_TOKENS = 128


def is_due(every: int, step: int) -> bool:
    """Return True if something that happens every n steps is due after `step` steps; 0: never."""
    return every > 0 and step % every == 0


class Evaluator:
    """Evaluate a model while it trains, at the intervals of its TrainOptions and at the last step.
    All processes call each method at the same steps and get the same metrics. Without a tokenizer,
    which may need a download, there are no benchmarks and no samples."""

    def __init__(self, options: TrainOptions, model: GPT, val: Mixture, process: Process) -> None:
        self.options = options
        self.val = val  # val.corpus_sequences has those of each
        self.intervals = {
            "eval": options.eval_every,
            "sample": options.sample_every,
            "hellaswag": options.hellaswag_every,
            "lambada": options.lambada_every,
            "core": options.core_every,
        }
        """Steps between validations, samples and the scores of a benchmark; 0: none between."""
        # as many sequences as in training, which fit into memory
        self.scorer = Scorer(model, process, options.sequences_per_pass)
        self.tokenizer: Tokenizer | None = None  # stays None if it cannot be downloaded
        self.score_benchmarks: list[tuple[str, ScoreBenchmark]] = []
        """Name of each benchmark, and what scores it: the same examples each time."""
        # GPT-2's vocabulary is downloaded once. Training itself needs ids alone, so a run on a
        # machine without network goes on.
        try:
            # val.stream.tokenizer is the spec of the tokenizer that made the shards
            self.tokenizer = process.read_on_all(partial(load_tokenizer, val.stream.tokenizer))
        except UserError as error:
            process.print(f"{error}; so there are no samples and benchmarks")
            return
        # the files of the benchmarks that training scores; None: downloaded
        paths = {
            "hellaswag": options.hellaswag_data,
            "lambada": options.lambada_data,
            "core": options.core_data,
        }
        for name, path in paths.items():
            if self.intervals[name] > 0:
                benchmark = BENCHMARKS[name]
                limit = None if options.eval_full else SUBSET_EXAMPLES
                first_protocol = benchmark.protocols[:1]  # one is enough for a curve
                try:
                    score_benchmark = open_benchmark(
                        benchmark, path, limit, self.scorer, self.tokenizer, first_protocol
                    )
                except UserError as error:  # its message does not name the options
                    raise UserError(
                        f"--{name}_every cannot score {name}: {error}, by --{name}_data"
                    ) from error
                self.score_benchmarks.append((name, score_benchmark))

    def due(self, step: int, name: str = "eval") -> bool:
        """Return True if a validation ("eval"), a "sample" or a benchmark, by its name, is due
        after `step` steps."""
        return step == self.options.max_steps or is_due(self.intervals[name], step)

    def validate(self) -> dict[str, float]:
        """Return the validation "loss" in nats per token, the number "n" of tokens and, where the
        shards tell the size of their text, "bits_per_byte". Several corpora give the means by
        weight, and as "loss_NAME" the loss of each."""
        by_corpus = self.scorer.metrics_by_corpus(self.val, self.options.val_tokens)
        *_, means = by_corpus.values()  # of the only corpus, or of the weighted mean
        if len(by_corpus) > 1:
            for name in self.val.names:
                means[f"loss_{name}"] = by_corpus[name]["loss"]
        return means

    def benchmarks(self, step: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the name and the metrics of each benchmark that is due after `step` steps; they are
        those of its first protocol."""
        for name, score_benchmark in self.score_benchmarks:
            if not self.due(step, name):
                continue
            # Blocks are compiled for one shape: each length of a text would be compiled anew.
            with uncompiled(self.options.use_torch_compile):
                results, _ = score_benchmark()  # without the rows for --dump
            # the last result is of the whole benchmark; for CORE, n counts the items of all tasks
            metrics: dict[str, float] = {"n": results[-1].n}
            for result in results:
                if result.task == name:  # not a single task of CORE
                    metrics[result.metric] = result.value
            yield name, metrics

    def sample(self, step: int) -> str | None:
        """Return a short text written from an empty prompt; None if none is due, or if the
        tokenizer of the shards is not known."""
        scorer = self.scorer
        tokenizer = self.tokenizer
        # A new model writes noise. At the last step `due` is True, also with --sample_every 0.
        is_asked = step > 0 and self.options.sample_every > 0 and self.due(step, "sample")
        if not is_asked or tokenizer is None:
            return None
        model = scorer.model
        num_tokens = min(SAMPLE_TOKENS, model.config.block_size)
        # a new seed for each step, so that samples.txt does not repeat one text
        sampling = SamplingConfig(num_tokens, seed=self.options.seed + step)
        prompts = [list(tokenizer.start_ids)]  # what begins a document in the shards
        end_ids = tokenizer.end_ids
        model.eval()  # no dropout
        # All processes write the same text: under FSDP a forward pass needs all of them.
        with (
            scorer.process.autocast(),
            uncompiled(self.options.use_torch_compile),
        ):
            # all_done makes all processes stop together, and raises Stopped after a signal.
            completions = complete(model, prompts, end_ids, sampling, scorer.process.all_done)
        model.train()
        # the last character may be cut in the middle of its bytes
        return tokenizer.decode_bytes(completions[0].tokens).decode(errors="replace")
