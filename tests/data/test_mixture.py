import json
import math
import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from conftest import losses, script, torchrun, train_args, weights

from data.loader import Sequences, Slicing, train_batches
from data.mixture import Corpus, Mixture, assign_places, parse_corpora
from data.shards import TokenStream, open_folder, write_manifest
from utils.errors import UserError
from utils.files import sha256
from utils.logger import read_metrics


@pytest.fixture(scope="module")
def folders(shards, tmp_path_factory):
    """Three folders of shards of different sizes."""
    root = tmp_path_factory.mktemp("mixture")
    for name, share in (("a", 1.0), ("b", 0.5), ("c", 0.1)):
        entries, sizes = [], {}
        (root / name).mkdir()
        for split in ("train", "val"):
            tokens = np.concatenate([s.read() for s in open_folder(shards, split).shards])
            kept = tokens[: max(3000, int(share * len(tokens)))]
            np.save(path := root / name / f"{split}_000000.npy", kept)
            entries.append({"file": path.name, "split": split, "tokens": len(kept)})
            entries[-1]["sha256"] = sha256(path)
            sizes[split] = int((kept != 256).sum())
        manifest = {"tokenizer": "bytes", "vocab_size": 257, "bytes": sizes, "shards": entries}
        write_manifest(root / name, manifest)
    return root


def test_weights_are_read_from_the_names_of_folders():
    a, b = Path("data/a"), Path("data/b")
    assert parse_corpora([a, b]) == [Corpus([a, b], 1)]
    expected = [Corpus([a], Fraction("0.75")), Corpus([b], Fraction("0.25"))]
    assert parse_corpora(["data/a:3", "data/b:1"]) == expected
    assert parse_corpora(["c:x/4", "d:nan"]) == [Corpus([Path("c:x/4"), Path("d:nan")], 1)]
    for names in (["data/a:1", "data/b"], ["data/a:1", "data/b:0"]):
        with pytest.raises(UserError, match="give each folder a weight above 0"):
            parse_corpora(names)


def test_shares_are_exact_and_each_corpus_runs_through_its_own_order(folders):
    names = [f"{folders}/a:0.7", f"{folders}/b:0.2", f"{folders}/c:0.1"]
    mixture = Mixture(names, "train", 32)
    ids = mixture.order(np.arange(10_000), seed=3)
    corpus = np.searchsorted(mixture.starts, ids, side="right") - 1
    assert np.bincount(corpus).tolist() == [7000, 2000, 1000]
    for i, part in enumerate(mixture.parts):
        own = ids[corpus == i] - mixture.starts[i]
        n = len(part)
        visits = np.bincount(own, minlength=n)
        epochs = len(own) // n
        assert visits.min() >= epochs and visits.max() <= epochs + 1
    a, b, c = (len(part.stream) for part in mixture.parts)
    epochs, name = mixture.epochs(1000)
    assert epochs == pytest.approx(max(700 / a, 200 / b, 100 / c))
    expected = f"{epochs:.2f} epochs of {name}, the corpus seen most often"
    assert name in "abc" and mixture.describe_epochs(1000) == expected
    whole = np.concatenate([mixture.order(np.arange(s, s + 500), 3) for s in range(0, 10_000, 500)])
    assert (whole == ids).all()  # in steps, as in one
    inputs, targets = mixture.batch(ids[:50])
    for row, i in enumerate(ids[:50]):
        part = mixture.parts[corpus[row]]
        expected = part.batch(np.array([i - mixture.starts[corpus[row]]]))
        assert (inputs[row] == expected[0]).all() and (targets[row] == expected[1]).all()


@pytest.mark.parametrize(
    "weights",
    [
        ("0.9985", "0.0015"),
        ("1", "1", "1"),
        ("0.7", "0.2", "0.05", "0.03", "0.0199", "0.0001"),
        ("379", "830", "365", "14"),
        ("1", "999999"),
        ("3", "1", "1", "1", "1", "1", "1", "1", "1", "1", "1"),
    ],
)
def test_any_first_positions_hold_the_share_of_each_corpus_to_within_one(weights):
    corpora = parse_corpora([f"{i}:{weight}" for i, weight in enumerate(weights)])
    assert [corpus.weight for corpus in corpora] == [
        Fraction(weight) / sum(map(Fraction, weights)) for weight in weights
    ]
    period = math.lcm(*(corpus.weight.denominator for corpus in corpora))
    shares = [int(corpus.weight * period) for corpus in corpora]
    (places, _), n = assign_places(shares), np.arange(1, period + 1)
    for i, share in enumerate(shares):
        counts = np.cumsum(places == i)
        assert counts[-1] == share and np.abs(counts * period - n * share).max() < period


