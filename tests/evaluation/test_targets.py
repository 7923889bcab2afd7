import pytest
import torch

from evaluation.targets import SLICE_BYTES, score_targets


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
