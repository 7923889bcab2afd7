"""Questions with one right answer: exact match of the likeliest text, and pass@k by sampling."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from evaluation.tasks import Result, mean_result
from finetuning.chat import decode_completion
from finetuning.examples import TextEncoder, read_jsonl
from finetuning.rewards import Completion, is_exact
from model.generate import Sampling, complete
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Estimate the chance that one of k completions is right (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


@dataclass
class Questions:
    """Rows of prompt and answer, completed in batches that the processes share. Row i of sample s
    draws its random numbers from (seed, s * rows + i), whatever the number of processes."""

    path: Path
    encoder: TextEncoder
    process: Process
    dtype: torch.dtype  # autocast dtype of matmuls
    max_new_tokens: int
    batch_size: int

    def __post_init__(self) -> None:
        encode = partial(self.encoder.question, room=self.max_new_tokens, answered=True)
        self.examples = read_jsonl(self.path, encode)

    def answers(self, model: GPT, sample: int = 0, **options) -> list[Completion]:
        """Return a completion of each prompt, on every process; options of Sampling."""
        n, process, tokenizer = len(self.examples), self.process, self.encoder.tokenizer
        tokens = torch.zeros(n, self.max_new_tokens, dtype=torch.int64)  # ids + 1; 0: none
        batches = np.array_split(np.arange(n), range(self.batch_size, n, self.batch_size))
        model.eval()
        for _, ids, counts in process.share(batches):
            prompts, first_row = [self.examples[i][1] for i in ids], sample * n + int(ids[0])
            sampling = Sampling(self.max_new_tokens, first_row=first_row, **options)
            with autocast(process.device, self.dtype):
                texts = complete(model, prompts, tokenizer.end_ids, sampling, process.all_done)
            if counts:
                for i, text in zip(ids, texts, strict=True):
                    tokens[i, : len(text.tokens)] = torch.tensor(text.tokens) + 1
        model.train()
        tokens = process.sum(tokens.to(process.device)).tolist()
        answers = []
        for (row, _), padded in zip(self.examples, tokens, strict=True):
            written = [token - 1 for token in padded if token]
            text = decode_completion(written, tokenizer, self.encoder.chat)
            is_cut = len(written) == self.max_new_tokens
            answers.append(Completion(row, text, is_cut=is_cut))
        return answers

    def score(
        self,
        model: GPT,
        num_samples: int = 0,
        temperature: float = 1.0,
        seed: int = 0,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> tuple[list[Result], list[dict]]:
        """Return the share of exact answers and pass@k for k = 1, 2, 4, ... `num_samples`, and a
        row for each question; `progress` is called with the number of completions done."""
        rows, name = [row for row, _ in self.examples], self.path.stem
        greedy, right = self.answers(model, temperature=0), np.zeros(len(rows), np.int64)
        exact = [is_exact(answer) for answer in greedy]
        progress(len(rows))
        for sample in range(num_samples):
            sampled = self.answers(model, sample, temperature=temperature, seed=seed)
            right += [is_exact(answer) for answer in sampled]
            progress(len(rows))
        kind = "chat" if self.encoder.chat else "plain text"
        results = [mean_result(name, f"greedy, {kind}", "exact match", exact)]
        protocol = f"{num_samples} samples, temperature {temperature:g}, {kind}"
        for k in (2**i for i in range(num_samples.bit_length())):
            values = [pass_at_k(num_samples, int(x), k) for x in right]
            results.append(mean_result(name, protocol, f"pass@{k}", values))
        examples = [
            {"task": name, "index": i, "prompt": row["prompt"], "answer": row["answer"]}
            | {"completion": greedy[i].text, "cut": greedy[i].is_cut}
            | {"exact": exact[i], "right_samples": int(right[i])}
            for i, row in enumerate(rows)
        ]
        return results, examples
