from types import SimpleNamespace

import pytest
from conftest import train_options

from training.schedule import SCHEDULES, learning_rate


def options(**changes):
    return train_options(**{"max_lr": 1.0, "min_lr": 0.0, "warmup_steps": 0, **changes})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_peak_and_last_rates_are_exact_and_the_rest_monotonic(schedule):
    default = train_options(schedule=schedule, min_lr=6e-5)  # 19,073 steps, 715 of them warmup
    rates = [learning_rate(step, default) for step in range(19_073)]
    assert 0 < rates[0] < 1e-6 and rates[715] == 6e-4 and rates[-1] == 6e-5
    assert all(a < b for a, b in zip(rates[:715], rates[1:716], strict=True))
    assert all(a >= b for a, b in zip(rates[715:-1], rates[716:], strict=True))


@pytest.mark.parametrize("schedule, quarter", [("cosine", 0.8535534), ("linear", 0.75)])
def test_cosine_and_line_between_peak_and_end(schedule, quarter):
    run = options(schedule=schedule, max_steps=101)
    assert learning_rate(25, run) == pytest.approx(quarter)
    assert learning_rate(50, run) == pytest.approx(0.5)


def test_wsd_is_constant_then_linear_in_the_last_fifth():
    run = options(schedule="wsd", max_steps=101, warmup_steps=10)
    rates = [learning_rate(step, run) for step in range(10, 101)]
    assert rates == pytest.approx([1.0] * 72 + [n / 19 for n in range(18, -1, -1)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_of_any_length_end_at_the_lowest_rate(schedule):
    for max_steps in range(2, 30):
        run = options(schedule=schedule, max_steps=max_steps, min_lr=0.25)
        assert learning_rate(0, run) == 1.0 and learning_rate(max_steps - 1, run) == 0.25


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_is_shorter_than_its_warmup_rises_for_half_of_it(schedule):
    run = options(schedule=schedule, max_steps=100, warmup_steps=715)
    rates = [learning_rate(step, run) for step in range(100)]
    assert rates[:51] == sorted(rates[:51]) and rates[50] == 1.0 and rates[-1] == 0.0
    for warmup_steps in (0, 9):
        one = options(schedule=schedule, max_steps=1, warmup_steps=warmup_steps)
        assert learning_rate(0, one) == 1.0


def test_the_rate_reaches_its_end_at_the_last_update_of_a_run_that_counts_others():
    values = {"max_lr": 1.0, "min_lr": 0.1, "warmup_steps": 1, "schedule": "linear"}
    assert learning_rate(7, SimpleNamespace(**values, decay_end=7)) == 0.1
