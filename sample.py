"""Write text with a trained model.

    python sample.py --checkpoint checkpoints/model_best.pt --prompt "Once upon a time"
    cat story.txt | python sample.py --prompt -

Architecture and tokenizer are read from the checkpoint. The samples are made as one batch; the
first is shown as it is made, the others after it. The same seed gives the same text.
"""

import codecs
import sys
from pathlib import Path

import torch

from config import ConfigError, SamplingConfig, run
from data.tokenizer import load_tokenizer
from model.generate import generate
from utils.checkpoint import open_model
from utils.distributed import autocast, pick_device, pick_dtype


def read_prompt(prompt: str) -> str:
    """The text that --prompt stands for: itself, @FILE or - for standard input."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_bytes().decode()
        prompt.encode()  # bytes of the command line that are no text
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--prompt {prompt!a} cannot be read as text: {error}") from error
    return prompt


def check(config: SamplingConfig) -> None:
    """ConfigError for the first setting that cannot be."""
    if config.num_samples < 1 or config.max_new_tokens < 0 or not 0 <= config.seed < 2**31:
        raise ConfigError(
            "--num_samples must be at least 1, --max_new_tokens at least 0, and --seed at least 0 "
            f"and below {2**31}"
        )
    if not config.temperature >= 0:
        raise ConfigError(f"--temperature {config.temperature} must be at least 0")
    if config.top_k is not None and config.top_k < 1:
        raise ConfigError(f"--top_k {config.top_k} must be at least 1")
    if config.top_p is not None and not 0 < config.top_p <= 1:
        raise ConfigError(f"--top_p {config.top_p} must be above 0 and at most 1")


def main(config: SamplingConfig) -> None:
    check(config)
    device = pick_device(config.device)
    model, name, _ = open_model(config.checkpoint, config.model)
    tokenizer = load_tokenizer(name)
    text = read_prompt(config.prompt)
    prompt = tokenizer.encode(text).tolist() or [tokenizer.eot]
    if len(prompt) > model.config.block_size:
        raise ConfigError(
            f"the prompt is {len(prompt):,} tokens long; this model reads at most "
            f"{model.config.block_size:,}: shorten it"
        )
    model.to(device)

    def show(out: str) -> None:
        sys.stdout.write(out)
        sys.stdout.flush()

    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(config.num_samples)]
    later = [text] * config.num_samples  # what the samples after the first have so far
    ended = [False] * config.num_samples
    show(text)
    with autocast(device, pick_dtype(config.dtype, device)):
        for tokens in generate(
            model,
            torch.tensor([prompt] * config.num_samples, device=device),
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
        ):
            for row, token in enumerate(tokens.tolist()):
                ended[row] |= token == tokenizer.eot
                if not ended[row]:
                    piece = decoders[row].decode(tokenizer.decode_bytes([token]))
                    later[row] += piece
                    if row == 0:
                        show(piece)
            if all(ended):
                break
    tails = [decoder.decode(b"", final=True) for decoder in decoders]
    show(tails[0] + "\n")
    for sample, tail in zip(later[1:], tails[1:], strict=True):
        show(f"\n{'-' * 80}\n{sample}{tail}\n")


if __name__ == "__main__":
    run(main, SamplingConfig)
