import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import (
    documents,
    losses,
    same_run,
    script,
    torchrun,
    train_args,
    user_error,
    write_texts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fineweb_edu import shard

from config import TrainOptions
from data import verify
from data.loader import (
    Corpus,
    Mixture,
    assign_places,
    epoch_order,
    parse_corpora,
)
from data.manifest import read_manifest, write_manifest
from training.options import check_inputs
from training.summary import describe_run_epochs
from utils.logger import read_metrics


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three folders of shards of different sizes."""
    root = tmp_path_factory.mktemp("mixture")
    for name, count in (("a", 600), ("b", 300), ("c", 60)):
        shard(write_texts(root / f"{name}.jsonl", documents()[:count]), root / name)
    return root


def test_weights_are_read_from_the_names_of_folders(tmp_path):
    a, b = Path("data/a"), Path("data/b")
    assert parse_corpora([a, b]) == [Corpus([a, b], 1)]
    name = tmp_path / "x:0.5"
    assert parse_corpora([name]) == [Corpus([tmp_path / "x"], 1)]
    name.mkdir()  # a folder that is there has its whole name
    assert parse_corpora([name, a]) == [Corpus([name, a], 1)]
    expected = [Corpus([a], Fraction("0.75")), Corpus([b], Fraction("0.25"))]
    assert parse_corpora(["data/a:3", "data/b:1"]) == expected
    assert parse_corpora(["c:x/4", "d:nan"]) == [Corpus([Path("c:x/4"), Path("d:nan")], 1)]
    for names in ("a:1 b", "a b a", "a:2 a:1", "a:0.12345678 b:1"):
        with user_error("name each folder once, all of them with a weight of at most six digits"):
            parse_corpora(names.split())
    with user_error("at least one weight must be above 0"):
        parse_corpora(["a:0"])


def test_the_folders_of_a_mixture_are_found_again_without_their_weights(folders):
    options = TrainOptions(data_dir=(Path(f"{folders}/a:0.75"), Path(f"{folders}/c:0.25")))
    check_inputs(options, [], {})
    with user_error(f"{folders}/gone is not here"):
        check_inputs(replace(options, data_dir=(Path(f"{folders}/gone:1"),)), [], {})


def test_shares_are_exact_and_each_corpus_runs_through_its_own_order(folders):
    names = [f"{folders}/a:0.7", f"{folders}/b:0.2", f"{folders}/c:0.1"]
    mixture = Mixture(names, "train", 32)
    for start in (0, 2**55 // 10_000 * 10_000 + 7_000):
        positions = start + np.arange(10_000)
        ids = mixture.sequence_ids_at(positions, seed=3)
        corpus = np.searchsorted(mixture.corpus_starts, ids, side="right") - 1
        for i, (sequences, tenths) in enumerate(
            zip(mixture.corpus_sequences, (7, 2, 1), strict=True)
        ):
            ids_in_corpus = ids[corpus == i] - mixture.corpus_starts[i]
            corpus_positions = start * tenths // 10 + np.arange(1000 * tenths)
            assert (ids_in_corpus == epoch_order(corpus_positions, len(sequences), seed=3)).all()
            batch, expected = (
                mixture.make_batch(ids[corpus == i][:5]),
                sequences.make_batch(ids_in_corpus[:5]),
            )
            assert (batch[0] == expected[0]).all()
    without_c = Mixture([*names[:2], f"{folders}/c:0"], "train", 32)  # only validated
    assert without_c.sequence_ids_at(positions, 3).max() < without_c.corpus_starts[2]
    tokens_of_c = len(mixture.corpus_sequences[2].stream)
    options = SimpleNamespace(max_steps=10, total_batch_size=tokens_of_c)
    text = "1.00 epochs of c, the corpus seen most often"
    assert describe_run_epochs(options, mixture) == text
    # c is learned by heart, though all corpora together are read less than 100 times
    options.max_steps = 1010
    assert 1010 * tokens_of_c < 100 * len(mixture.stream)
    text = "101.00 epochs of c, the corpus seen most often (more than 100: train fewer steps)"
    assert describe_run_epochs(options, mixture) == text
    assert mixture.title == "70 % of a, 20 % of b, 10 % of c"
    # a run that is resumed with another order of the places is warned by this number
    checksum = mixture.checksum
    mixture.corpus_of_place = mixture.corpus_of_place[::-1].copy()
    assert mixture.checksum != checksum and Mixture(names, "train", 32).checksum == checksum


def test_the_title_tells_folders_of_the_same_name_apart(folders, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(folders / name, tmp_path / name / "shards")
    paths = [f"{tmp_path}/a/shards", f"{tmp_path}/b/shards"]
    title = Mixture([f"{path}:1" for path in paths], "train", 32).title
    assert title == f"50 % of {paths[0]}, 50 % of {paths[1]}"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9) | st.integers(1, 2000), min_size=2, max_size=11))
def test_any_first_places_hold_about_the_share_of_each_corpus(shares):
    """Two corpora to within half a sequence, k corpora to within (k - 1) / 2; a period exactly."""
    period = sum(shares)
    (corpora, ranks), n = assign_places(shares), np.arange(1, period + 1)
    for i, share in enumerate(shares):
        counts = np.cumsum(corpora == i)
        assert (ranks[corpora == i] == np.arange(share)).all()
        assert 2 * np.abs(counts * period - n * share).max() <= (len(shares) - 1) * period


@pytest.mark.parametrize("weight", ["", ":1"])
def test_folders_whose_splits_contradict_each_other_are_not_opened_together(
    folders, tmp_path, weight
):
    """Folders of others have no rule, and those of one rule, as of several workers, agree."""
    shutil.copytree(folders / "c", tmp_path / "c")
    manifest = read_manifest(folders / "c")
    names = [f"{folders}/a{weight}", f"{tmp_path}/c{weight}"]
    Mixture(names, "val", 32)
    manifest.val_fraction = 0.2
    write_manifest(tmp_path / "c", manifest)
    with user_error(r"several val_fractions, \[0.1, 0.2\]: shard them alike"):
        Mixture(names, "val", 32)
    manifest.val_fraction, manifest.bytes = None, {"train": 0, "val": 0}
    write_manifest(tmp_path / "c", manifest)
    assert Mixture(names, "val", 32).stream.bytes_per_token is None


def test_a_stream_of_several_folders_needs_a_split_once_and_is_verified(folders, tmp_path, capsys):
    shutil.copytree(folders / "c", tmp_path / "c")
    names = [tmp_path / "c", folders / "a"]
    manifest = read_manifest(names[0])
    manifest.shards = [entry for entry in manifest.shards if entry.split == "train"]
    write_manifest(names[0], manifest)
    val, train = (Mixture(names, split, 32).stream for split in ("val", "train"))
    assert [folder.path for folder in val.folders] == names[1:] and len(train.folders) == 2
    assert val.bytes_per_token == Mixture(names[1:], "val", 32).stream.bytes_per_token
    num_documents = (train.read(0, len(train)) == 256).sum()
    assert train.bytes_per_token == (len(train) - num_documents) / len(train)
    config = verify.VerifyOptions(tuple(names))
    verify.main(config)
    assert f"a: {len(train):,} train tokens of bytes, intact" in capsys.readouterr().out
    verify.main(verify.VerifyOptions(tuple(names[:1])))  # as by --val_fraction 0
    assert "c: 0 val tokens of bytes, intact" in capsys.readouterr().out
    path = names[0] / "train_000000.npy"
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    with user_error("train_000000.npy differs from the manifest's checksum"):
        verify.main(config)
    for one in (names[:1], [f"{names[0]}:1", f"{names[1]}:1"]):
        with user_error("c holds no val shards"):
            Mixture(one, "val", 32)


def test_a_mixture_is_trained_resumed_and_shared_by_two_processes(folders, tmp_path):
    names = [f"{folders}/a:0.75", f"{folders}/c:0.25"]
    whole, resumed, two = (tmp_path / name for name in ("whole", "resumed", "two"))

    def command(run):
        args = train_args(names[0], run, 20, "--min_lr", 3e-3)  # a constant rate
        args.insert(args.index(names[0]) + 1, names[1])
        return args

    printed = script(*command(whole)).stdout
    assert "epochs of c, the corpus seen most often: 20 steps" in printed
    script(*command(resumed), "--max_steps", 11)
    script(*command(resumed), "--resume", "auto")
    torchrun(2, *command(two))
    assert same_run(whole, resumed) and losses(whole) == pytest.approx(losses(two))
    row = read_metrics(whole / "logs")["val"][-1]
    assert row["loss"] == pytest.approx(0.75 * row["loss_a"] + 0.25 * row["loss_c"])
    printed = script("evaluate.py", "--checkpoint", whole, "--tasks", "val").stdout
    assert printed.count("bits_per_byte") == 3 and "weighted mean" in printed
