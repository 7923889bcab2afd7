"""Text that a model writes after the prompts of questions, for rewards, GRPO and the questions of
evaluate.py."""

import codecs
from dataclasses import dataclass

from config import SamplingConfig
from data.named_tokenizer import Tokenizer
from finetuning.examples import Example, Question, TextEncoder
from model.generate import complete
from model.gpt import GPT
from utils.distributed import Process


@dataclass
class Completion:
    """Completion of the prompt of a row."""

    row: dict
    """With "prompt", and for exact rewards "answer"."""
    text: str
    """Without what ended it."""
    example: Example
    """Token ids of the prompt, then those of the completion with the one that ended it, which count
    in the loss."""
    is_cut: bool
    """True if it reached --max_new_tokens without an end."""
    reward: float = 0.0
    """grpo: reward, by --reward."""
    advantage: float = 0.0
    """grpo: how much better its reward is than those of its group, see group_advantages."""


def is_exact(completion: Completion) -> bool:
    """Return True if a completion is the row's answer, white space around either aside. One that
    was cut is not: it may be the beginning of another answer."""
    answer = str(completion.row["answer"])  # may be a number
    return not completion.is_cut and completion.text.strip() == answer.strip()


def complete_questions(
    model: GPT,
    questions: list[Question],
    encoder: TextEncoder,
    sampling: SamplingConfig,
    process: Process,
    first_index: int = 0,
) -> list[Completion]:
    """Return a completion of each question; `first_index` is the index of the first one in its
    step, from which its random numbers follow. Every process must call it, with at least one
    question. Leaves the model in training mode. Raises Stopped after a signal."""
    tokenizer = encoder.tokenizer
    prompts = [question.prompt_ids for question in questions]
    model.eval()
    # Every TOKENS_PER_CHECK tokens, all_done asks all processes whether they are done. It raises
    # Stopped after a signal, so that a run ends within seconds.
    with process.autocast():
        # each with the `tokens` before its end and an `end_id`, None if max_new_tokens came first
        end_ids = tokenizer.end_ids
        generated = complete(model, prompts, end_ids, sampling, process.all_done, first_index)
    model.train()  # a training step may follow
    completions: list[Completion] = []
    for question, written in zip(questions, generated, strict=True):
        is_cut = written.end_id is None
        completion_ids = written.tokens
        # GRPO teaches a completion to end, too. One that was cut has no end to learn.
        if written.end_id is not None:
            completion_ids = completion_ids + [written.end_id]
        example = Example.of_completion(question.prompt_ids, completion_ids)
        # the end, such as <|im_end|>, is no part of the text
        text = decode_completion(written.tokens, tokenizer, encoder.chat)
        completions.append(Completion(question.row, text, example, is_cut))
    return completions


def decode_completion(
    ids: list[int], tokenizer: Tokenizer, chat: bool, keep_cut: bool = True
) -> str:
    """Return the text of a completion's ids; an answer of a `chat` loses the space after
    "Assistant:". Sampling, rewards and evaluate.py call it alike. A last character that is cut
    becomes U+FFFD with `keep_cut`, else it is left out."""
    # the third argument, `final`: bytes of a cut character are an error, which "replace" turns into
    # U+FFFD
    text, _ = codecs.utf_8_decode(tokenizer.decode_bytes(ids), "replace", keep_cut)
    # the project's own format writes "Assistant: 5", and the prompt ends with the colon
    if chat and not tokenizer.chat_template:
        return text.removeprefix(" ")
    return text
