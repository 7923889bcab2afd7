"""Which tokens of a dialog are learned.

An answer is learned from where sampling would begin it up to the token that ends it; underlined
here, of the project's own format and of ChatML, a chat template:

    <|endoftext|>User: 2+3?<|endoftext|>Assistant: 5<|endoftext|>
                                                  ~~~~~~~~~~~~~~~
    <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n
                                                           ~~~~~~~~~~~

A row is refused if the template writes an answer in a way that cannot be learned so.
"""

from data.named_tokenizer import Tokenizer
from data.tokenizer import FileTokenizer
from finetuning.chat import Message, Messages, Tools, encode_with_special_tokens, texts_of

# fields of an answer that a template may write beside its content
ANSWER_FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_calls")


def is_learned(message: Message) -> bool:
    """Return True for a turn of the assistant, unless its "weight" is 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def find_answer(
    messages: Messages, index: int, dialog_ids: list[int], tokenizer: Tokenizer, tools: Tools = None
) -> slice:
    """Return which token ids of a dialog are those of the answer messages[index], with the one that
    ends it; `dialog_ids` are those of all `messages`. Raise ValueError if the chat template does
    not let the answer be learned."""
    if not (isinstance(tokenizer, FileTokenizer) and tokenizer.chat_template):
        # the project's own format: end of text closes the answer, and is learned, too
        start = len(encode_with_special_tokens(messages[:index], tokenizer, open_turn=True))
        return slice(start, dialog_ids.index(tokenizer.eot, start) + 1)

    if index == 0:  # templates are not made for a prompt without any message
        raise ValueError('a dialog begins with an answer; leave it out of the loss by "weight": 0')
    # the text of the dialog up to the answer, which sampling continues, and up to the answer's end
    prompt = tokenizer.render(messages[:index], open_turn=True, tools=tools)
    until_answer = tokenizer.render(messages[: index + 1], tools=tools)
    prompt_ids = tokenizer.encode_with_special_tokens(prompt)
    start = len(prompt_ids)  # index of the answer in dialog_ids
    # text after the end of an answer, such as a line break, is not sampled
    turn_end = tokenizer.backend.id_to_token(tokenizer.turn_end)  # such as <|im_end|>
    assert turn_end  # FileTokenizer takes the id of `turn_end` from its own vocabulary
    answer, end, _ = until_answer[len(prompt) :].partition(turn_end)
    if not end:  # a model would write on to the end of its context
        raise ValueError(
            "the chat template writes no special token after an answer, so that a model does not "
            "learn to end one: add {{ eos_token }} to the template"
        )

    texts = texts_of(messages[index])
    for name in ANSWER_FIELDS:
        without_field = [*messages[:index], {**messages[index], name: None}]
        if not messages[index].get(name):
            continue
        if tokenizer.render(without_field, tools=tools) == until_answer:
            raise ValueError(f'the chat template leaves out "{name}" of an answer')
    # A token can span the end of the prompt, and later turns can change an earlier answer.
    is_continued = dialog_ids[:start] == prompt_ids
    is_kept = tokenizer.render(messages, tools=tools).startswith(until_answer)
    has_texts = all(text.strip() in answer for text in texts)  # many templates strip a text
    # an answer of "tool_calls" alone, which the template leaves out, would teach to say nothing
    if not (is_continued and is_kept and has_texts and answer.strip()):
        raise ValueError(
            f"the chat template changes the answer {' '.join(texts)[:40]!r}, or no token ends "
            f"where sampling would begin it, after {prompt[-40:]!r}; "
            'leave it out of the loss by "weight": 0'
        )
    return slice(start, dialog_ids.index(tokenizer.turn_end, start) + 1)
