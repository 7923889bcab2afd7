"""Dialogs and completions as token ids, rows of files, and what ends a text of a chat."""

import json
import string
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
from conftest import user_error
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.export_tokenizer import make_byte_level_backend, save_tokenizer, to_backend
from data.named_tokenizer import ByteTokenizer
from data.tokenizer import SPACE, byte_characters, load_tokenizer, pretrained_tokenizer_spec
from finetuning.chat import encode_prompt, fit_history, is_chat, note_name_as_text
from finetuning.completions import decode_completion
from finetuning.examples import (
    Example,
    TextEncoder,
    collate_padded,
    encode_completion,
    encode_messages,
    read_examples,
)
from model.config import GPTConfig
from model.formats.huggingface import save_pretrained
from model.gpt import GPT
from utils.distributed import ALONE
from utils.errors import UserError

BYTES = ByteTokenizer()
QUESTION = [{"role": "user", "content": "2+3?"}]
DIALOG = [*QUESTION, {"role": "assistant", "content": "5"}]


def text(tokens):
    return "".join("|" if token == BYTES.eot else chr(token) for token in tokens)


CHAT, PLAIN = TextEncoder(BYTES, True, 64), TextEncoder(BYTES, False, 16)
ONE, TWO = "|User: 2+3?|Assistant: 5|", "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant: 5|"


