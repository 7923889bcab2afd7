"""Questions with one right answer: exact match of the likeliest text, and pass@k by sampling."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from evaluation.metrics import Result, accuracy
from torch import Tensor

from data.tokenizer import Tokenizer
from finetuning.chat import decode_completion, is_exact
from finetuning.examples import ChatData
from finetuning.rows import read_rows
from model.generate import complete
from model.gpt import GPT
from utils.devices import autocast
from utils.distributed import Process

QUESTION = ("prompt", "answer")  # fields of a row


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that one of k completions is right, estimated from `samples` of them:
    1 - C(samples - right, k) / C(samples, k) (Chen et al. 2021, equation 1)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


class Questions:
    """The first `limit` rows of prompt and answer in a .jsonl file, completed in batches that the
    processes share.

    Row i of sample s draws its random numbers from (seed, s * rows + i), so that the figures depend
    on the number of processes only as far as matmuls round.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        block_size: int,
        process: Process,
        dtype: torch.dtype,
        *,
        chat: bool,
        max_new_tokens: int,
        batch_size: int,
        limit: int | None = None,
    ) -> None:
        self.tokenizer, self.process, self.dtype, self.chat = tokenizer, process, dtype, chat
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.name, self.rows = path.stem, read_rows(path, QUESTION)[:limit]
        data = ChatData(self.rows, tokenizer, chat, block_size)
        self.prompts = data.prompts(max_new_tokens)

    def texts(self, model: GPT, sample: int = 0, **options) -> list[str]:
        """Return a completion of each prompt, on every process; options of generate."""
        n, process, eot = len(self.rows), self.process, self.tokenizer.eot
        found = torch.zeros(n, self.max_new_tokens, dtype=torch.int64)  # ids + 1; 0: none
        batches = np.array_split(np.arange(n), range(self.batch_size, n, self.batch_size))
        options |= {"max_new_tokens": self.max_new_tokens, "all_done": process.all_agree}
        was_training = model.training
        model.eval()
        for _, ids, counts in process.share(batches):
            prompts, first_row = [self.prompts[i] for i in ids], sample * n + int(ids[0])
            with autocast(process.device, self.dtype):
                completions = complete(model, prompts, eot, first_row=first_row, **options)
            for i, tokens in zip(ids, completions, strict=True) if counts else ():
                found[i, : len(tokens)] = torch.tensor(tokens) + 1
        model.train(was_training)
        found = process.sum(found.to(process.device)).cpu()
        return [self.decode(tokens) for tokens in found]

    def decode(self, tokens: Tensor) -> str:
        """Return the text of a row of ids + 1."""
        return decode_completion((tokens[tokens > 0] - 1).tolist(), self.tokenizer, self.chat)

    def figures(self, model: GPT) -> dict[str, float | None]:
        """Return the share of exact answers, its standard error and the number of questions."""
        (exact,), _ = self.score(model)
        return {"n": exact.n, "exact": exact.value, "stderr": exact.stderr}

    def hits(self, texts: list[str]) -> list[bool]:
        """Return which completions are the answer."""
        return [is_exact(text, row["answer"]) for text, row in zip(texts, self.rows, strict=True)]

    def score(
        self,
        model: GPT,
        *,
        num_samples: int = 0,
        temperature: float = 1.0,
        seed: int = 0,
        progress: Callable[[int], None] = lambda rows: None,
    ) -> tuple[list[Result], list[dict]]:
        """Return the share of exact answers and pass@k for k = 1, 2, 4, ... `num_samples`, and a
        row for each question; `progress` is called with the number of completions done."""
        texts = self.texts(model, temperature=0)
        exact, n = self.hits(texts), len(self.rows)
        progress(n)
        right = np.zeros(n, np.int64)
        for sample in range(num_samples):
            options = {"temperature": temperature, "seed": seed}
            right += self.hits(self.texts(model, sample, **options))
            progress(n)
        kind = "chat" if self.chat else "plain text"
        results = [accuracy(self.name, f"greedy, {kind}", "exact match", exact)]
        for k in (2**i for i in range(num_samples.bit_length())):
            values = [pass_at_k(num_samples, int(x), k) for x in right]
            stderr = float(np.std(values, ddof=1)) / n**0.5 if n > 1 else None
            name = f"{num_samples} samples, temperature {temperature:g}, {kind}"
            results.append(Result(self.name, name, f"pass@{k}", n, float(np.mean(values)), stderr))
        examples = [
            {"task": self.name, "index": i, "prompt": row["prompt"], "answer": row["answer"]}
            | {"completion": texts[i], "exact": exact[i], "right_samples": int(right[i])}
            for i, row in enumerate(self.rows)
        ]
        return results, examples
