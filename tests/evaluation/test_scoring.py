import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import user_error
from edited import READERS, SoftCapped

from data.loader import Sequences, TokenStream
from data.manifest import read_manifest, write_manifest
from data.named_tokenizer import ByteTokenizer
from data.shards import open_folder
from data.tokenizer import load_tokenizer
from evaluation import scoring
from evaluation.benchmarks import BENCHMARKS
from evaluation.scoring import score_items, score_targets
from evaluation.tasks import Item
from evaluation.validation import Scorer, weighted_mean
from model.config import GPTConfig
from model.gpt import GPT
from recipes import parse_recipe
from utils.distributed import ALONE

BYTES = load_tokenizer("bytes")
LAMBADA = BENCHMARKS["lambada"]
ITEMS = [
    Item("The cat sat", (" down.", " on the mat.", " x"), 1),
    Item("A much longer context, " * 3 + "that ends", (" here", " there and nowhere else"), 0),
    Item("Trailing space ", ("kept apart", "or not")),
    Item("", (" nothing before",)),
    Item("abc " * 60, (" one", " and another one")),  # longer than the context of 128 bytes
]


@pytest.fixture(scope="module")
def scorer(request):
    torch.manual_seed(0)
    recipe = parse_recipe(getattr(request, "param", "gpt2"))
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 128, "vocab_size": 257}
    model = GPT(GPTConfig(**sizes, **recipe.model_fields(32)))
    for p in model.parameters():
        p.data.normal_(0, 0.3)  # far from uniform
    return Scorer(model.eval(), ALONE, 16)


def with_weights(scorer, value):
    """The scorer of a model whose weights are all one value."""
    model = GPT(scorer.model.config)
    for p in model.parameters():
        p.data.fill_(value)
    return replace(scorer, model=model)


@torch.no_grad()
def nats(model, ids):
    """Log-probability of each id after the first, by one plain forward."""
    logits = model(torch.tensor([ids[:-1]]))[0]
    return -F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


@torch.no_grad()
def likeliest_two(model, ids):
    return model(torch.tensor([ids]))[0, -1].topk(2).indices.tolist()


@pytest.mark.parametrize("model_class", [SoftCapped, *READERS])
def test_an_edited_model_scores_as_its_forward_pass(model_class, scorer, caplog):
    model = model_class(scorer.model.config).eval()
    model.load_state_dict(scorer.model.state_dict())
    check_each_continuation(replace(scorer, model=model))
    is_packed = model_class is SoftCapped
    assert ("several continuations in one row gives another" in caplog.text) != is_packed


@pytest.mark.parametrize("scorer", ["gpt2", "modern", "llama,n_kv_head=1"], indirect=True)
def test_each_continuation_scores_as_if_it_stood_alone(scorer, caplog):
    check_each_continuation(scorer)
    assert not caplog.records


def check_each_continuation(scorer):
    for item, predictions in zip(ITEMS, score_items(scorer, BYTES, ITEMS, LAMBADA), strict=True):
        # white space at the end of a context belongs to the continuation, as in the harness
        context = item.context.rstrip()
        for choice, prediction in zip(item.choices, predictions, strict=True):
            answer = [*(item.context[len(context) :] + choice).encode()]
            ids = [*(list(context.encode()) or [256]), *answer][-129:]
            expected = nats(scorer.model, ids)[-len(answer) :].sum().item()
            assert prediction.logprob == pytest.approx(expected, abs=1e-4)
            assert prediction.num_tokens == len(answer)


def test_greedy_last_and_filtered_mean_what_they_say(scorer, monkeypatch):
    context = list(b"The cat sat")
    first, runner_up = likeliest_two(scorer.model, context)
    second, _ = likeliest_two(scorer.model, [*context, first])
    last, _ = likeliest_two(scorer.model, [*context, runner_up])

    class Raw(ByteTokenizer):  # gives the very ids; a banned word has a space before it
        def encode(self, text):
            return np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.uint16)

        def encode_continuation(self, text):
            return self.encode(text.strip(" "))

    for ids, banned, flags in (
        ((first, second), [], (True, True, True)),
        ((runner_up, last), [], (False, False, True)),
        ((runner_up, last), [chr(first)], (False, True, True)),
        ((first, second ^ 1), [], (False, False, False)),
        ((first, second), [chr(first)], (True, False, True)),
    ):
        item = Item("The cat sat", (bytes(ids).decode("latin-1"),))
        monkeypatch.setattr(LAMBADA, "banned_words", banned)
        ((prediction,),) = score_items(scorer, Raw(), [item], LAMBADA)
        assert (
            prediction.is_greedy,
            prediction.is_greedy_filtered,
            prediction.is_last_greedy,
        ) == flags


ENDINGS = {"ctx": "A dog", "endings": ["abc", "a", "bcd", "cde"]}  # three of one length
HELLASWAG = [{**ENDINGS, "label": label} for label in (0, 1, 2, 0)]


