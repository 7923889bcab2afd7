import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from config.recipes import parse_recipe
from data.loader import Sequences, TokenStream
from data.shards import read_manifest, write_manifest
from data.tokenizer import load_tokenizer
from evaluation.scoring import SLICE_BYTES, ItemScorer, score_targets
from evaluation.table import format_table
from evaluation.tasks import Item, find_tasks
from evaluation.validation import weighted_mean
from model.config import GPTConfig
from model.gpt import GPT
from utils.distributed import Process
from utils.errors import UserError

ALONE = Process(0, 1, torch.device("cpu"))
ITEMS = [
    Item("The cat sat", (" down.", " on the mat.", " x"), 1),
    Item("A much longer context, " * 3 + "that ends", (" here", " there and nowhere else"), 0),
    Item("Trailing space ", ("kept apart", "or not")),
    Item("", (" nothing before",)),
]


@pytest.fixture(scope="module")
def scorer(request):
    torch.manual_seed(0)
    shape = parse_recipe(getattr(request, "param", "gpt2")).shape(32, 128, 257)
    model = GPT(GPTConfig(n_layer=2, n_head=2, **shape))
    for p in model.parameters():
        p.data.normal_(0, 0.3)  # far from uniform
    return ItemScorer(model.eval(), load_tokenizer("bytes"), ALONE, torch.float32, 16)


@torch.no_grad()
def by_hand(model, context, choice):
    """Log-probability and greedy agreement of a continuation, one plain forward; white space at
    the end of the context belongs to the continuation, as in the harness."""
    context, space = context.rstrip(), context[len(context.rstrip()) :]
    context, choice = list(context.encode()) or [256], list((space + choice).encode())
    logits = model(torch.tensor([(context + choice)[-129:][:-1]]))[0, -len(choice) :]
    nats = F.log_softmax(logits, -1).gather(-1, torch.tensor(choice)[:, None])
    return nats.sum().item(), logits.argmax(-1).tolist() == choice


@pytest.mark.parametrize("scorer", ["gpt2", "modern", "llama,n_kv_head=1"], indirect=True)
def test_each_continuation_scores_as_if_it_stood_alone(scorer):
    for item, scores in zip(ITEMS, scorer.score(ITEMS), strict=True):
        for choice, found in zip(item.choices, scores, strict=True):
            nats, greedy = by_hand(scorer.model, item.context, choice)
            assert found.logprob == pytest.approx(nats, abs=1e-4)
            assert found.greedy == greedy and found.tokens >= len(choice)


def test_a_context_too_long_loses_its_start(scorer):
    item = Item("abc " * 60, (" one", " and another one"))
    for choice, found in zip(item.choices, scorer.score([item])[0], strict=True):
        nats, _ = by_hand(scorer.model, item.context, choice)
        assert found.logprob == pytest.approx(nats, abs=1e-4)
    with pytest.raises(UserError, match="a continuation has 200 tokens, the context 128"):
        scorer.score([Item("a", ("b" * 200,))])


@torch.no_grad()
def test_the_context_is_scored_where_asked(scorer):
    (found,) = scorer.score(ITEMS[:1], resized=True)
    ids = torch.tensor([list(b"The cat sat")])
    mean = F.cross_entropy(scorer.model(ids)[0, :-1], ids[0, 1:])
    assert found[0].context_tokens == 10
    assert found[0].context_logprob == pytest.approx(-10 * mean.item(), abs=1e-4)


def test_greedy_last_and_filtered_mean_what_they_say(scorer):
    with torch.no_grad():
        first = scorer.model(torch.tensor([list(b"The cat sat")]))[0, -1].argmax().item()
        second = scorer.model(torch.tensor([[*b"The cat sat", first]]))[0, -1].argmax().item()

    class Raw:  # a tokenizer that gives the very ids; a banned word has a space before it
        eot = 256

        def encode(self, text):
            return np.frombuffer(text.strip(" ").encode("latin-1"), np.uint8).astype(np.uint16)

    def ask(*ids, banned=()):
        items = [Item("The cat sat", (bytes(ids).decode("latin-1"),))]
        return replace(scorer, tokenizer=Raw()).score(items, banned=banned)[0][0]

    found = ask(first, second)
    assert found.greedy and found.last and found.greedy_filtered
    assert not ask(first ^ 1, second).greedy
    found = ask(first, second, banned=[bytes([first]).decode("latin-1")])
    assert found.greedy and not found.greedy_filtered


@torch.no_grad()
def test_cbt_chooses_by_the_whole_text_or_by_what_follows_the_blank(scorer):
    row = {"sentences": ["Tom had a dog ."], "question": "Where is the XXXXX ?", "answer": "dog"}
    rows, task = [row | {"options": ["cat", "dog", "Ann"]}], find_tasks()["cbt_cn"]
    results, examples = task.score(rows, scorer.score, task.protocols)
    (item,) = task.items(rows, "full sequence")
    context, rest, whole = list(item.context.encode()), [], []
    for choice in item.choices:
        ids = torch.tensor([context + list(choice.encode())])
        nats = F.cross_entropy(scorer.model(ids)[0, :-1], ids[0, 1:], reduction="none")
        rest.append(-nats[len(context) - 1 :].sum().item())
        whole.append(-nats.mean().item())
    assert examples[0]["logprobs"] == pytest.approx(whole, abs=1e-4)
    assert examples[1]["logprobs"] == pytest.approx(rest, abs=1e-4)
    assert [r.protocol for r in results] == ["full sequence", "from the blank"]
    assert [r.value for r in results] == [np.argmax(whole) == 1, np.argmax(rest) == 1]


