"""Sides measured by turns (ours, peer, ours, peer, …), and ratios taken round by round.

A machine that is slower for a while slows both sides of a round, so the ratio of the two survives where the
seconds do not. Before each turn there is a pause: the threads of the other side's libraries spin for up to
about 30 ms after their last work and would take the cores.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from gru_ref.bench._settings import Settings

PAUSE = 0.05  # seconds before a turn
TURN = 0.2  # seconds that a turn of short calls lasts
FEWEST = 3  # rounds, however long they take
WARM_UP_CALLS = 2  # of each side before the first round: the first compiles and allocates


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Of at least one value."""
        values = list(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))


def alternate(
    sides: Mapping[str, Callable[[], object]],
    settings: Settings,
    *,
    most: int | None = None,
    calls: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> dict[str, list[float]]:
    """Seconds a call of each side, one value a round; within a round the sides run in their order.

    A side with a method `turn` is called within the context that it returns, which is not timed.

    most: rounds. calls: in a turn, for sides that must be called equally often; None fills TURN.
    """
    warm = {name: _warm_up(call, clock) for name, call in sides.items()}
    in_turn = {name: calls or max(1, math.floor(TURN / max(s, 1e-9))) for name, s in warm.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    start, rounds = clock(), 0
    while rounds < settings.repeats or (
        not settings.repeats and (rounds < FEWEST or clock() - start < settings.seconds)
    ):
        if rounds == most:
            break
        for name, call in sides.items():
            with _turn(call):
                sleep(PAUSE)
                began = clock()
                for _ in range(in_turn[name]):
                    call()
                seconds[name].append((clock() - began) / in_turn[name])
        rounds += 1
    return seconds


def _warm_up(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of the last of WARM_UP_CALLS."""
    with _turn(call):
        for _ in range(WARM_UP_CALLS):
            began = clock()
            call()
        return clock() - began


def _turn(call: Callable[[], object]) -> AbstractContextManager[object]:
    return call.turn() if hasattr(call, "turn") else nullcontext()


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> Spread:
    """Of values of the same rounds: the spread of their ratios, not the ratio of their medians."""
    return Spread.of(a / b for a, b in zip(numerators, denominators, strict=True))