def test_ties_count_a_share_but_the_first_choice_under_lm_eval(scorer):
    score = partial(score_items, with_weights(scorer, 0), BYTES)

    def values(protocol):
        results, dump_rows = BENCHMARKS["hellaswag"].score(HELLASWAG, score, [protocol])
        assert [x["pick_acc_norm"] for x in dump_rows] == [0] * 4
        assert dump_rows[0]["logprobs"] == pytest.approx([-n * math.log(257) for n in (4, 2, 4, 4)])
        return {r.metric: (r.value, r.ties) for r in results}

    # the log-probability is best for the shortest ending, its mean is that of all four
    assert values("build-nanogpt") == {"acc": (0.25, 0), "acc_norm": (0.25, 4)}
    # a space and three letters are 4/3 tokens a letter, a space and one letter 2
    expected = {"acc": (0.25, 0), "acc_norm": (0.5, 4), "acc_bytes": (0.5, 4)}
    assert values("lm-eval") == expected


def test_a_model_of_nan_is_an_error(scorer):
    with user_error("gives NaN"):
        score_items(with_weights(scorer, math.nan), BYTES, ITEMS, LAMBADA)


def test_metrics_of_a_mixture_are_weighted_by_tokens_and_bits_per_byte_by_bytes():
    corpus_metrics = [  # 1 and 5 bytes per token
        {"loss": 2.0, "n": 8, "bits_per_byte": 2.0 / math.log(2) / 1},
        {"loss": 4.0, "n": 9, "bits_per_byte": 4.0 / math.log(2) / 5},
    ]
    mean = weighted_mean(corpus_metrics, [0.75, 0.25])
    assert mean == pytest.approx({"loss": 2.5, "n": 17, "bits_per_byte": 2.5 / math.log(2) / 2})
    corpus_metrics[0] |= {"loss": 0.0, "bits_per_byte": 0.0}  # a text that was learned by heart
    assert weighted_mean(corpus_metrics, [0.75, 0.25]) == {"loss": 1.0, "n": 17}
    corpus_metrics[0] = {"loss": 2.0, "n": 8}
    assert weighted_mean(corpus_metrics, [0.75, 0.25]) == {"loss": 2.5, "n": 17}


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_targets_looked_up_slice_by_slice_are_those_of_all_logits(monkeypatch, rows):
    torch.manual_seed(0)
    N, V = 90, 50
    monkeypatch.setattr(scoring, "chunk_bytes", lambda device: 4 * V * rows)
    model = GPT(GPTConfig(vocab_size=V, n_layer=1, n_head=1, n_embd=4))
    x, weight = torch.randn(N, 4).round(), model.head_weight.data[:V]
    weight.copy_(torch.randn(V, 4).round())  # so products are exact
    weight[[5, 20, 33]] = weight[[30, 3, 44]]  # logits that tie
    logits = x @ weight.T
    banned = logits.argmax(-1).unique()[:3].tolist()
    allowed = logits.index_fill(-1, torch.tensor(banned), -torch.inf)
    targets = torch.cat([logits.argmax(-1)[:30], allowed.argmax(-1)[30:60], torch.arange(30)])
    with torch.no_grad():
        logprob, hit, filtered = score_targets(model, x, targets, banned)
    torch.testing.assert_close(logprob, -F.cross_entropy(logits, targets, reduction="none"))
    assert hit.equal(logits.argmax(-1) == targets)
    assert filtered.equal(allowed.argmax(-1) == targets)
    assert (hit > filtered).any() and (hit < filtered).any()


def val_sequences(folder):
    return Sequences(TokenStream([open_folder(folder, "val")]), 32)


@pytest.mark.parametrize("batch_size", [7, 64])
def test_validation_is_the_mean_over_the_first_tokens_that_there_are_for_any_batch_size(
    shards, scorer, batch_size, tmp_path
):
    val = val_sequences(shards)
    validate = replace(scorer, batch_size=batch_size).validation_loss
    for num_tokens, num_sequences in ((3210, 3210 // 32), (10**9, len(val))):
        x, y = (torch.from_numpy(a) for a in val.make_batch(np.arange(num_sequences)))
        expected = F.cross_entropy(scorer.model(x).flatten(0, 1), y.flatten()).item()
        ends = (val.stream.read(0, len(val.stream)) == 256).sum()
        bits = expected / math.log(2) * len(val.stream) / (len(val.stream) - ends)
        metrics = validate(val, num_tokens)
        n = num_sequences * 32
        assert metrics == pytest.approx({"loss": expected, "n": n, "bits_per_byte": bits}, rel=1e-6)
        assert scorer.model.training  # left as training needs it
    shutil.copytree(shards, tmp_path, dirs_exist_ok=True)
    manifest = read_manifest(shards)
    manifest.bytes = {"train": 0, "val": 0}  # which folders of others do not count
    write_manifest(tmp_path, manifest)
    assert validate(val_sequences(tmp_path), 10**9) == {"loss": metrics["loss"], "n": n}
