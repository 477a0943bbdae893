"""The learning rate of each update is that of optax's schedules, with updates counted from 1."""

import optax
import pytest

from jaxmem import optim
from jaxmem.config.optimizers import Optimizer

PEAK, RATIO, STEPS = 0.01, 0.1, 10
END = PEAK * RATIO


def rates(**settings):
    rate = optim.learning_rate_schedule(Optimizer(learning_rate=PEAK, min_lr_ratio=RATIO, **settings), STEPS)
    return [float(rate(count)) for count in range(STEPS)]


@pytest.mark.parametrize("warmup", [1, 3])
def test_cosine_with_warmup(warmup):
    expected = optax.warmup_cosine_decay_schedule(0.0, PEAK, warmup, STEPS, END)
    assert rates(warmup=warmup) == pytest.approx([float(expected(n)) for n in range(1, STEPS + 1)])


@pytest.mark.parametrize("warmup", [1, 3])
def test_linear_with_warmup(warmup):
    parts = [optax.linear_schedule(0.0, PEAK, warmup), optax.linear_schedule(PEAK, END, STEPS - warmup)]
    expected = optax.join_schedules(parts, [warmup])
    assert rates(schedule="linear", warmup=warmup) == pytest.approx([float(expected(n)) for n in range(1, STEPS + 1)])


def test_without_warmup_the_first_update_has_the_peak_and_the_last_the_end():
    cosine, linear = optax.cosine_decay_schedule(PEAK, STEPS - 1, RATIO), optax.linear_schedule(PEAK, END, STEPS - 1)
    assert rates() == pytest.approx([float(cosine(count)) for count in range(STEPS)])
    assert rates(schedule="linear") == pytest.approx([float(linear(count)) for count in range(STEPS)])


def test_the_peak_is_the_rate_of_one_update_and_the_end_that_of_the_last():
    values = rates(warmup=3)
    assert values.count(max(values)) == 1
    assert (values[2], values[-1]) == pytest.approx((PEAK, END))


def test_the_rate_is_never_negative(monkeypatch):
    """With fused multiply-add the last rate of optax's linear schedule to 0 is -7e-11."""
    monkeypatch.setattr(optax, "linear_schedule", lambda *_: lambda _: -7e-11)
    assert set(rates(schedule="linear")) == {0.0}


def test_a_constant_rate():
    assert rates(schedule="constant", warmup=2) == pytest.approx([PEAK / 2] + [PEAK] * 9)
