import json

import numpy as np
import pytest

from data.tokenizer import ByteTokenizer
from finetuning.chat import (
    CHAT_TEMPLATE,
    Example,
    encode_completion,
    encode_messages,
    encode_prompt,
    fit_history,
)
from finetuning.examples import ChatData, collate, pack
from finetuning.rows import Row, read_rows
from utils.errors import UserError

BYTES = ByteTokenizer()
ASKED = [{"role": "user", "content": "2+3?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "5"}]


def text(tokens: list[int]) -> str:
    return "".join("|" if t == BYTES.eot else chr(t) for t in tokens)


def masked(example: Example) -> str:
    """The text of an example with ~ for what does not count in the loss."""
    return text(np.where(example.loss_mask, example.tokens, ord("~")))


def test_of_a_dialog_the_assistants_turns_count_in_the_loss():
    example = encode_messages([*ANSWERED, *ANSWERED], BYTES)
    assert text(example.tokens) == "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant: 5|"
    assert masked(example) == "~" * 22 + " 5|" + "~" * 21 + " 5|"


def test_prompt_and_completion_are_the_dialog_of_both_or_plain_text():
    dialog = encode_messages(ANSWERED, BYTES)
    for prompt in ("2+3?", ASKED):
        example = encode_completion(prompt, "5", BYTES, chat=True)
        assert (text(example.tokens), masked(example)) == (text(dialog.tokens), masked(dialog))
    assert text(encode_prompt("2+3?", BYTES, chat=True)) == "|User: 2+3?|Assistant:"
    plain = encode_completion("2+3=", "5", BYTES, chat=False)
    assert (text(plain.tokens), masked(plain)) == ("|2+3=5|", "~~~~~5|")


def test_old_turns_make_room_for_the_answer():
    """A question goes with its answer, and what the system said stays."""
    history = [*ANSWERED] * 4 + ASKED
    assert text(fit_history(history, BYTES, 1000, 10)).count("User") == 5
    short = text(fit_history(history, BYTES, 64, 10))
    assert short == "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant:"
    system = [{"role": "system", "content": "Add."}]
    short = text(fit_history(system + history, BYTES, 80, 10))
    assert short == "|System: Add.|User: 2+3?|Assistant: 5|User: 2+3?|Assistant:"
    assert text(fit_history(history, BYTES, 16, 10)) == "|User: 2+3?|Assistant:"


@pytest.mark.parametrize("seed", range(5))
def test_packs_hold_each_example_once_and_waste_little(seed):
    lengths = np.random.default_rng(seed).integers(1, 33, 500).tolist()
    packs = pack(lengths, 64)
    assert sorted(i for group in packs for i in group) == list(range(500))
    assert all(sum(lengths[i] for i in group) <= 64 for group in packs)
    assert len(packs) <= 1.03 * np.ceil(sum(lengths) / 64)


@pytest.mark.parametrize(
    "line, fields, problem",
    [
        ("{", ("prompt",), "is not JSON"),
        ("[1]", ("prompt",), "expected a JSON object"),
        ('{"text": "a"}', ("prompt", "answer"), 'no "prompt"'),
        ('{"prompt": "a"}', ("prompt", "answer"), 'no "answer"'),
        ('{"prompt": 3, "answer": "a"}', ("prompt", "answer"), '"prompt" must be a text, not int'),
        ('{"prompt": [], "answer": "a"}', ("prompt", "answer"), "must be a list of messages"),
        ('{"prompt": "a", "answer": null}', ("prompt", "answer"), "not NoneType"),
        ('{"prompt": "\\ud800", "answer": "a"}', ("prompt", "answer"), "lone surrogate"),
        ('{"messages": "a"}', ("messages", "prompt", "completion"), "must be a list of messages"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', ("messages",), "none of system"),
        ('{"messages": [{"role": "user", "content": "a"}]}', ("messages",), "no turn of the role"),
        ('{"completion": "a"}', ("messages", "prompt", "completion"), 'no "prompt"'),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(tmp_path, line, fields, problem):
    good = {"prompt": "a", "answer": 3, "completion": "b", "messages": ANSWERED}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(UserError, match=f"rows.jsonl, line 3.*{problem}"):
        read_rows(path, fields)


def test_files_without_rows_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, problem in (
        ("empty", "holds no rows"),
        ("none", "cannot be read"),
        ("binary", "UTF-8"),
    ):
        with pytest.raises(UserError, match=problem):
            read_rows(tmp_path / f"{name}.jsonl", ("prompt",))


def test_a_long_example_is_cut_and_a_long_prompt_refused():
    rows = [Row({"prompt": "ab", "completion": "c" * 30}, "rows.jsonl, line 1")]
    data = ChatData(rows, BYTES, False, 16)
    (example,) = data.dialogs()
    assert len(example.tokens) == 16 and data.num_cut == 1
    rows[0]["prompt"] = "a" * 40
    with pytest.raises(UserError, match="rows.jsonl, line 1: the prompt has 41 tokens"):
        data.dialogs()
    with pytest.raises(UserError, match="line 1: a prompt of 41 tokens with --max_new_tokens 5"):
        data.prompts(5)


def test_the_chat_template_gives_the_same_tokens():
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(CHAT_TEMPLATE)
    written = template.render(messages=ANSWERED, eos_token="|")
    assert written == text(encode_messages(ANSWERED, BYTES).tokens)
    opened = template.render(messages=ASKED, eos_token="|", add_generation_prompt=True)
    assert opened == text(encode_prompt(ASKED, BYTES, chat=True))


def test_targets_are_the_tokens_after_and_padding_has_none():
    examples = [
        Example.join([(np.array([5]), False), (np.array([6, 7]), True)]),
        Example.join([(np.array([5]), False)]),
    ]
    batch = collate(examples, 64)
    assert batch["idx"].shape == (2, 8) and batch["last"].tolist() == [2, 0]
    assert batch["targets"].tolist() == [[6, 7, *[-1] * 6], [-1] * 8]
    assert collate([Example.join([(np.full(11, 5), True)])], 11)["idx"].shape == (1, 11)


def test_messages_are_no_plain_text():
    for fields in ({"messages": ANSWERED}, {"prompt": ASKED}):
        with pytest.raises(UserError, match="line 7: messages are of a chat"):
            ChatData([Row(fields, "rows.jsonl, line 7")], BYTES, False, 64)
