"""Write text with a trained model.

    python sample.py --checkpoint checkpoints/model_best.pt --prompt "Once upon a time"
    cat story.txt | python sample.py --prompt -
    python sample.py --model gpt2 --interactive
    python sample.py --checkpoint runs/sft --chat

Architecture and tokenizer are read from the checkpoint. All samples are generated as one batch: the
first is printed while it is generated, the others after it. The same seed gives the same text.
"""

import codecs
import contextlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from config import SamplingConfig
from data.tokenizer import Tokenizer, load_tokenizer
from finetuning.chat import Messages, fit_history
from model import cpu
from model.generate import generate
from model.gpt import GPT
from training.checkpoint_folder import is_chat, open_model, refuse_both_sources
from utils.cli import run
from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError

OPTIONS = {  # type, least and greatest value; --interactive can change these options
    "temperature": (float, 0, math.inf),
    "top_k": (int, 1, math.inf),
    "top_p": (float, 1e-9, 1),
    "max_new_tokens": (int, 0, 2**24 - 1),
    "num_samples": (int, 1, 2**16 - 1),
    "seed": (int, 0, 2**31 - 1),
}
LEAST_TEMPERATURE = 1e-6  # beside 0; logits that are divided by less overflow
NANOGPT_OPTIONS = {
    "start": "--prompt is the text to continue, --prompt @FILE that of a file",
    "out_dir": "--checkpoint is a checkpoint or a folder of them",
    "init_from": "--model is a Hugging Face name or folder, --checkpoint a checkpoint",
    "compile": "--use_torch_compile compiles the forward pass of one token",
}
Show = Callable[[str], None]  # takes each piece of the output
CHAT_HELP = 'say something, "/" for the options, "/new" for a new chat, "/quit"\n'
HELP = 'enter a prompt to continue, "/" for the options, "/top_k 50" to change one, "/quit"\n'


