"""Questions with one right answer: exact match of the likeliest text, and pass@k by sampling."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from evaluation.tasks import Result, accuracy
from finetuning.chat import decode_completion
from finetuning.examples import TextEncoder, read_jsonl
from finetuning.rewards import is_exact
from model.generate import Sampling, complete
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return an estimate of the probability that one of k completions is right, from `samples` of
    them (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


class Questions:
    """Rows of prompt and answer, completed in batches that the processes share. Row i of sample s
    draws its random numbers from (seed, s * rows + i), whatever the number of processes."""

    def __init__(
        self,
        path: Path,
        encoder: TextEncoder,
        process: Process,
        dtype: torch.dtype,
        max_new_tokens: int,
        batch_size: int,
    ) -> None:
        self.name, self.encoder, self.process, self.dtype = path.stem, encoder, process, dtype
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        encode = partial(encoder.question, room=max_new_tokens, answered=True)
        self.examples = read_jsonl(path, encode)

    def texts(self, model: GPT, sample: int = 0, **options) -> list[str]:
        """Return a completion of each prompt, on every process; options of Sampling."""
        n, process, tokenizer = len(self.examples), self.process, self.encoder.tokenizer
        found = torch.zeros(n, self.max_new_tokens, dtype=torch.int64)  # ids + 1; 0: none
        batches = np.array_split(np.arange(n), range(self.batch_size, n, self.batch_size))
        was_training = model.training
        model.eval()
        for _, ids, counts in process.share(batches):
            prompts, first_row = [self.examples[i][1] for i in ids], sample * n + int(ids[0])
            sampling = Sampling(self.max_new_tokens, first_row=first_row, **options)
            with autocast(process.device, self.dtype):
                completions = complete(model, prompts, tokenizer.eot, sampling, process.all_agree)
            for i, tokens in zip(ids, completions, strict=True) if counts else ():
                found[i, : len(tokens)] = torch.tensor(tokens) + 1
        model.train(was_training)
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
        n, texts = len(self.examples), self.texts(model, temperature=0)
        rows = [row for row, _ in self.examples]
        exact = list(map(is_exact, texts, rows))
        progress(n)
        right = np.zeros(n, np.int64)
        for sample in range(num_samples):
            sampled = self.texts(model, sample, temperature=temperature, seed=seed)
            right += list(map(is_exact, sampled, rows))
            progress(n)
        kind = "chat" if self.encoder.chat else "plain text"
        results = [accuracy(self.name, f"greedy, {kind}", "exact match", exact)]
        protocol = f"{num_samples} samples, temperature {temperature:g}, {kind}"
        for k in (2**i for i in range(num_samples.bit_length())):
            values = [pass_at_k(num_samples, int(x), k) for x in right]
            stderr = float(np.std(values, ddof=1)) / n**0.5 if n > 1 else None
            value = float(np.mean(values))
            results.append(Result(self.name, protocol, f"pass@{k}", n, value, stderr))
        examples = [
            {"task": self.name, "index": i, "prompt": row["prompt"], "answer": row["answer"]}
            | {"completion": texts[i], "exact": exact[i], "right_samples": int(right[i])}
            for i, row in enumerate(rows)
        ]
        return results, examples
