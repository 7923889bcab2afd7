"""Questions with one right answer: exact match of the likeliest text, and pass@k by sampling."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from evaluation.tasks import Result, mean_result
from finetuning.completions import Completion, complete_questions, is_exact
from finetuning.examples import TextEncoder, read_jsonl
from model.generate import Sampling
from model.gpt import GPT
from utils.distributed import Process


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Estimate the chance that one of k completions is right, from `num_samples` completions of
    which `num_right` are (Chen et al. 2021, equation 1)."""
    # 1 - the chance that k completions, drawn without putting back, are all wrong
    return 1 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


@dataclass
class Questions:
    """Rows of prompt and answer of a .jsonl file, which the processes share in batches."""

    path: Path
    encoder: TextEncoder
    process: Process
    dtype: torch.dtype
    """Autocast dtype of matmuls."""
    max_new_tokens: int
    batch_size: int

    def __post_init__(self) -> None:
        encode = partial(self.encoder.question, max_new_tokens=self.max_new_tokens, has_answer=True)
        self.examples = read_jsonl(self.path, encode)

    def answers(
        self, model: GPT, temperature: float = 0.0, seed: int = 0, sample: int = 0
    ) -> list[Completion]:
        """Return a completion of each question, on every process. Its random numbers depend on
        seed, sample and question alone, whatever the number of processes."""
        num_questions = len(self.examples)
        completions: dict[int, Completion] = {}  # by index of the question
        # Every process samples equally many batches, as a sharded model's forward is a collective.
        # A batch that comes twice, so that all processes have equally many, gives the same texts.
        starts = range(0, num_questions, self.batch_size)
        for _, start, _ in self.process.share(starts):
            questions = self.examples[start : start + self.batch_size]
            sampling = Sampling(
                self.max_new_tokens,
                temperature=temperature,
                seed=seed,
                # numbers the rows of all samples: no two completions draw the same
                first_row=sample * num_questions + start,
            )
            batch = complete_questions(
                model, questions, self.encoder, sampling, self.process, self.dtype
            )
            completions.update(enumerate(batch, start))
        # Processes exchange the texts themselves: --dump and the logs need those of all.
        completions = self.process.merge(completions)
        return [completions[i] for i in range(num_questions)]

    def score(
        self,
        model: GPT,
        num_samples: int = 0,
        temperature: float = 1.0,
        seed: int = 0,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> tuple[list[Result], list[dict]]:
        """Score a model.

        Return the share of exact answers and pass@k for k = 1, 2, 4, ... `num_samples`, and a row
        for each question. `progress` is called with the number of completions just written.
        """
        name = self.path.stem
        text_format = "chat" if self.encoder.chat else "plain text"
        answers = self.answers(model)  # greedy: temperature 0
        exact = [is_exact(answer) for answer in answers]
        progress(len(answers))

        # samples with temperature, one of each question at a time, for pass@k
        num_right = np.zeros(len(answers), np.int64)  # samples that are right, by question
        for sample in range(num_samples):
            num_right += [is_exact(x) for x in self.answers(model, temperature, seed, sample)]
            progress(len(answers))

        # the share of exact answers and its standard error; then those of pass@k
        results = [mean_result(name, f"greedy, {text_format}", "exact match", exact)]
        protocol = f"{num_samples} samples, temperature {temperature:g}, {text_format}"
        k = 1  # then 2, 4, ...
        while k <= num_samples:
            chances = [pass_at_k(num_samples, int(right), k) for right in num_right]
            results.append(mean_result(name, protocol, f"pass@{k}", chances))
            k *= 2
        rows = []  # for --dump
        for i, answer in enumerate(answers):
            row = {
                "task": name,
                "index": i,
                "prompt": answer.row["prompt"],
                "answer": answer.row["answer"],
                "completion": answer.text,
                "cut": answer.is_cut,
                "exact": exact[i],
                "right_samples": int(num_right[i]),  # of num_samples
            }
            rows.append(row)
        return results, rows
