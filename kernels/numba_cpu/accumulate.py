"""Twin of gru_ref/ops/accumulate.py.

Faster because the pool's threads share the rows; the results are the same to the last bit.
"""

from gru_ref import threads
from gru_ref.ops import accumulate as definition
from gru_ref.types import Array

_COST = 0.4
"""Nanoseconds a number."""


def add(total: Array, gradient: Array) -> None:
    """As the definition."""
    if total.shape != gradient.shape or not total.size:
        definition.add(total, gradient)
        return
    threads.share(
        lambda i, end: definition.add(total[i:end], gradient[i:end]),
        len(total),
        cost=_COST * (total.size // len(total)),
    )
