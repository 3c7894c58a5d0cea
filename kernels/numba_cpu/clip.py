"""Twin of gru_ref/ops/clip.py, where the equations are.

Faster because one pass reads each gradient once and makes no float64 copy, and the pool's threads share it.
Squares are summed in float64 in blocks of a fixed length, so the norm is the same for any number of threads.
"""

import functools
import math
from collections.abc import Iterable

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import FLOATS, compiled, for_kernel
from gru_ref.ops import clip as definition
from gru_ref.types import Array

_COST = 0.3
"""Nanoseconds a gradient."""
_BLOCK = 2**14
"""Gradients whose squares are added up by themselves."""


def global_norm(grads: Iterable[Array]) -> float:
    """As the definition."""
    total = 0.0
    for g in grads:
        if g.dtype not in FLOATS:
            total += definition.global_norm([g]) ** 2
            continue
        flat = for_kernel(g).reshape(-1)
        sums = np.empty(-(-len(flat) // _BLOCK))
        squares = functools.partial(_squares, flat, sums)
        threads.share(squares, len(sums), cost=_COST * _BLOCK)
        total += float(sums.sum())
    return math.sqrt(total)


@compiled("T[::1], float64[::1], intp, intp", fastmath=("contract", "reassoc"))
def _squares(g: Array, sums: Array, first: int, end: int) -> None:
    for block in range(first, end):
        part = g[block * _BLOCK : (block + 1) * _BLOCK]
        total = 0.0
        for i in range(len(part)):
            total += np.float64(part[i]) * np.float64(part[i])
        sums[block] = total
