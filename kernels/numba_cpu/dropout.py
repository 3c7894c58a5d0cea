"""Twin of gru_ref/ops/dropout.py, where the equations are.

Faster because a value's draw and its product are one pass, shared among the pool's threads. A draw is a
function of its index (gru_ref/random.py), so the results are the same to the last bit.
"""

from typing import Any

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu import _philox as philox
from gru_ref.kernels.numba_cpu._compile import FLOATS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.ops import dropout as definition
from gru_ref.types import Array

_TOGETHER = 512
"""Draws that are made together, a multiple of 4."""
_COST = 1.0
"""Nanoseconds a value."""


def keep_mask(shape: tuple[int, ...], p: float, *, seed: int, step: int, layer: int, start: int = 0) -> Array:
    """As the definition."""
    n = int(np.prod(shape))
    if not philox.fits(n, seed, step, layer, start):
        return definition.keep_mask(shape, p, seed=seed, step=step, layer=layer, start=start)
    keep = np.empty(n, np.bool_)
    ones = np.ones(1, np.float32)
    where = philox.coordinates(seed, step, layer)
    threads.share(
        lambda i, end: _keep(ones, philox.bound(p), *where, start + i, keep[i:end]), n, unit=4, cost=_COST
    )
    return keep.reshape(shape)


def forward(
    x: Array, p: float, *, seed: int, step: int = 0, layer: int = 0, start: int = 0
) -> tuple[Array, tuple[Any, ...]]:
    """As the definition."""
    if not (0 < p < 1 and x.dtype in FLOATS and philox.fits(x.size, seed, step, layer, start)):
        return definition.forward(x, p, seed=seed, step=step, layer=layer, start=start)
    return _apply(x, p, seed, step, layer, start), (p, seed, step, layer, start)


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array]:
    """As the definition."""
    p, seed, step, layer, start = cache
    if not (p and dy.dtype in FLOATS):
        return definition.backward(dy, cache)
    return (_apply(dy, p, seed, step, layer, start),)


def _apply(x: Array, p: float, seed: int, step: int, layer: int, start: int) -> Array:
    flat, y = for_kernel(x).reshape(-1), empty(x.shape, x.dtype).reshape(-1)
    where = philox.coordinates(seed, step, layer)
    threads.share(
        lambda i, end: _drop(flat[i:end], 1 - p, philox.bound(p), *where, start + i, y[i:end]),
        x.size,
        unit=4,
        cost=_COST,
    )
    return y.reshape(x.shape)


@compiled("T[::1], intp, intp, intp, intp, intp, intp, boolean[::1]")
def _keep(
    _: Array, bound: int, key_0: int, key_1: int, layer: int, step: int, first: int, keep: Array
) -> None:
    draws, lead = np.empty(_TOGETHER, np.uint32), first % 4
    for start in range(-lead, len(keep), _TOGETHER):
        philox.draws(key_0, key_1, layer, step, (first + start) // 4, draws)
        begin, end = max(start, 0), min(start + _TOGETHER, len(keep))
        some, some_draws = keep[begin:end], draws[begin - start :]
        for i in range(len(some)):
            some[i] = np.int64(some_draws[i]) >= bound


@compiled("T[::1], T, intp, intp, intp, intp, intp, intp, T[::1]")
def _drop(
    x: Array,
    kept: float,
    bound: int,
    key_0: int,
    key_1: int,
    layer: int,
    step: int,
    first: int,
    y: Array,
) -> None:
    zero, one = x.dtype.type(0), x.dtype.type(1)
    draws, lead = np.empty(_TOGETHER, np.uint32), first % 4
    for start in range(-lead, len(x), _TOGETHER):
        philox.draws(key_0, key_1, layer, step, (first + start) // 4, draws)
        begin, end = max(start, 0), min(start + _TOGETHER, len(x))
        some_x, some_y, some_draws = x[begin:end], y[begin:end], draws[begin - start :]
        for i in range(len(some_x)):
            some_y[i] = some_x[i] * (one if np.int64(some_draws[i]) >= bound else zero) / kept
