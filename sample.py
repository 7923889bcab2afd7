"""Write text with a trained model.

    python sample.py --checkpoint checkpoints/model_best.pt --prompt "Once upon a time"
    cat story.txt | python sample.py --prompt -
    python sample.py --checkpoint runs/sft --chat            # chat on the keyboard

In Python, `from sample import load` does the same: load("runs/own").complete("Once upon a time").
The checkpoint holds the architecture and the tokenizer. All samples are generated as one batch: the
first is printed while it is generated, the others after it. The same seed gives the same text.
"""

import contextlib
import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch

from config import SamplingConfig
from data.named_tokenizer import Tokenizer
from data.open_model import open_model
from data.tokenizer import load_tokenizer
from finetuning.chat import Messages, encode_prompt, fit_history, is_chat
from finetuning.completions import decode_completion
from model.generate import complete, generate
from model.gpt import GPT
from model.inference import prepare_for_inference
from utils.cli import start_script
from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError, check_text
from utils.ranges import check_ranges


@dataclass(frozen=True)
class PromptOptions:
    """Model, prompt and device."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py or finetune.py, or a folder: takes its best checkpoint, else its
    newest."""
    model: str | None = None
    """Model to sample from in place of --checkpoint: a Hugging Face name (gpt2, gpt2-xl, ...) or
    folder, or a checkpoint of nanoGPT, build-nanogpt or llm.c."""
    prompt: str = ""
    """Text to continue; - reads it from standard input. BOS, or end of text if the tokenizer has no
    BOS, precedes it as in training."""
    chat: bool = False
    """Answer the prompt as the assistant of a chat; without --prompt, chat on the keyboard."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of matmuls. auto: bfloat16 where it is faster, float16 on old GPUs."""


@dataclass(frozen=True)
class SampleOptions(SamplingConfig, PromptOptions):
    """Write text with a trained model."""


@dataclass
class Writer:
    """Writes samples of a model to the console."""

    model: GPT
    tokenizer: Tokenizer
    options: SampleOptions

    def print_answers(self, prompt: str, history: Messages, seed: int) -> str:
        """Print --num_samples continuations of a prompt. With --chat, print answers to the prompt
        as the newest message after `history`, the earlier questions and answers in turn.

        Return the first sample, which is printed while it is generated; the others are printed
        after it.
        """
        options = self.options
        prompt_ids = self.prompt_ids(prompt, history)  # UserError if they do not fit
        heading = "" if options.chat else prompt  # an answer is shown without its question
        # temperature, top_k, ..., for `generate`; `converse` counts the seed up
        sampling = replace(options, seed=seed)
        # One batch: sample i draws its random numbers from (seed, i).
        prompts = [prompt_ids] * options.num_samples
        # for each sample its token ids, without the end token
        completions: list[list[int]] = [[] for _ in prompts]
        has_ended = [False] * options.num_samples
        num_shown = 0  # tokens of the first completion that are printed already
        print_now(heading)
        # `generate` yields the next token of each completion, up to max_new_tokens times
        for token_ids in generate(self.model, prompts, sampling):  # (num_samples,)
            for index, token_id in enumerate(token_ids.tolist()):
                has_ended[index] |= token_id in self.tokenizer.end_ids  # end of text or of a turn
                # The batch goes on after the end of one completion: drop its tokens from there on.
                if not has_ended[index]:
                    completions[index].append(token_id)
            # The text after num_shown tokens. A character can span several tokens: until the last
            # of them keep_cut gives U+FFFD, and the text waits for the next token.
            characters = self.decode(completions[0], num_shown, keep_cut=True)
            if characters and not characters.endswith("\ufffd"):
                print_now(characters)
                num_shown = len(completions[0])
            if all(has_ended):
                break
        print_now(f"{self.decode(completions[0], num_shown)}\n")  # what is not printed yet
        for completion in completions[1:]:  # heading: the prompt; "" with --chat
            print_now(f"\n{'-' * 80}\n{heading}{self.decode(completion)}\n")
        return self.decode(completions[0])

    def decode(self, completion: list[int], start: int = 0, keep_cut: bool = False) -> str:
        """Return the text of a completion (token ids) from index `start` on. If the last token ends
        within a character, the text ends in U+FFFD with `keep_cut` or --chat (as in evaluate.py),
        else before that character."""
        chat = self.options.chat
        token_ids = completion[start:]
        # drops, in a chat, special tokens and, at the start, the space after "Assistant:"
        return decode_completion(
            token_ids, self.tokenizer, chat, keep_cut=chat or keep_cut, is_start=start == 0
        )

    def prompt_ids(self, prompt: str, history: Messages) -> list[int]:
        """Return the token ids that the model continues. Raise UserError for a prompt that is not
        UTF-8, does not fit into the context, or has characters that a vocabulary lacks."""
        check_text(prompt, "the prompt")
        options = self.options
        block_size = self.model.config.block_size
        if options.chat:
            messages = [*history, {"role": "user", "content": prompt}]
            # Drops the oldest messages until an answer has room, but never the newest message.
            prompt_ids = fit_history(messages, self.tokenizer, block_size, options.max_new_tokens)
        else:
            # BOS or end of text, then the prompt, as at the beginning of a document in the shards
            prompt_ids = encode_prompt(prompt, self.tokenizer, chat=False)
            # Without end_ids each token is a character, and encoding drops unknown characters.
            if not self.tokenizer.end_ids and len(prompt_ids) < len(prompt):
                raise UserError("the prompt has characters that the model's vocabulary lacks")
        if len(prompt_ids) > block_size:
            raise UserError(
                f"the prompt has {len(prompt_ids):,} tokens; this model reads at most "
                f"{block_size:,}"
            )
        return prompt_ids

    def converse(self) -> None:
        """Answer questions from the keyboard until /quit or Ctrl-D."""
        with contextlib.suppress(ImportError):  # some Pythons are built without readline
            import readline  # noqa: F401  line editing and history for input()
        history: Messages = []  # questions and answers in turn
        seed = self.options.seed
        print_now("say something; /new begins a new chat, /quit ends\n")
        while True:
            try:
                question = input("> ")
                if question.strip() in ("/quit", "quit", "exit"):
                    return
                if question.strip() == "/new":
                    history = []
                elif question:
                    answer = self.print_answers(question, history, seed)  # returns the first one
                    # Append both after the answer: Ctrl-C or an error then drops the question, too.
                    history.append({"role": "user", "content": question})
                    history.append({"role": "assistant", "content": answer})
                    seed += 1  # the same question gets another answer next time
            except UserError as error:  # the question is too long, or not UTF-8
                print_now(f"{error}\n")
            except KeyboardInterrupt:  # Ctrl-C ends the answer, not the chat
                print_now("\n")
            except EOFError:  # Ctrl-D, or the end of standard input
                return


