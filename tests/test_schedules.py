"""Learning rates: case N12 as laws over a sweep, and golden values computed by hand."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gru_ref.config import ScheduleConfig, load
from gru_ref.errors import ConfigError
from gru_ref.schedules import learning_rate, phases

PEAK, MINIMUM = 2e-3, 2e-4
LENGTHS = [0, 1, 4]
TOTALS = [1, 4, 9, 10]
SWEEP = list(product(LENGTHS, LENGTHS, TOTALS))


def rates(schedule: ScheduleConfig, total: int) -> list[float]:
    """lr(1) … lr(total)."""
    return [learning_rate(schedule, step, total) for step in range(1, total + 1)]


def check_laws(schedule: ScheduleConfig, total: int) -> None:
    """N12: positive from the first update, at most the peak, up, flat, down, then the minimum for ever."""
    warmup, decay, length = phases(schedule, total)
    lr = {step: learning_rate(schedule, step, total) for step in range(-1, 2 * length + 1)}
    assert all(math.isfinite(value) and 0 < value <= schedule.lr for value in lr.values())
    steps = range(1, length)
    assert all(lr[s] < lr[s + 1] for s in steps if s + 1 <= warmup)
    assert all(lr[s] == schedule.lr for s in range(max(warmup, 1), length - decay + 1))
    assert all(lr[s] > lr[s + 1] for s in steps if s >= max(warmup, length - decay))
    if decay:
        assert lr[length] == schedule.min_lr
    elif warmup <= length:
        assert lr[length] == schedule.lr
    else:  # shorter than its warm-up: it ends on the ramp
        assert lr[length] == schedule.lr * (length / warmup)
    assert {lr[step] for step in range(length, 2 * length + 1)} == {lr[length]}
    assert lr[-1] == lr[0] == lr[1]


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize(("warmup", "decay", "total"), SWEEP)
def test_wsd_rises_stays_falls_and_ends_at_its_minimum(shape, warmup, decay, total):
    """N12, WSD; phases that do not fit are refused and named."""
    schedule = ScheduleConfig(name="wsd", shape=shape, lr=PEAK, min_lr=MINIMUM, warmup=warmup, decay=decay)
    if decay and warmup + decay > total:
        with pytest.raises(
            ConfigError, match=f"warmup {warmup} and .*decay {decay} .* {total} steps"
        ) as error:
            learning_rate(schedule, 1, total)
        assert error.value.exit_code == 2
    else:
        check_laws(schedule, total)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("warmup", "decay", "total"), SWEEP)
def test_the_other_schedules_obey_the_same_laws_and_ignore_decay(name, warmup, decay, total):
    """N12, cosine, linear and constant."""
    schedule = ScheduleConfig(name=name, lr=PEAK, min_lr=MINIMUM, warmup=warmup, decay=decay)
    check_laws(schedule, total)
    assert rates(schedule, total) == rates(
        ScheduleConfig(name=name, lr=PEAK, min_lr=MINIMUM, warmup=warmup, decay=0), total
    )


@given(
    st.sampled_from(["wsd", "cosine", "linear", "constant"]),
    st.sampled_from(["linear", "cosine", "1-sqrt"]),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(1, 80),
    st.floats(1e-6, 1.0),
    st.floats(0.01, 0.99),
)
def test_the_laws_hold_for_any_lengths(name, shape, warmup, decay, total, peak, ratio):
    """N12 beyond its sweep."""
    assume(name != "wsd" or decay == 0 or warmup + decay <= total)
    check_laws(ScheduleConfig(name, peak, peak * ratio, warmup, decay, shape), total)


@example(0.5, 0.5, 3)
@given(st.floats(0, 0.999), st.floats(0, 0.999), st.integers(1, 200))
def test_shares_that_add_up_to_at_most_one_always_fit(warmup, decay, total):
    """Both may be rounded up: two halves of three steps are two steps each."""
    assume(warmup + decay <= 1)
    schedule = ScheduleConfig(warmup=warmup, decay=decay)
    w, d, s = phases(schedule, total)
    assert w + d <= s == total
    assert abs(w - warmup * total) <= 0.5
    assert abs(d - decay * total) <= 1.5
    check_laws(schedule, total)


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        # 10 steps, warm-up 4: 1/4, 2/4 and all of the peak
        (ScheduleConfig("constant", 2e-3, 2e-4, 4), (1, 2, 4, 5, 10), (5e-4, 1e-3, 2e-3, 2e-3, 2e-3)),
        # then six steps down from 2e-3 by 3e-4 each
        (
            ScheduleConfig("linear", 2e-3, 2e-4, 4),
            (4, 5, 6, 7, 9, 10),
            (2e-3, 1.7e-3, 1.4e-3, 1.1e-3, 5e-4, 2e-4),
        ),
        # (1+cos π/6)/2 = .9330127019, (1+cos π/3)/2 = 3/4, (1+cos π/2)/2 = 1/2
        (
            ScheduleConfig("cosine", 2e-3, 2e-4, 4),
            (4, 5, 6, 7, 8, 10),
            (2e-3, 1.87942286341e-3, 1.55e-3, 1.1e-3, 6.5e-4, 2e-4),
        ),
        # warm-up 2, plateau up to step 6, decay over the last 4 at p = 1/4, 1/2, 3/4, 1
        (
            ScheduleConfig("wsd", 2e-3, 2e-4, 2, 4, "linear"),
            (1, 2, 6, 7, 8, 9, 10),
            (1e-3, 2e-3, 2e-3, 1.55e-3, 1.1e-3, 6.5e-4, 2e-4),
        ),
        # (1+cos π/4)/2 = .8535533906
        (
            ScheduleConfig("wsd", 2e-3, 2e-4, 2, 4, "cosine"),
            (6, 7, 8, 9, 10),
            (2e-3, 1.73639610307e-3, 1.1e-3, 4.6360389693e-4, 2e-4),
        ),
        # 1−√¼ = 1/2, 1−√½ = .2928932188, 1−√¾ = .1339745962
        (
            ScheduleConfig("wsd", 2e-3, 2e-4, 2, 4, "1-sqrt"),
            (6, 7, 8, 9, 10),
            (2e-3, 1.1e-3, 7.2720779386e-4, 4.4115427319e-4, 2e-4),
        ),
    ],
    ids=["constant", "linear", "cosine", "wsd-linear", "wsd-cosine", "wsd-1-sqrt"],
)
def test_golden_values(schedule, steps, expected):
    got = [learning_rate(schedule, step, 10) for step in steps]
    np.testing.assert_allclose(got, expected, rtol=1e-11)


def test_the_write_up_preset_warms_up_stays_and_decays_over_its_steps():
    """60, about 2,700 and 250 batches of 128, two to an update: 30, 1,347 and 125 updates."""
    config = load(preset="gru-l3-v3a")
    total = config.train.steps
    assert phases(config.schedule, total) == (30, 125, 1502)
    lr = rates(config.schedule, total)
    assert lr[0] == 2e-3 / 30
    assert lr.count(2e-3) == 1502 - 125 - 30 + 1
    assert lr[-1] == 2e-4


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear", "constant"])
def test_warmup_as_long_as_the_run_reaches_the_peak_at_the_last_step(name):
    """N12, W = S: no division by zero, and nothing left to decay."""
    assert rates(ScheduleConfig(name, 4e-3, 1e-4, warmup=4, decay=0), 4) == [1e-3, 2e-3, 3e-3, 4e-3]


def test_one_step_of_a_longer_warmup_still_learns():
    """N12, `train --steps 1` with a warm-up of 10."""
    assert learning_rate(ScheduleConfig(lr=1e-3, min_lr=0.0, warmup=10, decay=0.2), 1, 1) == 1e-4


@pytest.mark.parametrize("name", ["wsd", "cosine", "linear"])
def test_a_minimum_of_zero_is_reached_only_at_the_last_step(name):
    lr = rates(ScheduleConfig(name, 1e-3, 0.0, warmup=2, decay=3), 10)
    assert lr[-1] == 0.0
    assert min(lr[:-1]) > 0


@pytest.mark.parametrize(("warmup", "decay"), [(0.1, 0.25), (20, 50), (0.1, 50), (20, 0.25)])
def test_a_share_means_the_same_as_its_steps(warmup, decay):
    share = ScheduleConfig(warmup=warmup, decay=decay)
    assert phases(share, 200) == (20, 50, 200)
    assert rates(share, 200) == rates(ScheduleConfig(warmup=20, decay=50), 200)


def test_one_is_a_step_and_not_the_whole():
    assert phases(ScheduleConfig(warmup=1, decay=1), 10) == (1, 1, 10)


def test_the_schedule_may_be_longer_than_the_run():
    """`schedule.steps` fixes the length, so a run stopped early saw the rates of the long one."""
    schedule = ScheduleConfig("cosine", warmup=0.1, steps=100)
    assert phases(schedule, 10) == (10, 90, 100)
    assert rates(schedule, 10) == [schedule.lr * (step / 10) for step in range(1, 11)]
    assert learning_rate(schedule, 100, 10) == schedule.min_lr


@pytest.mark.parametrize("total", [2, 3, 4, 10, 300])
def test_a_decay_given_as_a_share_reaches_the_minimum_in_the_shortest_run(total: int) -> None:
    schedule = ScheduleConfig(lr=1.0, min_lr=0.1, warmup=0.05, decay=0.2)
    assert learning_rate(schedule, total, total) == 0.1


def test_a_decay_given_as_a_share_gives_way_to_a_longer_warmup() -> None:
    schedule = ScheduleConfig(lr=1.0, min_lr=0.1, warmup=10, decay=0.2)
    assert [learning_rate(schedule, step, 4) for step in (1, 4)] == [0.1, 0.4]
