"""Completions: text that a model writes after the prompt of a question. GRPO rewards them, and
evaluate.py compares them with the right answers."""

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
    """A completion of the prompt of a row."""

    row: dict
    """Row of the file: {"prompt": "2+3?", "answer": "5"}; only grpo can do without an answer."""
    text: str
    """Text without the token that ended it."""
    example: Example
    """Token ids of the prompt and the completion, with the token that ended it. Only the
    completion counts in the loss."""
    is_cut: bool
    """True if the completion reached max_new_tokens before an end."""
    reward: float = 0.0
    """grpo: reward by --reward, set by GroupRelativePolicy.set_rewards after sampling."""
    advantage: float = 0.0
    """grpo: reward compared with the group's, set by GroupRelativePolicy.prepare."""


def is_exact(completion: Completion) -> bool:
    """Return True if a completion equals the row's answer, apart from white space at both ends. A
    cut completion is never exact, because it may begin another answer."""
    answer = str(completion.row["answer"])  # a str or number, which TextEncoder.question checks
    return not completion.is_cut and completion.text.strip() == answer.strip()


def complete_questions(
    model: GPT,
    questions: list[Question],
    encoder: TextEncoder,
    sampling: SamplingConfig,
    process: Process,
    first_index: int = 0,
) -> list[Completion]:
    """Return one completion per question. Question i draws its random numbers from (sampling.seed,
    first_index + i), so `first_index` is the index of the first question in the step. Every process
    must call it, with at least one question. It leaves the model in training mode, and raises
    Stopped after a signal."""
    tokenizer = encoder.tokenizer
    prompts = [question.prompt_ids for question in questions]  # [[50256, 17, ...], ...]
    model.eval()  # no dropout
    with process.autocast():
        end_ids = tokenizer.end_ids  # {50256} of GPT-2
        # [GeneratedTokens(tokens=[20], end_id=50256), ...]: the tokens before the end, and the end
        # (None if max_new_tokens came first). Every TOKENS_PER_CHECK tokens, all_done asks all
        # processes whether they are done. It raises Stopped after a signal, so a run ends within
        # seconds.
        generated = complete(model, prompts, end_ids, sampling, process.all_done, first_index)
    model.train()  # a training step may follow
    completions: list[Completion] = []
    for question, generated_tokens in zip(questions, generated, strict=True):
        is_cut = generated_tokens.end_id is None
        completion_ids = generated_tokens.tokens
        # The end token is learned, too: GRPO teaches when to end. A cut completion has none.
        if generated_tokens.end_id is not None:
            completion_ids = completion_ids + [generated_tokens.end_id]
        # prompt and completion as one sequence; only the completion counts in the loss
        example = Example.of_completion(question.prompt_ids, completion_ids)
        # without the end token, such as <|im_end|>
        text = decode_completion(generated_tokens.tokens, tokenizer, encoder.chat)
        completions.append(Completion(question.row, text, example, is_cut))
    return completions


def decode_completion(
    ids: list[int],
    tokenizer: Tokenizer,
    chat: bool,
    keep_cut: bool = True,
    is_start: bool = True,
) -> str:
    """Return the text of a completion's token ids; without `is_start` of later ones. An answer of a
    `chat` has no special tokens, and loses the space after "Assistant:". Sampling, rewards and
    evaluate.py share this function. If the ids end within a character, the text ends in U+FFFD with
    `keep_cut`, else before that character."""
    if chat:  # without <|im_start|> and the like
        ids = [token_id for token_id in ids if token_id not in tokenizer.special_ids]
    # keep_cut, as the argument `final`, turns an incomplete last character into U+FFFD; without it
    # its bytes are left out.
    text, _ = codecs.utf_8_decode(tokenizer.decode_bytes(ids), "replace", keep_cut)
    # The project's own format writes "Assistant: 5"; the prompt ends with the colon.
    if chat and is_start and not tokenizer.chat_template:
        return text.removeprefix(" ")
    return text
