import json

import numpy as np
import pytest
import torch

from data.chat import (
    CHAT_TEMPLATE,
    Example,
    encode_completion,
    encode_messages,
    encode_prompt,
    fit_history,
)
from data.chat_examples import ChatData, collate, collate_packed, pack
from data.chat_rows import LINE, read_rows
from data.shards import DataError
from data.tokenizer import ByteTokenizer
from model.config import GPTConfig
from model.gpt import GPT

BYTES = ByteTokenizer()
ASKED = [{"role": "user", "content": "2+3?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "5"}]


def text(tokens: list[int]) -> str:
    return "".join("|" if t == BYTES.eot else chr(t) for t in tokens)


def test_a_dialog_is_plain_text_of_which_the_assistant_is_learned():
    example = encode_messages([*ANSWERED, *ANSWERED], BYTES)
    assert text(example.tokens) == "|User: 2+3?|Assistant: 5|User: 2+3?|Assistant: 5|"
    learned = [
        t for t, is_learned in zip(example.tokens, example.learned, strict=True) if is_learned
    ]
    assert text(learned) == " 5| 5|"


def test_prompt_and_completion_are_the_dialog_of_both_or_plain_text():
    assert encode_completion("2+3?", "5", BYTES, chat=True) == encode_messages(ANSWERED, BYTES)
    assert encode_completion(ASKED, "5", BYTES, chat=True) == encode_messages(ANSWERED, BYTES)
    assert text(encode_prompt("2+3?", BYTES, chat=True)) == "|User: 2+3?|Assistant:"
    plain = encode_completion("2+3=", "5", BYTES, chat=False)
    assert text(plain.tokens) == "|2+3=5|" and plain.learned == [False] * 5 + [True] * 2


def test_old_turns_make_room_for_the_answer():
    history = [*ANSWERED] * 4 + ASKED
    assert text(fit_history(history, BYTES, 1000, 10)).count("User") == 5
    short = text(fit_history(history, BYTES, 64, 10))
    assert len(short) <= 54 and short.endswith("|User: 2+3?|Assistant:")


@pytest.mark.parametrize("seed", range(5))
def test_packs_hold_each_example_once_and_waste_little(seed):
    lengths = np.random.default_rng(seed).integers(1, 33, 500).tolist()
    packs = pack(lengths, 64)
    assert sorted(i for group in packs for i in group) == list(range(500))
    assert all(sum(lengths[i] for i in group) <= 64 for group in packs)
    assert len(packs) <= 1.03 * np.ceil(sum(lengths) / 64)


@pytest.mark.parametrize("ngrams, position", [(1, "learned"), (3, "rotary")])
def test_packed_examples_do_not_see_each_other(ngrams, position):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "position": position, "ngrams": ngrams}
    shape |= {"conv": 3, "window": 4} if ngrams > 1 else {}
    model = GPT(GPTConfig(block_size=64, vocab_size=257, **shape)).eval()
    if ngrams > 1:
        torch.nn.init.normal_(model.transformer.ngrams.weight, std=0.1)
        for block in model.transformer.h:
            torch.nn.init.normal_(block.conv_1.weight, std=0.3)
    examples = [encode_completion("a" * n, "b" * n, BYTES, chat=False) for n in (3, 9, 5)]
    packed = {k: torch.from_numpy(x) for k, x in collate_packed([examples], 64).items()}
    losses = model(**packed, reduction="none").flatten()
    apart = []
    for example in examples:
        one = {k: torch.from_numpy(x) for k, x in collate([example], 64).items()}
        found = model(one["idx"], one["targets"], reduction="none")[0, : len(example.tokens) - 1]
        apart.append(found)
    apart = torch.cat(apart)
    torch.testing.assert_close(losses[: len(apart)], apart)
    assert losses[len(apart) :].eq(0).all()
    # the mean that is trained on is over what is learned
    learned = (packed["targets"] >= 0).sum()
    torch.testing.assert_close(model(**packed), apart.sum() / learned)


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
    with pytest.raises(DataError, match=f"rows.jsonl, line 3.*{problem}"):
        read_rows(path, fields)


def test_files_without_rows_are_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for name, problem in (
        ("empty", "holds no rows"),
        ("none", "cannot be read"),
        ("binary", "UTF-8"),
    ):
        with pytest.raises(DataError, match=problem):
            read_rows(tmp_path / f"{name}.jsonl", ("prompt",))


def test_a_long_example_is_cut_and_a_long_prompt_refused(tmp_path):
    rows = [{"prompt": "ab", "completion": "c" * 30, LINE: 1}]
    data = ChatData(rows, tmp_path / "rows.jsonl", BYTES, False, 16)
    (example,) = data.dialogs()
    assert len(example.tokens) == 16 and data.num_cut == 1
    rows[0]["prompt"] = "a" * 40
    with pytest.raises(DataError, match="rows.jsonl, line 1: the prompt has 41 tokens"):
        data.dialogs()
    with pytest.raises(DataError, match="line 1: a prompt of 41 tokens with --max_new_tokens 5"):
        data.prompts(5)


def test_the_chat_template_gives_the_same_tokens():
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(CHAT_TEMPLATE)
    written = template.render(messages=ANSWERED, eos_token="|")
    assert written == text(encode_messages(ANSWERED, BYTES).tokens)
    opened = template.render(messages=ASKED, eos_token="|", add_generation_prompt=True)
    assert opened == text(encode_prompt(ASKED, BYTES, chat=True))


def test_targets_are_the_tokens_after_and_padding_has_none():
    batch = collate([Example([5, 6, 7], [False, True, True]), Example([5], [False])], 64)
    assert batch["idx"].shape == (2, 8) and batch["last"].tolist() == [2, 0]
    assert batch["targets"].tolist() == [[6, 7, *[-1] * 6], [-1] * 8]
    assert collate([Example([5] * 11, [True] * 11)], 11)["idx"].shape == (1, 11)


def test_messages_are_no_plain_text(tmp_path):
    rows = [{"messages": ANSWERED, LINE: 7}, {"prompt": ASKED, LINE: 7}]
    for row in rows:
        with pytest.raises(DataError, match="line 7: messages are of a chat"):
            ChatData([row], tmp_path / "rows.jsonl", BYTES, False, 64)
