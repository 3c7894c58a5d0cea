"""The learning rate of every step, as a pure function of the step's number.

Steps count from 1, so the first update already has a learning rate above zero, and the last step, s = S,
has exactly the documented minimum (where there is a decay); after it the rate stays there.

    warm-up            lr(s) = peak · s/W                               s ≤ W
    constant           lr(s) = peak                                     s > W
    linear, cosine     lr(s) = min + (peak − min)·f(p)                  p = (s−W)/(S−W)
    wsd                lr(s) = peak, then in the last D steps as above  p = (s−(S−D))/D

    f(p):  linear 1−p      cosine (1+cos πp)/2      1-sqrt 1−√p
"""

import math

from gru_ref.config import ScheduleConfig
from gru_ref.errors import ConfigError

SHAPES = {
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    "1-sqrt": lambda p: 1.0 - math.sqrt(p),
}


def phases(schedule: ScheduleConfig, total: int) -> tuple[int, int, int]:
    """(W, D, S): warm-up steps, decay steps and length in steps, shares turned into steps.

    A decay given as a share has at least one step, and gives way to the warm-up; a run that is shorter than
    its warm-up ends on the ramp. Raises ConfigError where a decay given in steps does not fit.
    """
    total = schedule.steps or total
    warmup = round(schedule.warmup * total) if schedule.warmup < 1 else round(schedule.warmup)
    if 0 < schedule.decay < 1:
        decay = min(max(round(schedule.decay * total), 1), max(total - max(warmup, 1), 0))
    else:
        decay = round(schedule.decay)
    if schedule.name in ("cosine", "linear"):
        decay = max(total - warmup, 0)
    elif schedule.name == "constant":
        decay = 0
    elif decay and warmup + decay > total:
        raise ConfigError(
            f"schedule.warmup {warmup} and schedule.decay {decay} together exceed the {total} steps; "
            "shorten one, or give shares below 1"
        )
    return warmup, decay, total


def learning_rate(schedule: ScheduleConfig, step: int, total: int) -> float:
    """The learning rate of update number `step` (from 1) in a run of `total` steps; clamped outside it."""
    warmup, decay, total = phases(schedule, total)
    step = min(max(step, 1), max(total, 1))
    if step < warmup:
        return schedule.lr * (step / warmup)
    start = total - decay
    if decay == 0 or step <= start:
        return schedule.lr
    if step == total:
        return schedule.min_lr
    shape = schedule.name if schedule.name in ("cosine", "linear") else schedule.shape
    return schedule.min_lr + (schedule.lr - schedule.min_lr) * SHAPES[shape]((step - start) / decay)