@pytest.mark.parametrize(
    "encoder, row, whole, learned",
    [
        (CHAT, {"messages": [*DIALOG, *DIALOG]}, TWO, " 5| 5|"),
        (CHAT, {"messages": [QUESTION[0], DIALOG[1] | {"weight": 0}, *DIALOG]}, TWO, " 5|"),
        (CHAT, {"prompt": [*DIALOG, *QUESTION]}, TWO, " 5|"),
        (CHAT, {"prompt": QUESTION}, ONE, " 5|"),
        (CHAT, {"prompt": "2+3?"}, ONE, " 5|"),
        (CHAT, {"instruction": "2+3?", "input": "", "output": "5"}, ONE, " 5|"),
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

    def fit(messages, block_size):
        return text(fit_history(messages, BYTES, block_size, 10))

    assert fit(history, 1000).count("User") == 5
    assert fit(history, 64) == "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant:"
    assert fit(history, 16) == "|User: 2+3?|Assistant:"


def ask(row):
    return CHAT.question(row, 5, has_answer=True)


@pytest.mark.parametrize(
    "line, to_example, problem",
    [
        ("{", ask, "Expecting property name"),
        ("[1]", ask, "must be a JSON object"),
        ("plain text", ask, "must be a JSON object; train.py takes plain text"),
        ('{"text": "a"}', CHAT.dialog, 'no "prompt" of type str or list, but fields text'),
        ('{"prompt": "a", "answer": null}', ask, 'no "answer" of type str or int'),
        ('{"prompt": "\\ud800", "answer": "a"}', ask, "is not UTF-8 text"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', CHAT.dialog, "no such role or field"),
        (
            '{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}',
            CHAT.dialog,
            "a weight besides 0 and 1",
        ),
        ('{"prompt": "a", "completion": "b", "tools": [1]}', PLAIN.dialog, '"tools" is not supp'),
        ('{"messages": [{"role": "user", "content": "a"}]}', CHAT.dialog, "row has no answer in"),
        (f'{{"prompt": "{"a" * 40}", "completion": "b"}}', PLAIN.dialog, "first 16 tokens"),
        (
            f'{{"prompt": "{"a" * 60}", "answer": 1}}',
            ask,
            "a prompt of 78 tokens and an answer of 5",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, line, to_example, problem):
    path = tmp_path / "rows.jsonl"
    good = {"prompt": "a", "answer": 3, "completion": "b"}
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with user_error(f"rows.jsonl, line 3: .*{problem}"):
        read_examples(path, to_example)


def test_a_file_without_rows_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n")
    with user_error("rows.jsonl holds no rows"):
        read_examples(path, dict)


def folder_with_tokenizer(folder, backend, template, **config):
    """Write the files that a Hugging Face folder has of a tokenizer."""
    backend.save(str(folder / "tokenizer.json"))
    options = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    options["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **config}))
    return load_tokenizer(pretrained_tokenizer_spec(folder, backend.get_vocab_size()))


SPECIAL_TOKENS = ["<|endoftext|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def merging(characters, *merges):
    """BPE of characters and merges of them."""
    vocab = {character: i for i, character in enumerate(characters)}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    return models.BPE(vocab, list(merges))


def byte_level_backend(*merges):
    backend = make_byte_level_backend(merging(byte_characters(), *merges))
    backend.add_special_tokens(SPECIAL_TOKENS)
    return backend


def other_backend(model, pre_tokenizer, normalizer=None):
    backend = Backend(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.add_special_tokens(SPECIAL_TOKENS)
    return backend


# with a mark for a space, before a text, too, and merges of it and of ":" with "4"
MARKING = merging(SPACE + string.printable, (SPACE, "4"), (":", "4"))
PREPEND = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
WORDS = models.WordLevel({"?": 0, " ": 1, "a": 2, "4": 3}, unk_token="?")
BACKENDS = {
    "byte level": byte_level_backend((":", "4"), ("?", "4"), ("\u010a", "\u010a")),
    "Llama 2": other_backend(MARKING, None, PREPEND),
    "always": other_backend(MARKING, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "first": other_backend(MARKING, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "words": other_backend(WORDS, pre_tokenizers.Split(" ", "isolated")),
}
# with what published templates of these names use, briefly
TEMPLATES = {path.stem: path.read_text() for path in Path(__file__).parent.glob("templates/*")}
CHATML = TEMPLATES["chatml"]
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
ENTRIES = [{"type": "text", "text": "4"}, {"type": "text", "text": "5"}]
SNIPPETS = st.sampled_from([*'a4: \n"<', "<|im_end|>", "</think>"])


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_dialogs_have_the_text_and_ids_of_transformers_or_are_refused(tmp_path, backend, template):
    """What is learned is what sampling has to write after the same ids."""
    ours = folder_with_tokenizer(tmp_path, backend, template)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, bos_token="<s>", eos_token="</s>"
    )

    @settings(max_examples=15, deadline=None, derandomize=True)
    @given(st.sampled_from(["ua", "uaua", "suaua", "utasa"]), st.lists(SNIPPETS, min_size=9))
    def check(roles, snippets):
        messages = []
        for i, role in enumerate(roles):
            content = "".join(snippets[i :: len(roles)])
            messages.append({"role": ROLES[role], "content": content, "name": None})
        try:
            whole = theirs.apply_chat_template(messages, tokenize=False)
        except jinja2.TemplateError as error:
            with user_error(str(error)):
                ours.render(messages)
            return
        for message in messages:
            content = message["content"].strip()
            shown = content in whole or json.dumps(content, ensure_ascii=False)[1:-1] in whole
            if message["role"] != "assistant" and not shown:
                with user_error("it leaves out"):
                    ours.render(messages)
                return
        assert ours.render([message | {"weight": 1} for message in messages]) == whole
        ids = theirs.apply_chat_template(messages)["input_ids"]
        assert ours.encode_with_special_tokens(whole) == ids
        opened = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert encode_prompt(messages, ours, chat=True) == opened
        try:
            example = encode_messages(messages, ours)
        except (ValueError, UserError):
            return
        assert example.tokens.tolist() == ids
        learned = set()
        for i, role in enumerate(roles):
            if role == "a":
                prompt_ids = encode_prompt(messages[:i], ours, chat=True)
                assert ids[: len(prompt_ids)] == prompt_ids
                answer = theirs.apply_chat_template(messages[: i + 1])["input_ids"]
                end = len(answer) - answer[::-1].index(ours.turn_end)
                learned.update(range(len(prompt_ids), end))
        assert set(example.loss_mask.nonzero()[0]) == learned

    check()


@pytest.mark.parametrize(
    "template, roles, answer, problem",
    [
        ("chatml", "uaua", {}, None),
        ("chatml", "a", {}, "begins with an answer"),
        ("chatml", "ua", {"content": "\n\n4"}, "no token ends where"),
        ("chatml", "ua", {"content": "", "tool_calls": [1]}, 'leaves out "tool_calls"'),
        ("chatml", "ua", {"content": ENTRIES}, "can only concatenate str"),
        ("chatml", "ua", {"content": None}, 'no "content" of type'),
        ("colon", "ua", {}, "no special token"),
        ("qwen3", "uaua", {}, "changes the answer '4'"),
        ("qwen3", "uaua", {"weight": 0}, None),
        ("qwen3", "ua", {"content": "a</think>4"}, "changes the answer"),
        ("qwen3", "ua", {"reasoning_content": "a", "tool_calls": None}, None),
        ("mistral", "uua", {}, "roles must alternate"),
    ],
)
def test_an_answer_is_learned_whole_or_refused(tmp_path, template, roles, answer, problem):
    """`answer` has the fields of the first one."""
    tokenizer = folder_with_tokenizer(tmp_path, BACKENDS["byte level"], TEMPLATES[template])
    encoder = TextEncoder(tokenizer, True, 999)
    messages = [{"role": ROLES[role], "content": "4"} for role in roles]
    messages[roles.index("a")] |= answer
    if problem:
        with pytest.raises((ValueError, UserError), match=problem):
            encoder.dialog({"messages": messages})
    else:
        example = encoder.dialog({"messages": messages})
        learned = tokenizer.backend.decode(example.tokens[example.loss_mask], False)
        assert encode_completion("4", "4", tokenizer, True).tokens[-1] == tokenizer.turn_end
        assert learned.count("4<|im_end|>") == roles.count("a") - ("weight" in answer)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_no_token_spans_a_prompt_and_its_answer(tmp_path, backend):
    """In the project's own format and in plain text, whatever merges the tokenizer has."""
    tokenizer = folder_with_tokenizer(tmp_path, backend, None)
    for prompt, chat in (([*DIALOG, *QUESTION], True), ("2+3:", False)):
        prompt_ids = encode_prompt(prompt, tokenizer, chat)
        tokens = encode_completion(prompt, "44", tokenizer, chat).tokens.tolist()
        assert tokens[: len(prompt_ids)] == prompt_ids
        *answer, end = tokens[len(prompt_ids) :]
        assert end in tokenizer.end_ids
        if backend is not BACKENDS["words"]:
            assert decode_completion(answer, tokenizer, chat) == "44"


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_names_of_added_tokens_are_tokens_in_prompts_and_text_in_documents(
    tmp_path, backend, caplog
):
    """As in transformers; the name of end of text stays text in both, and one line says so."""
    note_name_as_text.cache_clear()
    tokenizer = folder_with_tokenizer(tmp_path, backend, None)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    start, end = (backend.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    for prompt in ("<|im_start|>a<|im_end|>4", "4 <s> a<|im_end|>", "a", " <|im_end|>"):
        ids = encode_prompt(prompt, tokenizer, chat=False)
        assert ids[len(tokenizer.start_ids) :] == theirs.encode(prompt, add_special_tokens=False)
        assert not {start, end} & set(tokenizer.encode(prompt))
    example = encode_completion("a<|im_start|>", "4<|im_end|>", tokenizer, False)
    assert {start, end} < set(example.tokens) and end in example.tokens[example.loss_mask]
    dialog = encode_messages([{"role": "user", "content": "<|im_start|>"}], tokenizer)
    assert start in dialog.tokens and not caplog.records
    ids = encode_prompt("4</s>", tokenizer, chat=False)
    assert tokenizer.eot not in ids[len(tokenizer.start_ids) :]
    assert encode_prompt("</s>4", tokenizer, chat=False) and len(caplog.records) == 1
    assert "</s> within a text is read as text" in caplog.text


def test_an_answer_of_a_chat_shows_no_special_tokens(tmp_path):
    tokenizer = folder_with_tokenizer(tmp_path, byte_level_backend(), CHATML)
    ids = encode_prompt("<|im_start|>a<s>4", tokenizer, chat=False)
    assert decode_completion(ids, tokenizer, chat=True) == "a4"
    assert decode_completion(ids, tokenizer, chat=False) == "<|im_start|>a<s>4"


def test_a_token_without_a_row_of_the_embedding_is_named(tmp_path, caplog):
    backend = byte_level_backend()
    folder_with_tokenizer(tmp_path, backend, None)
    tokenizer = load_tokenizer(pretrained_tokenizer_spec(tmp_path, backend.get_vocab_size() - 2))
    assert "no row of its embedding for <|im_start|>, <|im_end|>: read as text" in caplog.text
    assert max(encode_prompt("<|im_start|>a<s>", tokenizer, chat=False)) < tokenizer.vocab_size


@pytest.mark.parametrize(
    "template, end",
    [
        ("chatml", "<|im_end|>"),
        ("system", "<|im_end|>"),
        ("llama2", "</s>"),
        ("colon", "</s>"),  # without a token of its own
    ],
)
def test_what_ends_an_answer_is_read_off_the_template(tmp_path, template, end):
    backend = byte_level_backend()
    tokenizer = folder_with_tokenizer(tmp_path, backend, TEMPLATES[template], eos_token_id=256)
    assert tokenizer.end_of_text == "</s>"
    assert tokenizer.end_ids == {256, tokenizer.eot, backend.token_to_id(end)}
    assert len(tokenizer.encode(end)) == len(end)  # in a document it is text
    assert is_chat({}, pretrained_tokenizer_spec(tmp_path, 261)) and not is_chat({}, "gpt2")


@pytest.mark.parametrize(
    "template, problem",
    [("{{ raise_exception('no') }}", "no"), ("{% if %}", "Expected an expression")],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path, template, problem):
    with user_error(f"tokenizer that can be used: the chat template of .* fails: {problem}"):
        folder_with_tokenizer(tmp_path, byte_level_backend(), template)


def test_every_eos_of_a_folder_ends_a_text(tmp_path):
    """Also of a tokenizer that this project has under a name; the separator is the first."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 13]}')
    tokenizer = folder_with_tokenizer(tmp_path, to_backend(BYTES), None, eos_token_id=[256, 10])
    save_pretrained(GPT(GPTConfig(8, 257, 1, 1, 8)), tmp_path, tokenizer.eot, tokenizer.end_ids)
    save_tokenizer(tokenizer, tmp_path, 8)
    exported = load_tokenizer(pretrained_tokenizer_spec(tmp_path, 257))
    for x in (tokenizer, exported):
        assert (x.eot, x.end_ids, x.name) == (256, {256, 10, 13}, "bytes")


@pytest.mark.parametrize("left, merges", [("a", ["a b"]), (" ", [[" ", "b"]])])
def test_an_export_states_what_versions_of_transformers_take_for_granted(tmp_path, left, merges):
    """Merges as texts, which 4.44 reads, unless a token has a space; and no change of spaces."""
    backend = other_backend(merging("ab. ", (left, "b")), None)
    tokenizer = folder_with_tokenizer(tmp_path, backend, None)
    save_tokenizer(tokenizer, tmp_path, 8)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert content["model"]["merges"] == merges
    assert config["clean_up_tokenization_spaces"] is False
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode("a b . ab") == tokenizer.encode("a b . ab").tolist()


@pytest.mark.parametrize(
    "length, block_size, compiled, T",
    [(3, 64, False, 8), (3, 5, False, 5), (17, 64, False, 24), (17, 64, True, 32)],
)
def test_batches_have_few_shapes_for_the_compiler(length, block_size, compiled, T):
    text = Example.of_completion([5], [6] * (length - 1))
    batch = collate_padded([text], block_size, ALONE, compiled)
    assert batch.idx.shape == batch.targets.shape == (1, T)
    assert batch.last_columns.tolist() == [length - 1]


FIELDS = """{%- for tool in tools or [] %}{{ tool.name }}{{ tool | tojson }}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{%- if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}
{%- if m.content is string %}{{ m.content }}{% else %}
{%- for entry in m.content or [] %}{{ entry.text }}|{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""
TOOLS = [{"name": "add", "parameters": {"type": "object"}}]


CALL = {"role": "assistant", "content": None, "reasoning": "a", "tool_calls": TOOLS}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "developer", "content": ENTRIES}, *DIALOG], "tools": TOOLS},
        {"messages": [*QUESTION, CALL]},
    ],
)
def test_a_template_sees_every_field_that_transformers_lets_it_see(tmp_path, row):
    tokenizer = folder_with_tokenizer(tmp_path, BACKENDS["byte level"], FIELDS)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    example = TextEncoder(tokenizer, True, 999).dialog(row)
    ids = theirs.apply_chat_template(row["messages"], tools=row.get("tools"))["input_ids"]
    assert example.tokens.tolist() == ids and example.loss_mask[-1]
    prompt = {"prompt": row["messages"][:-1], "tools": row.get("tools")}
    question = TextEncoder(tokenizer, True, 999).question(prompt, 1, has_answer=False)
    assert question.prompt_ids == ids[: len(question.prompt_ids)]
    with pytest.raises(ValueError, match='"tools" is not supported|no "content" of type'):
        CHAT.dialog({"tools": [1], **row})
    tokenizer = folder_with_tokenizer(tmp_path, BACKENDS["byte level"], CHATML)
    with user_error("it writes no tools"):
        TextEncoder(tokenizer, True, 999).dialog({"messages": DIALOG, "tools": TOOLS})
