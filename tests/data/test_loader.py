import itertools
import threading
from types import SimpleNamespace

import numpy as np
from conftest import user_error
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from data.loader import Mixture, Sequences, Slicing, permute, prefetch, sequence_ids_of_step
from data.shards import Shard, ShardFolder, TokenStream, open_folder
from utils.distributed import ALONE, Process
from utils.errors import UserError


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**40), st.integers(0, 1000))
def test_permute_is_a_permutation(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


def test_an_epoch_visits_everything_once_in_an_order_of_its_own_and_its_seed():
    n, batch = 10_007, 1000
    orders = [np.arange(n)]
    for seed in (0, 1):
        ids = np.concatenate([sequence_ids_of_step(step, batch, n, seed) for step in range(21)])
        orders += [ids[:n], ids[n : 2 * n]]
    for a, b in itertools.combinations(orders, 2):
        assert sorted(a) == sorted(b) == list(range(n))
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.04  # 4 standard deviations of a random order
        assert (a == b).sum() < 10  # fixed points: Poisson with mean 1


def test_1024_ranks_share_the_steps_of_15_trillion_tokens(tmp_path):
    np.save(tmp_path / "tail.npy", np.arange(3072, dtype=np.uint16))
    shards = [Shard(tmp_path / "not_there.npy", 10**8)] * 150_000
    shards.append(Shard(tmp_path / "tail.npy", 3072))
    sequences = Sequences(TokenStream([ShardFolder(tmp_path, "train", shards, "gpt2", None)]), 1024)
    n = len(sequences)
    assert (n - 1) * 1024 == 15 * 10**12 + 1024  # 1,024 tokens more would have no last target
    inputs, targets = sequences.make_batch(np.array([n - 1]))
    assert (inputs == 1024 + np.arange(1024)).all() and (targets == inputs + 1).all()
    step = n // 8192 - 1  # the last whole one of the epoch
    ids = sequence_ids_of_step(step, 8192, n, seed=1)
    starts = (0, 4096)  # two micro-steps
    by_rank = [
        [*Slicing(4, rank, 1024).local_positions(at)] for rank in range(1024) for at in starts
    ]
    assert sorted(ids[np.concatenate(by_rank)]) == sorted(set(ids))
    assert 0 <= ids.min() < 2**32 < n / 2 < ids.max() < n


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    np.save(tmp_path / "train_000000.npy", np.array([1, 2, 50257, 3] * 10, np.uint16))
    with user_error("train_000000.npy holds token id 50257, not one of"):
        Sequences(TokenStream([open_folder(tmp_path, "train")]), 4).make_batch(np.arange(2))


def test_batches_are_copied_to_the_device_in_the_main_thread(monkeypatch, shards):
    threads = []

    def copy_to_device(self, x):
        threads.append(threading.current_thread())
        return x

    monkeypatch.setattr(Process, "copy_to_device", copy_to_device)
    options = SimpleNamespace(sequences_per_pass=2, seed=0)
    run = SimpleNamespace(process=ALONE, options=options, progress=SimpleNamespace(position=0))
    inputs, targets = next(train.open_batches(run, Mixture([shards], "train", 32)))
    assert inputs.shape == (2, 32) and inputs[0, 1:].equal(targets[0, :-1])
    assert threads == [threading.main_thread()] * 2


def test_prefetch_keeps_order_and_passes_errors_on():
    def items():
        yield from range(20)
        raise UserError("broken shard")

    received = []
    with user_error("broken shard"):
        for item in prefetch(items()):
            received.append(item)
    assert received == list(range(20))
