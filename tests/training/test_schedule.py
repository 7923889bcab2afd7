import pytest

from training.schedule import learning_rate, momentum, stable_steps

SHAPE = {"max_lr": 6e-4, "min_lr": 6e-5, "warmup_steps": 715, "max_steps": 19_073}
SCHEDULES = ("cosine", "linear", "wsd")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_peak_and_last_rates_are_exact(schedule):
    options = {"schedule": schedule, **SHAPE}
    assert 0 < learning_rate(0, **options) < 1e-6
    assert learning_rate(715, **options) == 6e-4
    assert learning_rate(19_072, **options) == 6e-5


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_values_between_peak_and_end(schedule):
    options = {"max_lr": 1.0, "min_lr": 0.0, "warmup_steps": 0, "max_steps": 101}
    value = learning_rate(25, schedule=schedule, **options)
    assert value == pytest.approx({"cosine": 0.8535534, "linear": 0.75}[schedule])
    assert learning_rate(50, schedule=schedule, **options) == pytest.approx(0.5)


def test_wsd_is_constant_then_linear():
    options = {"max_lr": 1.0, "min_lr": 0.0, "warmup_steps": 10, "max_steps": 101, "decay": 0.2}
    rates = [learning_rate(step, schedule="wsd", **options) for step in range(101)]
    assert rates[10:82] == [1.0] * 72 and stable_steps(101, 0.2) == 81
    steps = [a - b for a, b in zip(rates[81:], rates[82:], strict=False)]
    assert steps == pytest.approx([1 / 19] * 19) and rates[-1] == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_rises_during_warmup_and_then_only_falls(schedule):
    rates = [learning_rate(step, schedule=schedule, **SHAPE) for step in range(19_073)]
    assert all(a < b for a, b in zip(rates[:715], rates[1:716], strict=True))
    assert all(a >= b for a, b in zip(rates[715:-1], rates[716:], strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_runs_of_one_step_or_shorter_than_warmup(schedule):
    options = {"schedule": schedule, "max_lr": 1.0, "min_lr": 0.1}
    assert learning_rate(0, warmup_steps=0, max_steps=1, **options) == 1.0
    assert learning_rate(3, warmup_steps=10, max_steps=5, **options) < 1.0


def test_momentum_warms_up_to_its_constant():
    assert momentum(0, 0.9, 100) == pytest.approx(0.8)
    assert momentum(50, 0.9, 100) == pytest.approx(0.85)
    assert momentum(100, 0.9, 100) == momentum(10_000, 0.9, 100) == momentum(0, 0.9, 0) == 0.9