def print_now(text: str) -> None:
    """Print text at once, without a line break."""
    print(text, end="", flush=True)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, ready to write text on a device: the return value of load."""

    model: GPT
    tokenizer: Tokenizer
    can_chat: bool
    """True if the model has learned to chat."""
    device: torch.device
    dtype: torch.dtype
    """Dtype of matmuls."""

    def complete(self, prompt: str, **options: Any) -> str:
        """Return the text that the model writes after a prompt. `options` are those of
        SamplingConfig but num_samples (max_new_tokens=100, temperature=0.7, seed=1, ...), and
        chat=True, which returns the answer to a question. Raise UserError for a prompt that does
        not fit."""
        sampling = SampleOptions(**options)
        check_ranges(sampling)
        writer = Writer(self.model, self.tokenizer, sampling)
        prompt_ids = writer.prompt_ids(prompt, [])  # no earlier messages
        with self.autocast():
            # a GeneratedTokens for each list of ids; its `tokens` end before the first of end_ids
            [completion] = complete(self.model, [prompt_ids], self.tokenizer.end_ids, sampling)
        return writer.decode(completion.tokens)  # ids, without the end token

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return a context in which matmuls run in `dtype`; for float32 it does nothing."""
        return autocast(self.device, self.dtype)


def load(model_name: str | Path, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Return the model of a run's folder, of a checkpoint of any project that --model names, or of
    a Hugging Face name or folder, for `load("gpt2").complete("Once upon a time")`."""
    torch_device = pick_device(device)
    torch_dtype = pick_dtype(dtype, torch_device)  # "auto": bfloat16 where it is faster
    # For bfloat16 read only the bfloat16 half of each weight, half of the bytes. This rounds
    # embeddings and norms, too.
    needs_float32 = torch_dtype is not torch.bfloat16
    # The spec of GPT-2's tokenizer is "gpt2". `checkpoint` is the content of the file, {} for a
    # model of another project.
    model, tokenizer_spec, checkpoint = open_model(model_name, float32=needs_float32)
    # In place: evaluation mode, and faster linear layers for this device and dtype. Embeddings and
    # norms are float32.
    prepare_for_inference(model.to(torch_device), torch_device, torch_dtype)
    can_chat = is_chat(checkpoint, tokenizer_spec)  # by finetune.py's record, else the tokenizer
    return LoadedModel(model, load_tokenizer(tokenizer_spec), can_chat, torch_device, torch_dtype)


def main(options: SampleOptions) -> None:
    # --model wins, because --checkpoint is always set by its default.
    loaded = load(options.model or options.checkpoint, options.device, options.dtype)
    if options.chat and not loaded.can_chat:
        print("note: this model has not learned to chat: finetune.py --method sft", file=sys.stderr)
    if loaded.can_chat and not options.chat:
        print("note: this model has learned to chat: add --chat", file=sys.stderr)

    writer = Writer(loaded.model, loaded.tokenizer, options)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Do not fail at a byte that is not UTF-8: Writer.prompt_ids refuses the question instead,
        # and the chat continues.
        sys.stdin.reconfigure(errors="surrogateescape")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with loaded.autocast():
        if options.chat and not prompt:
            writer.converse()
        else:
            writer.print_answers(prompt, [], options.seed)  # no earlier messages


if __name__ == "__main__":
    start_script(main, SampleOptions)
