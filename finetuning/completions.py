"""Text that a model writes after the prompts of questions, for --questions, rewards and GRPO."""

from collections.abc import Callable
from dataclasses import dataclass

from finetuning.chat import Example, Segment, decode_completion
from finetuning.examples import Question, TextEncoder
from model.generate import Sampling, complete
from model.gpt import GPT


@dataclass
class Completion:
    """Completion of the prompt of a row."""

    row: dict
    text: str
    example: Example
    """Token ids of the prompt, then those of the completion with the one that ended it."""
    is_cut: bool = False
    """True if it reached --max_new_tokens without an end."""


def is_exact(completion: Completion) -> bool:
    """Return True if a completion is the row's answer, white space around either aside. One that
    was cut is not: it may be the beginning of another answer."""
    answer = str(completion.row["answer"])
    return not completion.is_cut and completion.text.strip() == answer.strip()


def complete_questions(
    model: GPT,
    questions: list[Question],
    encoder: TextEncoder,
    sampling: Sampling,
    all_done: Callable[[bool], bool],
) -> list[Completion]:
    """Return a completion of each question; `all_done` as in model.generate.complete."""
    tokenizer = encoder.tokenizer
    prompts = [question.prompt_ids for question in questions]
    model.eval()  # without dropout
    texts = complete(model, prompts, tokenizer.end_ids, sampling, all_done)
    model.train()
    completions = []
    for question, text in zip(questions, texts, strict=True):
        is_cut = text.end_id is None
        # The end is part of what GRPO teaches: an answer has to end. A cut one has none to learn.
        ids = text.tokens if is_cut else [*text.tokens, text.end_id]
        example = Example.join([Segment(question.prompt_ids, False), Segment(ids, True)])
        # without the end: <|im_end|> is no part of the text
        decoded = decode_completion(text.tokens, tokenizer, encoder.chat)
        completions.append(Completion(question.row, decoded, example, is_cut))
    return completions
