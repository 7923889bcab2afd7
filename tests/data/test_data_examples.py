"""Examples with numbers that stand in docstrings and comments of data/."""

import numpy as np

from data.loader import assign_places
from data.sharder import Document, TokenFile, hold_out
from data.source import number_pieces
from data.tokenizer import load_tokenizer


def test_examples_in_docstrings_are_true(tmp_path):
    corpus_of_place, turn_of_place = assign_places([3, 1])
    assert corpus_of_place.tolist() == [0, 0, 1, 0] and turn_of_place.tolist() == [0, 1, 0, 2]
    pieces = number_pieces(["one\n--", "-\ntwo"], "---")
    assert [pair for pair in pieces if pair[1]] == [(0, "one\n"), (1, "two")]
    token_file = TokenFile(tmp_path)
    token_file.append(np.arange(21, dtype=np.uint32))
    document = Document(token_file, [range(21)], num_start_ids=1, num_train=0, num_bytes=9)
    document = hold_out(document, 2)
    assert document.read(document.num_train, 24).tolist() == [0, 10, 0, 20]
    tokenizer = load_tokenizer("gpt2")
    tokens = [tokenizer.decode_bytes([token_id]) for token_id in tokenizer.encode("The cat sat")]
    assert tokens == [b"The", b" cat", b" sat"]
