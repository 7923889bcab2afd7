import pytest

from utils.schedule import cosine_lr

SHAPE = {"max_lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 715, "max_steps": 19_073}


def test_the_ends_are_exact():
    assert 0 < cosine_lr(0, **SHAPE) < 1e-6
    assert cosine_lr(715, **SHAPE) == 6e-4
    assert cosine_lr(19_072, **SHAPE) == 6e-5
    assert cosine_lr(715 + (19_072 - 715) / 2, **SHAPE) == pytest.approx(3.3e-4)


def test_it_rises_once_and_falls_once():
    rates = [cosine_lr(step, **SHAPE) for step in range(19_073)]
    assert all(a < b for a, b in zip(rates[:715], rates[1:716], strict=True))
    assert all(a > b for a, b in zip(rates[715:-1], rates[716:], strict=True))


def test_runs_without_warmup_or_of_one_step():
    assert cosine_lr(0, max_lr=1.0, min_lr=0.1, warmup_steps=0, max_steps=1) == 1.0
    assert cosine_lr(3, max_lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=5) < 1.0
