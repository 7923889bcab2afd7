"""A small GPT-2 with fixed random weights, for the comparison with lm-evaluation-harness.

    python -m tests.harness_model FOLDER
    python tests/record_harness.py hellaswag_val_1000.jsonl lambada_test_1000.jsonl FOLDER

write it in Hugging Face's format and score it; test_evaluate.py holds the recorded scores.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from data.export_tokenizer import save_tokenizer
from data.tokenizer import load_tokenizer
from model.config import GPTConfig
from model.formats.huggingface import save_pretrained
from model.gpt import GPT

# frequent last words of LAMBADA passages, made likely so that the model is not always wrong
LIKELY = (" Sarah", " Nick", " Ana", " Daniel", " Gabriel", " too")


def write(folder: Path) -> None:
    """Save the model with GPT-2's tokenizer in Hugging Face's format."""
    tokenizer = load_tokenizer("gpt2")
    model = GPT(GPTConfig(block_size=256, n_layer=2, n_head=2, n_embd=32))
    rng = np.random.default_rng(0)  # the same numbers on every machine, unlike torch's
    for name, p in sorted(model.named_parameters()):
        values = rng.normal(1.0 if ".ln_" in name and "weight" in name else 0.0, 0.2, p.shape)
        p.data.copy_(torch.from_numpy(values))
    wte, bias = model.transformer.wte.weight, model.transformer.ln_f.bias
    for word in LIKELY:
        bias.data += 4.0 * wte.data[int(tokenizer.encode(word)[0])]
    save_pretrained(model, folder)
    save_tokenizer(tokenizer, folder, model.config.block_size)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
