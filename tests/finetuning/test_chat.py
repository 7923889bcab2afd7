"""Dialogs and completions as token ids, rows of files, and what ends a text of a chat."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers, pre_tokenizers

from data.export_tokenizer import byte_level, save_tokenizer, to_engine
from data.file_tokenizer import SPACE, byte_characters, pretrained_tokenizer
from data.tokenizer import ByteTokenizer, load_tokenizer
from finetuning.chat import Segment, encode_prompt, fit_history, is_chat
from finetuning.completions import decode_completion
from finetuning.examples import (
    Example,
    TextEncoder,
    collate_padded,
    encode_completion,
    encode_messages,
    read_jsonl,
)
from model.config import GPTConfig
from model.gpt import GPT
from model.huggingface import save_pretrained
from utils.distributed import Process
from utils.errors import UserError

BYTES = ByteTokenizer()
QUESTION = [{"role": "user", "content": "2+3?"}]
DIALOG = [*QUESTION, {"role": "assistant", "content": "5"}]


def text(tokens) -> str:
    return "".join("|" if token == BYTES.eot else chr(token) for token in tokens)


CHAT, PLAIN = TextEncoder(BYTES, True, 64), TextEncoder(BYTES, False, 16)
ONE, TWO = "|User: 2+3?|Assistant: 5|", "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant: 5|"


@pytest.mark.parametrize(
    "encoder, row, whole, learned",
    [
        (CHAT, {"messages": [*DIALOG, *DIALOG]}, TWO, " 5| 5|"),
        (CHAT, {"prompt": [*DIALOG, *QUESTION]}, TWO, " 5|"),
        (CHAT, {"prompt": QUESTION}, ONE, " 5|"),
        (CHAT, {"prompt": "2+3?"}, ONE, " 5|"),
        (PLAIN, {"prompt": "2+3="}, "|2+3=5|", "5|"),
        (PLAIN, {"prompt": "2+3=", "completion": "5" * 20}, "|2+3=" + "5" * 11, "5" * 11),
    ],
)
def test_turns_of_the_assistant_or_the_completion_alone_are_learned(encoder, row, whole, learned):
    encoder = replace(encoder, num_cut=0)
    example = encoder.dialog({"completion": "5"} | row)
    assert text(example.tokens) == whole
    assert text(example.tokens[example.loss_mask]) == learned
    assert encoder.num_cut == (len(whole) == 16)  # the context of PLAIN


def test_old_turns_make_room_for_the_answer():
    """A question goes with its answer."""
    history = [*DIALOG] * 4 + QUESTION

    def fit(messages, block_size: int) -> str:
        return text(fit_history(messages, BYTES, block_size, 10))

    assert fit(history, 1000).count("User") == 5
    assert fit(history, 64) == "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant:"
    assert fit(history, 16) == "|User: 2+3?|Assistant:"


def ask(row: dict) -> object:
    return CHAT.question(row, 5, has_answer=True)


@pytest.mark.parametrize(
    "line, encode, problem",
    [
        ("{", ask, "Expecting property name"),
        ("[1]", ask, "has no attribute 'get'"),
        ('{"text": "a"}', CHAT.dialog, 'no "prompt" of type str or list, but fields text'),
        ('{"prompt": "a"}', ask, 'no "answer"'),
        ('{"prompt": "a", "answer": null}', ask, 'no "answer" of type str or int'),
        ('{"prompt": "\\ud800", "answer": "a"}', ask, "surrogates not allowed"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', CHAT.dialog, "bot is none of"),
        ('{"messages": [{"role": "user", "content": "a"}]}', CHAT.dialog, "have no answer"),
        ('{"prompt": [{"role": "user"}]}', PLAIN.dialog, 'no "prompt" of type str'),
        (f'{{"prompt": "{"a" * 40}", "completion": "b"}}', PLAIN.dialog, "first 16 tokens"),
        (f'{{"prompt": "{"a" * 60}", "answer": 1}}', ask, "a prompt of 78 tokens and --max_new"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, line, encode, problem):
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "answer": 3, "completion": "b"}
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(UserError, match=f"rows.jsonl, line 3: .*{problem}"):
        read_jsonl(path, encode)


def test_a_file_without_rows_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with pytest.raises(UserError, match="rows.jsonl holds no rows"):
        read_jsonl(path, dict)


def test_a_model_of_others_keeps_its_chat_template(tmp_path):
    tokenizer = folder_with_tokenizer(tmp_path, byte_level_engine(), CHATML)
    spec = pretrained_tokenizer(tmp_path, 257)
    whole = encode_completion("2+2?", "4", tokenizer, chat=True)
    written = tokenizer.engine.decode(whole.tokens.tolist(), skip_special_tokens=False)
    assert written == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    assert is_chat({}, "", spec) and not is_chat({}, "", "gpt2")
    odd = folder_with_tokenizer(tmp_path, byte_level_engine(), CHATML.replace("t\n{%", "t \n{%"))
    with pytest.raises(ValueError, match="opens an answer"):
        encode_completion("2+2?", "4", odd, chat=True)


def folder_with_tokenizer(folder, engine, template, **config):
    """Write the files that a Hugging Face folder has of a tokenizer."""
    engine.save(str(folder / "tokenizer.json"))
    values = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps(config))
    return load_tokenizer(pretrained_tokenizer(folder, 257))


def byte_level_engine(*merges):
    """Byte-level BPE with the given merges and the special tokens of chats."""
    vocab = {character: i for i, character in enumerate(byte_characters())}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    engine = byte_level(models.BPE(vocab, list(merges)))
    engine.add_special_tokens(["<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return engine


def marking_engine(normalizer=None, pre_tokenizer=None):
    """BPE with a mark for a space, before each text, too, and merges of it and of ":" with "4"."""
    vocab = {SPACE: 0} | {c: i for i, c in enumerate("asitnuer:4?\n U2+ol<>|/", 1)}
    merges = [(SPACE, "4"), (":", "4")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    engine = Engine(models.BPE(vocab, merges))
    engine.normalizer, engine.pre_tokenizer = normalizer, pre_tokenizer
    engine.add_special_tokens(["<|endoftext|>", "<s>", "</s>"])
    return engine


COLON = (  # a template of plain text, which ends in ":"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (  # with a space before the end
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + 'user:' + m.content }}"
    "{% else %}{{ m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [COLON, CHATML, LLAMA2, None], ids=str)
@pytest.mark.parametrize(
    "engine",
    [
        lambda: byte_level_engine((":", "4"), ("?", "4")),
        # as of Llama 2: a mark before a text and in the place of spaces
        lambda: marking_engine(
            normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        ),
        lambda: marking_engine(None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    ],
    ids=["byte level", "Llama 2", "always"],
)
def test_no_token_spans_a_prompt_and_its_answer(tmp_path, engine, template):
    """What is sampled follows the ids of training, whatever merges the tokenizer has."""
    tokenizer = folder_with_tokenizer(tmp_path, engine(), template)
    for prompt, chat in (([*DIALOG, *QUESTION], True), ("2+3:", False)):
        prompt_ids = encode_prompt(prompt, tokenizer, chat)
        whole = encode_completion(prompt, "44", tokenizer, chat)
        answer = whole.tokens[len(prompt_ids) :].tolist()
        assert answer[-1] in tokenizer.end_ids
        assert decode_completion(answer[:-1], TextEncoder(tokenizer, chat, 64)).rstrip(" ") == "44"
    tokens = encode_messages([*DIALOG, *DIALOG], tokenizer).tokens.tolist()
    prompt_ids = encode_prompt([*DIALOG, *QUESTION], tokenizer, chat=True)
    assert tokens[: len(prompt_ids)] == prompt_ids


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (LLAMA2, "</s>"),
        ("{% for m in messages %}{{ m.content + bos_token }}{% endfor %}", "<s>"),
        (COLON, "<|endoftext|>"),  # without a token of its own
        ("{{ raise_exception('no') }}", "<|endoftext|>"),
    ],
)
def test_what_ends_an_answer_is_learned_from_the_template_and_kept(tmp_path, template, end):
    tokenizer = folder_with_tokenizer(tmp_path, byte_level_engine(), template, eos_token_id=256)
    vocab = tokenizer.engine.get_vocab()
    assert tokenizer.eot == 256 and tokenizer.end_ids == {256, vocab[end]}
    if "raise" not in template:
        example = encode_messages(DIALOG, tokenizer)
        assert example.tokens[example.loss_mask].tolist()[-1] == vocab[end]


def test_every_eos_of_a_folder_ends_a_text(tmp_path):
    """Also of a tokenizer that this project has under a name; the separator is the first."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 13]}')
    tokenizer = folder_with_tokenizer(tmp_path, to_engine(BYTES), None, eos_token_id=[256, 10])
    save_pretrained(GPT(GPTConfig(8, 257, 1, 1, 8)), tmp_path, tokenizer.eot, tokenizer.end_ids)
    save_tokenizer(tokenizer, tmp_path, 8)
    exported = load_tokenizer(pretrained_tokenizer(tmp_path, 257))
    for x in (tokenizer, exported):
        assert (x.eot, x.end_ids, x.name) == (256, {256, 10, 13}, "bytes")


@pytest.mark.parametrize(
    "length, block_size, compiled, T",
    [(3, 64, False, 8), (3, 5, False, 5), (17, 64, False, 24), (17, 64, True, 32)],
)
def test_targets_are_the_tokens_after_and_padding_has_none(length, block_size, compiled, T):
    """With few shapes for the compiler."""
    text = Example.join([Segment([5], False), Segment([6] * (length - 1), True)])
    batch = collate_padded([text], block_size, Process(0, 1, torch.device("cpu")), compiled)
    padding = T - length
    assert batch.idx.tolist() == [[5] + [6] * (length - 1) + [0] * padding]
    assert batch.targets.tolist() == [[6] * (length - 1) + [-1] * (padding + 1)]
    assert batch.last.tolist() == [length - 1]
