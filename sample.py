"""Write text with a trained model.

    python sample.py --checkpoint checkpoints/model_best.pt --prompt "Once upon a time"
    cat story.txt | python sample.py --prompt -
    python sample.py --model gpt2 --interactive

Architecture and tokenizer are read from the checkpoint. The samples are made as one batch; the
first is shown as it is made, the others after it. The same seed gives the same text.
"""

import codecs
import json
import sys
from dataclasses import replace
from pathlib import Path

from config import ConfigError, SamplingConfig
from data.tokenizer import Tokenizer, load_tokenizer
from model.generate import generate
from model.gpt import GPT
from model.packed import packed
from training.checkpoint import open_model
from utils.cli import run
from utils.distributed import autocast, pick_device, pick_dtype

CHANGEABLE = {  # settings that --interactive can change, and what makes them of text
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "max_new_tokens": int,
    "num_samples": int,
    "seed": int,
}


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
    for name, least, below in (
        ("num_samples", 1, 2**16),
        ("max_new_tokens", 0, 2**24),
        ("seed", 0, 2**31),
    ):
        if not least <= getattr(config, name) < below:
            raise ConfigError(
                f"--{name} {getattr(config, name)} must be at least {least} and below {below}"
            )
    if not config.temperature >= 0:
        raise ConfigError(f"--temperature {config.temperature} must be at least 0")
    if config.top_k is not None and config.top_k < 1:
        raise ConfigError(f"--top_k {config.top_k} must be at least 1")
    if config.top_p is not None and not 0 < config.top_p <= 1:
        raise ConfigError(f"--top_p {config.top_p} must be above 0 and at most 1")


def write(model: GPT, tokenizer: Tokenizer, text: str, config: SamplingConfig, show) -> list[dict]:
    """Makes the samples of a prompt; `show` gets the first as it is made, then the others.

    Returns for each its prompt, text, number of tokens and why it ended.
    """
    prompt = tokenizer.encode(text).tolist() or [tokenizer.eot]
    if len(prompt) > model.config.block_size:
        raise ConfigError(
            f"the prompt is {len(prompt):,} tokens long; this model reads at most "
            f"{model.config.block_size:,}: shorten it"
        )
    device, rows = model.transformer.wte.weight.device, range(config.num_samples)
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in rows]
    samples = [
        {"sample": row, "prompt": text, "text": "", "tokens": 0, "finish": "length"} for row in rows
    ]
    show(text)
    with autocast(device, pick_dtype(config.dtype, device)):
        for tokens in generate(
            model,
            [prompt] * config.num_samples,
            config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            use_torch_compile=config.use_torch_compile,
        ):
            for sample, decoder, token in zip(samples, decoders, tokens.tolist(), strict=True):
                if token == tokenizer.eot:
                    sample["finish"] = "end of text"
                if sample["finish"] == "length":
                    piece = decoder.decode(tokenizer.decode_bytes([token]))
                    sample["text"] += piece
                    sample["tokens"] += 1
                    show(piece if sample is samples[0] else "")
            if all(sample["finish"] == "end of text" for sample in samples):
                break
    for sample, decoder in zip(samples, decoders, strict=True):
        tail = decoder.decode(b"", final=True)
        sample["text"] += tail
        rule = f"\n{'-' * 80}\n{text}{sample['text']}"
        show((tail if sample is samples[0] else rule) + "\n")
    return samples


def changed(config: SamplingConfig, command: str) -> SamplingConfig:
    """The settings after "/name value"; ConfigError where there is no such setting or value."""
    name, _, value = command[1:].strip().partition(" ")
    if name not in CHANGEABLE:
        raise ConfigError(f"there is no /{name}; there are /{' /'.join(CHANGEABLE)} and /quit")
    try:
        number = None if value == "none" and name.startswith("top_") else CHANGEABLE[name](value)
    except ValueError as error:
        raise ConfigError(f"/{name} takes a number, not {value!r}") from error
    config = replace(config, **{name: number})
    check(config)
    return config


def converse(model: GPT, tokenizer: Tokenizer, config: SamplingConfig, show) -> None:
    """Reads prompts and continues them until the input ends; Ctrl-C cuts a sample short."""
    show('a prompt to continue, "/" for the settings, "/temperature 0.5" to change one, "/quit"\n')
    while True:
        try:
            line = input("> ")
            if line.strip() == "/quit":
                return
            if line.strip() == "/":
                values = [f"/{name} {getattr(config, name)}" for name in CHANGEABLE]
                show("  ".join(values).lower() + "\n")
            elif line.startswith("/"):
                config = changed(config, line)
            elif line:
                line.encode()
                write(model, tokenizer, line, config, show)
                config = replace(config, seed=(config.seed + 1) % 2**31)  # another text next time
        except ConfigError as error:
            show(f"{error}\n")
        except UnicodeError:
            show("that line is not UTF-8\n")
        except KeyboardInterrupt:
            show("\n")
        except EOFError:
            show("\n")
            return


def main(config: SamplingConfig) -> None:
    check(config)
    device = pick_device(config.device)
    model, name, _ = open_model(config.checkpoint, config.model)
    tokenizer = load_tokenizer(name)
    model.to(device)
    if not config.use_torch_compile:
        model = packed(model, pick_dtype(config.dtype, device))

    def show(out: str) -> None:
        sys.stdout.write(out)
        sys.stdout.flush()

    if config.interactive:
        converse(model, tokenizer, config, show)
    elif config.json:
        for sample in write(model, tokenizer, read_prompt(config.prompt), config, lambda out: None):
            show(json.dumps(sample) + "\n")
    else:
        write(model, tokenizer, read_prompt(config.prompt), config, show)


if __name__ == "__main__":
    run(main, SamplingConfig)