ENDINGS = {"ctx": "A dog", "endings": ["abc", "a", "bcd", "cde"]}  # three of one length
HELLASWAG = [{**ENDINGS, "label": label} for label in (0, 1, 2, 0)]


def test_ties_count_a_share_but_the_first_choice_under_lm_eval(scorer):
    zeros = GPT(scorer.model.config)
    for p in zeros.parameters():
        p.data.zero_()
    score = replace(scorer, model=zeros).score
    results, examples = find_tasks()["hellaswag"].score(HELLASWAG, score, ["build-nanogpt"])
    # the log-probability is best for the shortest ending, its mean is that of all four
    by_metric = {r.metric: (r.value, r.ties) for r in results}
    assert by_metric == {"acc": (0.25, 0), "acc_norm": (0.25, 4)}
    assert [x["pick_acc_norm"] for x in examples] == [0] * 4
    results, _ = find_tasks()["hellaswag"].score(HELLASWAG, score, ["lm-eval"])
    by_metric = {r.metric: (r.value, r.ties) for r in results}
    assert by_metric["acc"] == (0.25, 0)
    # a space and three letters are 4/3 tokens a letter, a space and one letter 2
    assert by_metric["acc_norm"] == by_metric["acc_bytes"] == (0.5, 4)
    note = ", acc_bytes: 4 ties; the first best choice counts, as in the harness"
    assert note in format_table(results, "gpt2")


@pytest.mark.parametrize("task", ["hellaswag", "lambada", "cbt_cn"])
def test_a_model_of_nan_is_an_error(scorer, task):
    broken = GPT(scorer.model.config)
    broken.transformer.h[0].mlp.c_fc.weight.data.fill_(torch.nan)
    rows = {
        "hellaswag": HELLASWAG,
        "lambada": [{"text": "the cat"}],
        "cbt_cn": [{"sentences": ["A."], "question": "XXXXX ?", "answer": "a", "options": ["a"]}],
    }
    benchmark = find_tasks()[task]
    with pytest.raises(UserError, match="gives NaN"):
        benchmark.score(rows[task], replace(scorer, model=broken).score, benchmark.protocols)


def test_figures_of_a_mixture_are_weighted_by_tokens_and_bits_per_byte_by_bytes():
    nats, num_bytes, weights = (2.0, 4.0), (1.0, 5.0), [0.75, 0.25]  # per token
    scores = []
    for x, y in zip(nats, num_bytes, strict=True):
        scores.append({"loss": x, "bits_per_byte": x / math.log(2) / y})
    mean = weighted_mean(scores, weights)
    assert mean["loss"] == pytest.approx(2.5)
    assert mean["bits_per_byte"] == pytest.approx(2.5 / math.log(2) / 2.0)
    assert weighted_mean([{"loss": 2.0}, scores[1]], weights) == {"loss": 2.5}


@pytest.mark.parametrize("width", [1, 7, 32, 1000])
def test_targets_looked_up_slice_by_slice_are_those_of_all_logits(monkeypatch, width):
    torch.manual_seed(0)
    N, V = 300, 50
    monkeypatch.setitem(SLICE_BYTES, "cpu", 4 * N * width)
    x, weight = torch.randn(N, 4).round(), torch.randn(V, 4).round()  # so products are exact
    weight[[5, 20, 33]] = weight[[30, 3, 44]]  # logits that tie, within slices and across
    logits = x @ weight.T
    banned = logits.argmax(-1).unique()[:3].tolist()
    allowed = logits.index_fill(-1, torch.tensor(banned), -torch.inf)
    targets = torch.randint(V, (N,))
    targets[:100], targets[100:200] = logits.argmax(-1)[:100], allowed.argmax(-1)[100:200]

    logprob, hit, filtered = score_targets(x, weight, targets, banned)

    plain = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    torch.testing.assert_close(logprob, plain, rtol=0, atol=1e-5)
    assert hit.tolist() == (logits.argmax(-1) == targets).tolist()
    assert filtered.tolist() == (allowed.argmax(-1) == targets).tolist()
    assert hit.any() and (hit > filtered).any() and (hit < filtered).any()


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_validation_is_the_mean_over_the_first_tokens_for_any_batch_size(
    shards, scorer, batch_size
):
    val = Sequences(TokenStream(shards, "val"), 32)
    scores = replace(scorer, batch_size=batch_size).validation_loss(val, 3210)
    x, y = (torch.from_numpy(a) for a in val.batch(np.arange(3210 // 32)))
    expected = F.cross_entropy(scorer.model(x).flatten(0, 1), y.flatten()).item()
    assert scores["loss"] == pytest.approx(expected, rel=1e-6)
    ends = sum((shard.open() == 256).sum() for shard in val.stream.shards)
    bits = expected / math.log(2) * len(val.stream) / (len(val.stream) - ends)
    assert scores["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert scorer.model.training  # left as training needs it


def test_validation_reads_no_more_than_there_is(shards, scorer, tmp_path):
    val = Sequences(TokenStream(shards, "val"), 32)
    whole = scorer.validation_loss(val, 10**9)
    assert whole == scorer.validation_loss(val, len(val) * 32)
    manifest = read_manifest(shards)
    del manifest["bytes"]
    for shard in val.stream.shards:
        shutil.copy(shard.path, tmp_path)
    manifest["shards"] = [entry for entry in manifest["shards"] if entry["split"] == "val"]
    write_manifest(tmp_path, manifest)
    untold = scorer.validation_loss(Sequences(TokenStream(tmp_path, "val"), 32), 10**9)
    assert untold == {"loss": whole["loss"]}  # no bits per byte where nobody counted the bytes
