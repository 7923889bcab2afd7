"""Questions with one right answer: the share that a model answers exactly.

A question is a row of prompt and answer. The model answers with its likeliest tokens (greedy
decoding), and an answer is right if it is the row's, white space aside.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from evaluation.tasks import TaskScores, mean_result
from finetuning.completions import Completion, complete_questions, is_exact
from finetuning.examples import TextEncoder, read_jsonl
from model.generate import Sampling
from model.gpt import GPT
from utils.distributed import Process


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

    def answers(self, model: GPT) -> list[Completion]:
        """Return the likeliest completion of each question, on every process."""
        sampling = Sampling(self.max_new_tokens, temperature=0)  # greedy
        completions: dict[int, Completion] = {}  # by index of the question
        # Every process samples equally many batches, as a sharded model's forward is a collective.
        # A batch that comes twice, so that all processes have equally many, gives the same texts.
        starts = range(0, len(self.examples), self.batch_size)  # of the batches
        for _, start, _ in self.process.share(starts):
            questions = self.examples[start : start + self.batch_size]
            batch = complete_questions(
                model, questions, self.encoder, sampling, self.process, self.dtype
            )
            completions.update(enumerate(batch, start))
        # Processes exchange the texts themselves: --dump and the logs need those of all.
        completions = self.process.merge(completions)  # now of all questions
        return [completions[i] for i in range(len(self.examples))]

    def score(self, model: GPT) -> TaskScores:
        """Return one result, the share of exact answers, and a row for each question."""
        name = self.path.stem
        # the format is part of the protocol: the same question scores differently without turns
        text_format = "chat" if self.encoder.chat else "plain text"
        rows: list[dict] = []  # for --dump
        for i, answer in enumerate(self.answers(model)):
            row = {
                "task": name,
                "index": i,
                "prompt": answer.row["prompt"],
                "answer": answer.row["answer"],
                "completion": answer.text,
                "cut": answer.is_cut,
                "exact": is_exact(answer),  # a cut one never is
            }
            rows.append(row)
        exact = [row["exact"] for row in rows]
        return [mean_result(name, f"greedy, {text_format}", "exact match", exact)], rows
