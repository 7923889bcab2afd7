"""Evaluator: the validation, benchmarks and text samples that train.py runs every n steps."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from config.options import TrainConfig
from data.mixture import Mixture
from data.tokenizer import load_tokenizer
from evaluation.validation import Scorer, weighted_mean
from model.compile import uncompiled
from model.generate import Sampling, complete
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process
from utils.errors import UserError

SUBSET = 500  # examples of a benchmark that are scored during training without --eval_full


def is_due(every: int, step: int) -> bool:
    """Return True if something that happens every n steps is due after `step` steps; 0: never."""
    return every > 0 and step % every == 0


def read_on_all(read: Callable[[], Any], process: Process) -> Any:
    """Return the result of `read` on every process; the main one reads, and downloads, first. Raise
    UserError on all if one of them cannot read."""
    found = problem = None
    for main in (True, False):
        if process.is_main == main:
            try:
                found = read()
            except UserError as error:
                problem = error
        if not process.all_agree(problem is None):
            raise problem or UserError("another process could not read what this one could")
    return found


class Evaluator:
    """Evaluate a model while it trains, at the intervals of its TrainConfig and at the last step.
    All processes call each method at the same steps and get the same figures. Without a tokenizer
    there are no benchmarks and no samples."""

    def __init__(
        self, config: TrainConfig, model: GPT, val: Mixture, process: Process, dtype: torch.dtype
    ) -> None:
        self.config, self.val, tokenizer = config, val, None
        try:
            tokenizer = read_on_all(partial(load_tokenizer, val.stream.tokenizer), process)
        except UserError as error:
            process.print(f"{error}; so there are no samples and benchmarks")
        setup = (model, tokenizer, process, dtype, config.micro_batch_size)
        self.scorer = Scorer(*setup)
        self.benchmarked = []  # tasks and their rows
        asked = [name for name in config.benchmarks if getattr(config, f"{name}_every")]
        if asked and tokenizer:  # on demand: most runs score no benchmark
            self.scorer = import_module("evaluation.scoring").ItemScorer(*setup)
            tasks = import_module("evaluation.tasks").find_tasks()
            for name in asked:
                task, path = tasks[name], getattr(config, f"{name}_data")
                rows = read_on_all(partial(task.read, path), process)
                count = len(rows) if config.eval_full else min(len(rows), SUBSET)
                evenly_spaced = np.linspace(0, len(rows) - 1, count).astype(int)
                self.benchmarked.append((task, [rows[i] for i in evenly_spaced]))

    @property
    def validation_text(self) -> str:
        """Name of the text and tokens that are validated: only losses of the same are compared."""
        stream = self.val.stream
        counts = [part.count_within(self.config.val_tokens) for part in self.val.parts]
        return f"{stream.tokenizer_identity} {stream.digest} {counts} {self.val.weights}"

    def due(self, step: int, name: str = "eval") -> bool:
        """Return True if validation, or a benchmark, is due after `step` steps."""
        return step == self.config.max_steps or is_due(getattr(self.config, f"{name}_every"), step)

    def validate(self) -> dict[str, float]:
        """Return the validation loss in nats per token and, where the shards tell the size of their
        text, bits_per_byte; of several corpora the means by weight, and the loss of each."""
        scorer, tokens, val = self.scorer, self.config.val_tokens, self.val
        scores = [scorer.validation_loss(part, tokens) for part in val.parts]
        if len(scores) == 1:
            return scores[0]
        losses = {f"loss_{n}": x["loss"] for n, x in zip(val.names, scores, strict=True)}
        return {**weighted_mean(scores, val.weights), **losses}

    def benchmarks(self, step: int) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the name and the figures, by the first protocol, of each benchmark that is due."""
        for task, rows in self.benchmarked:
            if self.due(step, task.name):
                with uncompiled(self.config.use_torch_compile):
                    results, _ = task.score(rows, self.scorer.score, task.protocols[:1])
                yield task.name, {"n": results[0].n} | {r.metric: r.value for r in results}

    def sample(self, step: int) -> str | None:
        """Return a short text written from an empty prompt; None if no sample is due."""
        model, tokenizer, process = self.scorer.model, self.scorer.tokenizer, self.scorer.process
        if tokenizer is None or not self.config.sample_every or not self.due(step, "sample"):
            return None
        sampling = Sampling(min(128, model.config.block_size), 0.8, seed=self.config.seed + step)
        model.eval()
        eager = uncompiled(self.config.use_torch_compile)
        prompts = [[tokenizer.eot]]
        with autocast(process.device, self.scorer.dtype), eager:
            (text,) = complete(model, prompts, tokenizer.end_ids, sampling, process.all_done)
        model.train()
        return tokenizer.decode_bytes(text.tokens).decode(errors="replace")