def test_shares_stay_exact_far_from_the_first_position(folders):
    mixture = Mixture([f"{folders}/a:0.9985", f"{folders}/b:0.0015"], "train", 32)
    positions = 2**55 + np.arange(4_000)
    corpus, corpus_positions = mixture.locate(positions)
    first = [2**55 * share // 2_000 for share in mixture.shares]
    for i, share in enumerate((1_997, 3)):
        mine = corpus_positions[corpus == i]
        assert len(mine) == 2 * share and abs(int(mine[0]) - first[i]) <= 1
        assert (np.diff(mine) == 1).all()
    with pytest.raises(UserError, match="give weights of at most six digits"):
        Mixture([f"{folders}/a:0.12345678", f"{folders}/b:1"], "train", 32)


def test_one_corpus_of_weight_1_has_the_order_of_folders_without_weights(folders):
    plain = Sequences(TokenStream([open_folder(folders / "a", "train")]), 32)
    for name in (folders / "a", f"{folders}/a:1"):
        mixture = Mixture([name], "train", 32)
        for batches in zip(
            train_batches(mixture, Slicing(8, 4), 5, range(3, 9)),
            train_batches(plain, Slicing(8, 4), 5, range(3, 9)),
            strict=True,
        ):
            assert all((x == y).all() for x, y in zip(*batches, strict=True))


@pytest.mark.parametrize("weights", [("", ""), (":1", ":2")])
def test_folders_whose_splits_contradict_each_other_are_not_opened_together(
    shards, tmp_path, weights
):
    """Folders of others have no rule, and those of one rule, as of several workers, agree."""
    rules = {
        "first": {"val_fraction": 0.01},
        "equal": {"val_fraction": 0.01},
        "other": {"val_fraction": 0.2},
        "foreign": {},
    }
    for name, rule in rules.items():
        shutil.copytree(shards, tmp_path / name)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        del manifest["val_fraction"]
        write_manifest(tmp_path / name, manifest | rule)

    def open_two(first, second):
        names = [f"{tmp_path / first}{weights[0]}", f"{tmp_path / second}{weights[1]}"]
        return Mixture(names, "val", 32)

    for first, second in (("first", "equal"), ("foreign", "other")):
        open_two(first, second)
    for first, second, problem in (
        ("first", "other", r"several --val_fraction, \[0.01, 0.2\]: one may train"),
    ):
        with pytest.raises(UserError, match=problem):
            open_two(first, second)


def test_a_mixture_is_trained_resumed_and_shared_by_two_processes(folders, tmp_path):
    names = [f"{folders}/a:0.75", f"{folders}/c:0.25"]
    runs = [tmp_path / name for name in ("whole", "resumed", "two")]
    for run in runs:
        args = train_args(names[0], run, 20, "--min_lr", 3e-3)  # a constant rate
        args.insert(args.index(names[0]) + 1, names[1])
        if run.name == "two":
            torchrun(2, *args)
        else:
            script(*args, *(["--max_steps", 11] if run.name == "resumed" else []))
            said = script(*args, "--resume", "auto").stdout
    assert "epochs of c, the corpus seen most often: 20 steps" in said
    assert "validation reads all 2,976 tokens of c, fewer than --val_tokens 4,096" in said
    assert losses(runs[0]) == losses(runs[1]) and losses(runs[0]) == pytest.approx(losses(runs[2]))
    ours, theirs = weights(runs[0]), weights(runs[1])
    assert all((ours[name] == theirs[name]).all() for name in ours)
    row = read_metrics(runs[0] / "logs")["val"][-1]
    assert row["loss"] == pytest.approx(0.75 * row["loss_a"] + 0.25 * row["loss_c"])
    said = script("data/verify.py", "--data_dir", *names, "--block_size", 32).stdout
    assert said.count("each exactly once in an epoch") == 2
    out = tmp_path / "scores.json"
    found = script("evaluate.py", "--checkpoint", runs[0], "--tasks", "val", "--out", out).stdout
    assert found.count("bits_per_byte") == 3 and "weighted mean" in found
