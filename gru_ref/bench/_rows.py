"""A result: a work, what was found about it, and the bar where there is one."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gru_ref.bench._timing import Spread, ratios


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str  # with its sizes
    quantity: str  # what the value is of
    value: Spread | None  # None: not measured, and `note` says why
    unit: str = "×"
    bar: float | None = None
    at_most: bool = False  # the bar is an upper one
    sides: dict[str, Spread] = field(default_factory=dict)  # seconds a call
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the bar; None where there is nothing to compare."""
        if self.bar is None or self.value is None:
            return None
        return self.value.median <= self.bar if self.at_most else self.value.median >= self.bar

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with `met`."""
        return dataclasses.asdict(self) | {"met": self.met}


def faster(work: str, times: Mapping[str, list[float]], peer: str, bar: float | None = None) -> Row:
    """How many times faster than `peer` side 'ours' is."""
    sides = {name: Spread.of(times[name]) for name in ("ours", peer)}
    return Row(work, f"faster than {peer}", ratios(times[peer], times["ours"]), bar=bar, sides=sides)


def share(
    work: str, times: Mapping[str, list[float]], limit: list[float], of: str, bar: float | None, note: str
) -> Row:
    """limit: the seconds that 'ours' would take at the limit, round by round; the value is in percent."""
    percent = ratios([100 * seconds for seconds in limit], times["ours"])
    return Row(work, f"share of {of}", percent, "%", bar, sides={"ours": Spread.of(times["ours"])}, note=note)


def missing(work: str, quantity: str, bar: float | None, why: str) -> Row:
    """What could not be measured here."""
    return Row(work, quantity, None, bar=bar, note=why)