def read_prompt(prompt: str) -> str:
    """Return the text of --prompt: a literal, the content of @FILE, or standard input for "-"."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_bytes().decode("utf-8-sig")
        prompt.encode()  # raises for bytes of the command line that are not UTF-8
    except (OSError, UnicodeError) as error:
        hint = "; to write after an @, give the text by --prompt -" if prompt[:1] == "@" else ""
        raise UserError(f"--prompt {prompt!a} cannot be read as text: {error}{hint}") from error
    return prompt


def check(config: SamplingConfig, prefix: str = "--") -> None:
    """Raise UserError for the first option that is out of range, named with `prefix`."""
    for name, (_, least, greatest) in OPTIONS.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= greatest:
            bounds = f"from {least} to {greatest}" if greatest < math.inf else f"at least {least}"
            raise UserError(f"{prefix}{name} {value} must be {bounds}")
    if 0 < config.temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"{prefix}temperature {config.temperature} must be at least {LEAST_TEMPERATURE}, or 0 "
            "for the likeliest tokens"
        )


def write_samples(
    model: GPT,
    tokenizer: Tokenizer,
    text: str,
    config: SamplingConfig,
    show: Show,
    history: Messages | None = None,
) -> list[dict]:
    """Continue a prompt, or with --chat answer it as the newest of the messages in `history`; pass
    the first sample to `show` while it is generated, then the others. Return prompt, text, number
    of tokens and reason of the end ("finish") of each sample."""
    prompt, heading = tokenizer.encode(text).tolist() or [tokenizer.eot], text
    if config.chat:
        messages = [*(history or []), {"role": "user", "content": text}]
        size, heading = model.config.block_size, ""
        prompt = fit_history(messages, tokenizer, size, config.max_new_tokens)
    if len(prompt) > model.config.block_size:
        raise UserError(
            f"the prompt is {len(prompt):,} tokens long; this model reads at most "
            f"{model.config.block_size:,}: shorten it"
        )
    device = model.transformer.wte.weight.device
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "use_torch_compile")
    options = {name: getattr(config, name) for name in names}
    start = {"prompt": text, "text": "", "tokens": 0, "finish": "length"}
    samples = [{"sample": i, **start} for i in range(config.num_samples)]
    # incremental, because a character can span several tokens
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in samples]
    show(heading)
    with autocast(device, pick_dtype(config.dtype, device)):
        for tokens in generate(model, [prompt] * config.num_samples, **options):
            for sample, decoder, token in zip(samples, decoders, tokens.tolist(), strict=True):
                if token == tokenizer.eot:
                    sample["finish"] = "end of text"
                if sample["finish"] == "length":
                    piece = decoder.decode(tokenizer.decode_bytes([token]))
                    if config.chat and sample["tokens"] == 0:
                        piece = piece.removeprefix(" ")  # after "Assistant:"
                    sample["text"] += piece
                    sample["tokens"] += 1
                    if sample is samples[0]:
                        show(piece)
            if all(sample["finish"] == "end of text" for sample in samples):
                break
    for sample, decoder in zip(samples, decoders, strict=True):
        tail = decoder.decode(b"", final=True)
        sample["text"] += tail
        rule = f"\n{'-' * 80}\n{heading}{sample['text']}"
        show((tail if sample is samples[0] else rule) + "\n")
    return samples


def with_option(config: SamplingConfig, command: str) -> SamplingConfig:
    """Return the options changed by "/name value"; raise UserError for a wrong name or value."""
    name, _, value = command[1:].strip().partition(" ")
    if name not in OPTIONS:
        raise UserError(f"there is no /{name}; there are /{' /'.join(OPTIONS)} and /quit")
    try:
        number = None if value == "none" and name.startswith("top_") else OPTIONS[name][0](value)
    except ValueError as error:
        kind = "whole number" if OPTIONS[name][0] is int else "number"
        raise UserError(f"/{name} takes a {kind}, not {value!r}") from error
    config = replace(config, **{name: number})
    check(config, prefix="/")
    return config


def converse(model: GPT, tokenizer: Tokenizer, config: SamplingConfig, show: Show) -> None:
    """Continue prompts from the keyboard, or answer them with --chat, until the input ends; Ctrl-C
    ends a sample."""
    with contextlib.suppress(ImportError):  # a Python built without it
        import readline  # noqa: F401  line editing and history for input()
    show(CHAT_HELP if config.chat else HELP)
    history: Messages = []
    while True:
        try:
            line = input("> ")
            if line.split()[:1] == ["/quit"]:
                return
            if line.strip() == "/":
                values = [f"/{name} {getattr(config, name)}" for name in OPTIONS]
                show("  ".join(values).lower() + "\n")
            elif line.strip() == "/new" and config.chat:
                history = []
            elif line.startswith("/"):
                config = with_option(config, line)
            elif line:
                line.encode()
                answer, *_ = write_samples(model, tokenizer, line, config, show, history)
                history += [{"role": "user", "content": line}]
                history += [{"role": "assistant", "content": answer["text"]}]
                config = replace(config, seed=(config.seed + 1) % 2**31)  # another text next time
        except UserError as error:
            show(f"{error}\n")
        except UnicodeError:
            show("this line is not UTF-8 text; enter another\n")
        except KeyboardInterrupt:
            show("\n")
        except EOFError:
            show("\n")
            return


def main(config: SamplingConfig) -> None:
    check(config)
    if config.chat and config.json and not config.prompt:
        raise UserError("--chat --json needs --prompt, the message to answer")
    if config.chat and not config.prompt:
        config = replace(config, interactive=True)
    if config.interactive and (config.json or config.prompt):
        raise UserError("--interactive asks for prompts: leave out --prompt and --json")
    if sys.stdin is None and (config.interactive or config.prompt == "-"):
        raise UserError(
            "--interactive and --prompt - read standard input, which is closed; give --prompt TEXT "
            "or --prompt @FILE"
        )
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    refuse_both_sources(sys.argv[1:])
    exact = dtype is torch.float32
    model, name, saved = open_model(config.checkpoint, config.model, exact=exact)
    if config.chat and not is_chat(saved, config.model):
        print("note: this model has not learned to chat: finetune.py --method sft", file=sys.stderr)
    tokenizer = load_tokenizer(name)
    model.to(device)
    if device.type == "cpu" and not config.use_torch_compile:
        cpu.for_inference(model, dtype)
    show = partial(print, end="", flush=True)
    if config.interactive:
        converse(model, tokenizer, config, show)
        return
    text = read_prompt(config.prompt)
    if not config.json:
        write_samples(model, tokenizer, text, config, show)
        return
    for sample in write_samples(model, tokenizer, text, config, lambda piece: None):
        show(json.dumps(sample) + "\n")


if __name__ == "__main__":
    run(main, SamplingConfig, hints=NANOGPT_OPTIONS)
