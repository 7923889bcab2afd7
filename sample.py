"""Write text with a trained model.

    python sample.py --checkpoint checkpoints/model_best.pt --prompt "Once upon a time"
    cat story.txt | python sample.py --prompt -
    python sample.py --checkpoint runs/sft --chat            # a conversation on the keyboard

Architecture and tokenizer are read from the checkpoint. All samples are generated as one batch: the
first is printed while it is generated, the others after it. The same seed gives the same text.
"""

import contextlib
import io
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import utils.environment  # noqa: F401 (first: it says what to type without PyTorch)

import torch

from config import SamplingConfig
from data.named_tokenizer import Tokenizer
from data.open_model import open_model
from data.tokenizer import load_tokenizer
from finetuning.chat import Messages, encode_prompt, fit_history, is_chat
from finetuning.completions import decode_completion
from model.generate import generate
from model.gpt import GPT
from model.inference import prepare_for_inference
from utils.cli import start_script
from utils.devices import autocast, pick_device, pick_dtype
from utils.errors import UserError, check_text


@dataclass(frozen=True)
class PromptOptions:
    """Model, prompt and device."""

    checkpoint: Path = Path("checkpoints")
    """Checkpoint of train.py or finetune.py, or a folder: its best one, else its newest."""
    model: str | None = None
    """Model to sample from instead: a Hugging Face name (gpt2, gpt2-xl, ...) or folder, or a
    checkpoint of nanoGPT, build-nanogpt or llm.c."""
    prompt: str = ""
    """Beginning of a text, to continue; - reads standard input. BOS, or end of text if the
    tokenizer has none, stands before it, as in training."""
    chat: bool = False
    """Answer as the assistant of a chat; without --prompt, talk with the keyboard."""
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

    def write(self, prompt: str, history: Messages, seed: int) -> str:
        """Continue a prompt, or with --chat answer it as the newest message after `history`, which
        holds earlier questions and answers in turn.

        Return the first sample, which is printed while it is generated; the others follow it.
        """
        options = self.options
        prompt_ids = self.prompt_ids(prompt, history)
        heading = "" if options.chat else prompt  # an answer is shown without its question
        sampling = replace(options, seed=seed)
        # One batch: sample i draws its random numbers from (seed, i).
        prompts = [prompt_ids] * options.num_samples
        completions: list[list[int]] = [[] for _ in prompts]  # token ids up to end of text
        has_ended = [False] * options.num_samples
        num_shown = 0  # tokens of the first completion
        print_now(heading)
        # `generate` yields the next token of each completion, up to max_new_tokens times
        for token_ids in generate(self.model, prompts, sampling):  # (num_samples,)
            for index, token_id in enumerate(token_ids.tolist()):
                has_ended[index] |= token_id in self.tokenizer.end_ids  # or the end of a turn
                # The batch goes on until every completion has ended, so that an ended one still
                # gets tokens.
                if not has_ended[index]:
                    completions[index].append(token_id)
            # A character can span several tokens, and is U+FFFD until it is whole.
            characters = self.decode(completions[0], num_shown, keep_cut=True)
            if characters and not characters.endswith("\ufffd"):
                print_now(characters)
                num_shown = len(completions[0])
            if all(has_ended):
                break
        print_now(f"{self.decode(completions[0], num_shown)}\n")
        for completion in completions[1:]:
            print_now(f"\n{'-' * 80}\n{heading}{self.decode(completion)}\n")
        return self.decode(completions[0])

    def decode(self, completion: list[int], start: int = 0, keep_cut: bool = False) -> str:
        """Return the characters of a completion from the token with index `start` on. A last
        character that is cut becomes U+FFFD with `keep_cut`, and always in an answer of --chat, as
        in evaluate.py; else it is left out."""
        chat = self.options.chat
        # The space before an answer is left out at its beginning alone.
        is_answer_start = chat and start == 0
        token_ids = completion[start:]
        return decode_completion(token_ids, self.tokenizer, is_answer_start, chat or keep_cut)

    def prompt_ids(self, prompt: str, history: Messages) -> list[int]:
        """Return the token ids to continue. Raises UserError for a prompt that is not UTF-8, or
        does not fit the context."""
        check_text(prompt, "the prompt")
        options = self.options
        block_size = self.model.config.block_size
        if options.chat:
            messages = [*history, {"role": "user", "content": prompt}]
            # The newest messages that fit with room for an answer; the newest is always kept.
            prompt_ids = fit_history(messages, self.tokenizer, block_size, options.max_new_tokens)
        else:
            # BOS or end of text, then the prompt, as at the beginning of a document in the shards
            prompt_ids = encode_prompt(prompt, self.tokenizer, chat=False)
            # In a vocabulary of characters each known one is a token; nanoGPT raises KeyError.
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
                    answer = self.write(question, history, seed)
                    # Appended after the answer: Ctrl-C or an error drops the question, too.
                    history.append({"role": "user", "content": question})
                    history.append({"role": "assistant", "content": answer})
                    seed += 1  # the same question gets another answer next time
            except UserError as error:  # the question is too long, or no text
                print_now(f"{error}\n")
            except KeyboardInterrupt:  # Ctrl-C ends the answer, not the chat
                print_now("\n")
            except EOFError:  # Ctrl-D, or the end of standard input
                return


def print_now(text: str) -> None:
    """Print text at once, without a line break."""
    print(text, end="", flush=True)


def main(options: SampleOptions) -> None:
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    # --model wins, as --checkpoint has a default.
    model_name = options.model or options.checkpoint
    # bfloat16 matmuls need only the upper half of each weight: half the bytes to read.
    model, tokenizer_spec, checkpoint = open_model(model_name, float32=dtype is not torch.bfloat16)
    if options.chat and not is_chat(checkpoint, tokenizer_spec):
        print("note: this model has not learned to chat: finetune.py --method sft", file=sys.stderr)
    # In place: converts the weights to the layout or dtype that is fastest for one token at a time.
    prepare_for_inference(model.to(device), device, dtype)

    writer = Writer(model, load_tokenizer(tokenizer_spec), options)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A byte that is no UTF-8 ends no conversation: Writer.prompt_ids refuses the text with it.
        sys.stdin.reconfigure(errors="surrogateescape")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    with autocast(device, dtype):  # casts what prepare_for_inference has not
        if options.chat and not prompt:
            writer.converse()
        else:
            writer.write(prompt, [], options.seed)


if __name__ == "__main__":
    start_script(main, SampleOptions)
