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
from finetuning.rewards import is_exact
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

    def texts(self, model: GPT, sample: int = 0, **options) -> list[str]:
        """Return a completion of each prompt, on every process; options of Sampling."""
        n, process, tokenizer = len(self.examples), self.process, self.encoder.tokenizer
        found = torch.zeros(n, self.max_new_tokens, dtype=torch.int64)  # ids + 1; 0: none
        batches = np.array_split(np.arange(n), range(self.batch_size, n, self.batch_size))
        model.eval()
        for _, ids, counts in process.share(batches):
            prompts, first_row = [self.examples[i][1] for i in ids], sample * n + int(ids[0])
            sampling = Sampling(self.max_new_tokens, first_row=first_row, **options)
            with autocast(process.device, self.dtype):
                completions = complete(model, prompts, tokenizer.eot, sampling, process.all_done)
            for i, tokens in zip(ids, completions, strict=True) if counts else ():
                found[i, : len(tokens)] = torch.tensor(tokens) + 1
        model.train()
        rows = process.sum(found.to(process.device)).tolist()
        completions = [[token - 1 for token in row if token] for row in rows]
        return [decode_completion(tokens, tokenizer, self.encoder.chat) for tokens in completions]

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
        texts, right = self.texts(model, temperature=0), np.zeros(len(rows), np.int64)
        exact = list(map(is_exact, texts, rows))
        progress(len(rows))
        for sample in range(num_samples):
            sampled = self.texts(model, sample, temperature=temperature, seed=seed)
            right += list(map(is_exact, sampled, rows))
            progress(len(rows))
        kind = "chat" if self.encoder.chat else "plain text"
        results = [mean_result(name, f"greedy, {kind}", "exact match", exact)]
        protocol = f"{num_samples} samples, temperature {temperature:g}, {kind}"
        for k in (2**i for i in range(num_samples.bit_length())):
            values = [pass_at_k(num_samples, int(x), k) for x in right]
            results.append(mean_result(name, protocol, f"pass@{k}", values))
        examples = [
            {"task": name, "index": i, "prompt": row["prompt"], "answer": row["answer"]}
            | {"completion": texts[i], "exact": exact[i], "right_samples": int(right[i])}
            for i, row in enumerate(rows)
        ]
        return results, examples
