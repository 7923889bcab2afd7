r"""Find the tokens of a dialog that a model learns.

It learns each answer from the place where sampling would begin it to the token that ends it. These
tokens are underlined here, in the project's own format and in ChatML, a chat template:

    <|endoftext|>User: 2+3?<|endoftext|>Assistant: 5<|endoftext|>
                                                  ~~~~~~~~~~~~~~~
    <|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n
                                                             ~~~~~~~~~~~

A row is refused if its chat template writes an answer in a way that does not allow this.
"""

from data.named_tokenizer import Tokenizer
from data.tokenizer import FileTokenizer
from finetuning.chat import Message, Messages, Tools, encode_dialog, texts_of

# fields of an answer that a template may write beside its content
ANSWER_FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_calls")


def is_learned(message: Message) -> bool:
    """Return True for a turn of the assistant, unless its "weight" is 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def find_answer(
    messages: Messages, index: int, dialog_ids: list[int], tokenizer: Tokenizer, tools: Tools
) -> slice:
    """Return the slice of `dialog_ids` that holds the answer messages[index], with the token that
    ends it. `dialog_ids` are the token ids of all `messages`, `tools` JSON schemas of functions or
    None. Raise ValueError if the chat template writes the answer in a way that cannot be learned.
    """
    if not (isinstance(tokenizer, FileTokenizer) and tokenizer.chat_template):
        # The project's own format. The answer follows "Assistant:", with which open_turn ends the
        # ids of the earlier turns. End of text closes the answer, and is learned, too.
        answer_start = len(encode_dialog(messages[:index], tokenizer, open_turn=True))
        return slice(answer_start, dialog_ids.index(tokenizer.eot, answer_start) + 1)

    if index == 0:  # chat templates cannot write a prompt without a message
        raise ValueError('a dialog begins with an answer; leave it out of the loss by "weight": 0')
    # text of the dialog up to the answer, where sampling would begin, and up to the answer's end
    prompt_text = tokenizer.render(messages[:index], open_turn=True, tools=tools)
    text_with_answer = tokenizer.render(messages[: index + 1], tools=tools)
    # ids, in which "<|im_start|>" is one token; the template has written BOS, if any, as text
    prompt_ids = tokenizer.encode_with_special_tokens(prompt_text)
    answer_start = len(prompt_ids)  # index of the answer in dialog_ids
    # Drop text after the end of an answer, such as a line break: sampling never writes it.
    end_token = tokenizer.backend.id_to_token(tokenizer.turn_end)  # text such as "<|im_end|>"
    assert end_token  # FileTokenizer takes the id of `turn_end` from its own vocabulary
    # "5", "<|im_end|>", "\n"
    answer_text, end, _ = text_with_answer[len(prompt_text) :].partition(end_token)
    if not end:  # sampling would not stop before max_new_tokens
        raise ValueError(
            "the chat template writes no special token after an answer, so a model does not learn "
            "to end an answer: add {{ eos_token }} to the template"
        )

    content_texts = texts_of(messages[index])  # [] if the answer has only "tool_calls"
    for field in ANSWER_FIELDS:  # "reasoning", "tool_calls", ...
        if messages[index].get(field):
            # the dialog without the field: if its text is the same, the template drops the field
            without_field = [*messages[:index], {**messages[index], field: None}]
            if tokenizer.render(without_field, tools=tools) == text_with_answer:
                raise ValueError(f'the chat template leaves out "{field}" of an answer')
    # false if a token spans the end of the prompt
    is_continued = dialog_ids[:answer_start] == prompt_ids
    # false if the template changes an earlier answer when later turns follow
    is_kept = tokenizer.render(messages, tools=tools).startswith(text_with_answer)
    has_texts = all(text.strip() in answer_text for text in content_texts)  # templates strip texts
    # answer_text.strip() is empty for "tool_calls" that the template drops: it would teach silence
    if not (is_continued and is_kept and has_texts and answer_text.strip()):
        raise ValueError(
            f"the chat template changes the answer {' '.join(content_texts)[:40]!r}, or no token "
            f"ends where sampling would begin it, after {prompt_text[-40:]!r}; "
            'leave it out of the loss by "weight": 0'
        )
    # with the token that ends the answer, such as <|im_end|>
    return slice(answer_start, dialog_ids.index(tokenizer.turn_end, answer_start) + 1)
