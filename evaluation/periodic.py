"""Evaluator: the validation, benchmarks and text samples that train.py runs every n steps."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from config import TrainConfig
from data.loader import Sequences
from data.tokenizer import Tokenizer, bytes_per_token, load_tokenizer
from evaluation.metrics import benchmark_row, check_lengths, validation_loss
from evaluation.scoring import score_items
from evaluation.tasks import read_rows_on_all
from model.generate import complete
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError

SUBSET = 500  # examples of a benchmark that are scored during training without --eval_full
SAMPLE_TOKENS = 128


@dataclass
class Evaluator:
    """Evaluate a model while it trains, at the intervals of its TrainConfig and at the last step.

    All processes call each method at the same steps and get the same figures. Without a tokenizer
    there are no benchmarks, no samples and no bits per byte.
    """

    config: TrainConfig
    model: GPT
    sequences: Sequences  # validation split
    tokenizer: Tokenizer | None
    process: Process
    dtype: torch.dtype  # autocast dtype of matmuls
    benchmark_rows: dict[str, list[dict]]  # by name of the benchmark, from read_benchmarks

    def __post_init__(self) -> None:
        self.options = {"batch_size": self.config.micro_batch_size, "dtype": self.dtype}
        self.token_bytes = bytes_per_token(self.tokenizer) if self.tokenizer else None

    def uncompiled(self) -> AbstractContextManager:
        """Return a context in which compiled blocks run uncompiled, for varying shapes."""
        if not self.config.use_torch_compile:
            return nullcontext()
        return torch.compiler.set_stance("force_eager")

    def is_last(self, step: int) -> bool:
        """Return whether the run ends after `step` steps."""
        return step == self.config.max_steps

    def due(self, step: int) -> bool:
        """Return True if the model is to be validated after `step` steps."""
        return self.is_last(step) or is_due(self.config.eval_every, step)

    def validate(self) -> dict[str, float]:
        """Return the validation loss in nats per token and, with a tokenizer, bits_per_byte."""
        model, sequences, tokens = self.model, self.sequences, self.config.val_tokens
        options = {**self.options, "tokens": tokens, "token_bytes": self.token_bytes}
        return validation_loss(model, sequences, self.process, **options)

    def benchmarks(self, step: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the name and the figures of each benchmark that is due after `step` steps."""
        score = partial(score_items, self.model, self.tokenizer, self.process, **self.options)
        for task, rows in self.benchmark_rows.items() if self.tokenizer else ():
            if self.is_last(step) or is_due(getattr(self.config, f"{task}_every"), step):
                with self.uncompiled():
                    row = benchmark_row(task, rows, score, self.tokenizer)
                yield task, row

    def sample(self, step: int) -> str | None:
        """Return a short text written from an empty prompt; None if no sample is due."""
        every, tokenizer = self.config.sample_every, self.tokenizer
        if tokenizer is None or not (is_due(every, step) or every and self.is_last(step)):
            return None
        length = min(SAMPLE_TOKENS, self.model.config.block_size)
        options = {"max_new_tokens": length, "temperature": 0.8, "seed": self.config.seed + step}
        self.model.eval()
        with autocast(self.process.device, self.dtype), self.uncompiled():
            (tokens,) = complete(self.model, [[tokenizer.eot]], tokenizer.eot, **options)
        self.model.train()
        return tokenizer.decode_bytes(tokens).decode(errors="replace")


def open_evaluator(
    config: TrainConfig,
    model: GPT,
    sequences: Sequences,
    process: Process,
    dtype: torch.dtype,
    notes: list[str],
) -> Evaluator:
    """Return the Evaluator of a run, with its tokenizer and benchmarks read on every process."""
    tokenizer = load_tokenizer_on_all(sequences.stream.tokenizer, process, notes)
    benchmarks = read_benchmarks(config, process)
    for task, rows in benchmarks.items() if tokenizer else ():
        check_lengths(task, rows, tokenizer, model.config.block_size)
    return Evaluator(config, model, sequences, tokenizer, process, dtype, benchmarks)


def is_due(every: int, step: int) -> bool:
    """Return whether something that happens every n steps is due after `step` steps; 0: never."""
    return every > 0 and step % every == 0


def read_benchmarks(config: TrainConfig, process: Process) -> dict[str, list[dict]]:
    """Return the rows of the benchmarks that a run scores: SUBSET each, or all with --eval_full."""
    found = {}
    for task in ("hellaswag", "lambada"):
        if getattr(config, f"{task}_every"):
            rows = read_rows_on_all(task, getattr(config, f"{task}_data"), process)
            found[task] = rows if config.eval_full else evenly_spaced_subset(rows, SUBSET)
    return found


def evenly_spaced_subset(rows: list[dict], count: int) -> list[dict]:
    """Return at most `count` rows, evenly spaced from the first to the last."""
    keep = np.linspace(0, len(rows) - 1, min(count, len(rows)))
    return [rows[i] for i in keep.astype(int)]


def load_tokenizer_on_all(name: str, process: Process, notes: list[str]) -> Tokenizer | None:
    """Return a tokenizer if every process can load it; else None, and append why to `notes`."""
    tokenizer = None
    try:
        tokenizer = load_tokenizer(name)
    except UserError as error:
        notes.append(f"{error}. This run goes without samples, benchmarks and bits per byte.")
    return tokenizer if process.all_agree(tokenizer is not None) else None
