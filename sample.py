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
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from finetuning.chat import Messages, fit_history, is_chat
from model.generate import Sampling, generate
from model.gpt import GPT
from model.inference import prepare_for_inference
from training.checkpoint import open_model
from utils.cli import start_script
from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError

CHAT_COMMANDS = "say something; /new begins a new chat, /quit ends\n"
TEXT_COMMANDS = "enter the beginning of a text, which the model continues; /quit ends\n"


@dataclass
class SampleConfig:
    """Write text with a trained model."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py or finetune.py, or a folder: its best one, else its newest."""
    model: str | None = None
    """Hugging Face model to sample from instead: a name (gpt2, gpt2-xl, ...) or a folder."""
    prompt: str = ""
    """Text to continue; @FILE reads a file, - standard input."""
    num_samples: int = 1
    """Texts to write; the first is shown while it is generated."""
    interactive: bool = False
    """Ask for prompts; /quit, /help and with --chat /new are commands."""
    chat: bool = False
    """Answer as the assistant of a chat; without --prompt, talk with the keyboard."""
    json: bool = False
    """Write one line of JSON per text."""
    max_new_tokens: int = 200
    """Most tokens of a continuation; end of text ends it, a full context drops its older half."""
    temperature: float = 0.8
    """Sampling temperature; 0: always the likeliest token."""
    top_k: int | None = None
    """Sample from the k likeliest tokens."""
    top_p: float | None = None
    """Sample from the likeliest tokens that together have this probability."""
    seed: int = 1337
    """Seed; sample i depends on (seed, i) alone."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls. auto: bfloat16 where it is faster, float16 on old GPUs."""

    def __post_init__(self) -> None:
        minima = {"num_samples": 1, "max_new_tokens": 0, "temperature": 0, "top_k": 1, "seed": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            # not (a >= b), because NaN is neither above nor below
            if value is not None and not value >= minimum:
                raise UserError(f"--{name} {value} must be at least {minimum}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top_p {self.top_p} must be above 0 and at most 1")


def read_prompt(prompt: str) -> str:
    """Return the text of --prompt: a literal, the content of @FILE, or standard input for "-"."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        if prompt.startswith("@"):
            return Path(prompt[1:]).read_text(encoding="utf-8-sig")
        return prompt
    except (OSError, UnicodeError) as error:
        raise UserError(f"--prompt {prompt} cannot be read as text: {error}") from error


@dataclass
class Sample:
    """One text of a model, as a line of --json."""

    sample: int
    """Its number, from 0."""
    prompt: str
    text: str = ""
    """Text of the model after the prompt."""
    tokens: int = 0
    """Number of its tokens."""
    finish: str = "length"
    """Why it ended: "length" or "end of text"."""


@dataclass
class Writer:
    """Writes samples of a model; `show` gets their text piece by piece."""

    model: GPT
    tokenizer: Tokenizer
    config: SampleConfig
    show: Callable[[str], None]

    def write(self, prompt: str, history: Messages, seed: int) -> list[Sample]:
        """Continue a prompt, or with --chat answer it as the newest message after `history`."""
        config, tokenizer = self.config, self.tokenizer
        block_size = self.model.config.block_size
        if config.chat:
            messages = [*history, {"role": "user", "content": prompt}]
            prompt_ids = fit_history(messages, tokenizer, block_size, config.max_new_tokens)
            heading = ""  # an answer is shown without its question
        else:
            # an empty prompt is the end of the text before
            prompt_ids = tokenizer.encode(prompt).tolist() or [tokenizer.eot]
            heading = prompt
        if len(prompt_ids) > block_size:
            raise UserError(
                f"the prompt has {len(prompt_ids):,} tokens; this model reads at most "
                f"{block_size:,}"
            )

        samples = [Sample(number, prompt) for number in range(config.num_samples)]
        # incremental, because a character can span several tokens
        new_decoder = codecs.getincrementaldecoder("utf-8")
        decoders = [new_decoder("replace") for _ in samples]
        sampling = Sampling(
            config.max_new_tokens, config.temperature, config.top_k, config.top_p, seed
        )
        steps = generate(self.model, [prompt_ids] * len(samples), sampling)
        device = self.model.transformer.wte.weight.device
        self.show(heading)
        with autocast(device, pick_dtype(config.dtype, device)):
            for token_ids in steps:
                for sample, decoder, token in zip(
                    samples, decoders, token_ids.tolist(), strict=True
                ):
                    if token in tokenizer.end_ids:
                        sample.finish = "end of text"
                    # rows that have ended are generated on, with the others, and not shown
                    if sample.finish == "length":
                        piece = decoder.decode(tokenizer.decode_bytes([token]))
                        if config.chat and sample.tokens == 0:
                            piece = piece.removeprefix(" ")  # after "Assistant:"
                        sample.text += piece
                        sample.tokens += 1
                        if sample is samples[0]:
                            self.show(piece)
                if all(sample.finish == "end of text" for sample in samples):
                    break
        self.show("\n")
        for sample in samples[1:]:
            self.show(f"\n{'-' * 80}\n{heading}{sample.text}\n")
        return samples

    def converse(self) -> None:
        """Continue prompts from the keyboard, or answer them with --chat; Ctrl-C ends a sample."""
        with contextlib.suppress(ImportError):  # a Python built without it
            import readline  # noqa: F401  line editing and history for input()
        history: Messages = []
        seed = self.config.seed
        commands = CHAT_COMMANDS if self.config.chat else TEXT_COMMANDS
        self.show(commands)
        while True:
            try:
                line = input("> ")
                command = line.strip()
                if command in ("/quit", "quit", "exit"):
                    return
                if command == "/help":
                    self.show(commands)
                elif command == "/new" and self.config.chat:
                    history = []
                elif line:
                    answer = self.write(line, history, seed)[0]
                    history.append({"role": "user", "content": line})
                    history.append({"role": "assistant", "content": answer.text})
                    seed += 1  # another text next time
            except UserError as error:  # a prompt that is too long: the next may be shorter
                self.show(f"{error}\n")
            except KeyboardInterrupt:
                self.show("\n")
            except EOFError:  # Ctrl-D, or the end of a file
                return


def main(config: SampleConfig) -> None:
    is_interactive = config.interactive or (config.chat and not config.prompt)
    if is_interactive and (config.json or config.prompt):
        raise UserError("--interactive asks for prompts: leave out --prompt and --json")
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    name = config.model or config.checkpoint
    # bfloat16 takes the upper half of each weight alone: half the bytes to read
    model, tokenizer_spec, checkpoint = open_model(name, exact=dtype is not torch.bfloat16)
    if config.chat and not is_chat(checkpoint, name, tokenizer_spec):
        print("note: this model has not learned to chat: finetune.py --method sft", file=sys.stderr)
    prepare_for_inference(model.to(device), device, dtype)

    show = partial(print, end="", flush=True)
    if config.json:
        show = lambda piece: None  # noqa: E731  the lines below are all that is printed
    writer = Writer(model, load_tokenizer(tokenizer_spec), config, show)
    if is_interactive:
        return writer.converse()
    for sample in writer.write(read_prompt(config.prompt), [], config.seed):
        if config.json:
            print(json.dumps(asdict(sample)))


if __name__ == "__main__":
    start_script(main, SampleConfig)
