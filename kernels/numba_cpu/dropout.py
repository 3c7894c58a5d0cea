"""Twin of gru_ref/ops/dropout.py, where the equations are.

Faster because a value's draw and its product are one pass, shared among the pool's threads. A draw is a
function of its index (gru_ref/random.py), so the results are the same to the last bit.
"""

from typing import Any

import numba
import numpy as np

from gru_ref import random, threads
from gru_ref.kernels.numba_cpu._compile import FLOATS, OPTIONS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.ops import dropout as definition
from gru_ref.types import Array

_COST = 9.0
"""Nanoseconds a value."""
_WORD = 2**32


def keep_mask(shape: tuple[int, ...], p: float, *, seed: int, step: int, layer: int, start: int = 0) -> Array:
    """As the definition."""
    n = int(np.prod(shape))
    if not _fits(n, seed, step, layer, start):
        return definition.keep_mask(shape, p, seed=seed, step=step, layer=layer, start=start)
    keep = np.empty(n, np.bool_)
    ones = np.ones(1, np.float32)
    where = (seed % _WORD, seed // _WORD, layer, step)
    threads.share(
        lambda i, end: _keep(ones, p * 2.0**32, *where, start + i, keep[i:end]), n, unit=4, cost=_COST
    )
    return keep.reshape(shape)


def forward(
    x: Array, p: float, *, seed: int, step: int = 0, layer: int = 0, start: int = 0
) -> tuple[Array, tuple[Any, ...]]:
    """As the definition."""
    if not (0 < p < 1 and x.dtype in FLOATS and _fits(x.size, seed, step, layer, start)):
        return definition.forward(x, p, seed=seed, step=step, layer=layer, start=start)
    return _apply(x, p, seed, step, layer, start), (p, seed, step, layer, start)


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array]:
    """As the definition."""
    p, seed, step, layer, start = cache
    if not (p and dy.dtype in FLOATS):
        return definition.backward(dy, cache)
    return (_apply(dy, p, seed, step, layer, start),)


def _fits(n: int, seed: int, step: int, layer: int, start: int) -> bool:
    """Whether every coordinate has its word of the counter; the definition says which has not."""
    return (
        0 <= seed <= random.MAX_SEED and max(step, layer, (start + n) // 4) < _WORD and min(step, layer) >= 0
    )


def _apply(x: Array, p: float, seed: int, step: int, layer: int, start: int) -> Array:
    flat, y = for_kernel(x).reshape(-1), empty(x.size, x.dtype)
    where = (seed % _WORD, seed // _WORD, layer, step)
    threads.share(
        lambda i, end: _drop(flat[i:end], 1 - p, p * 2.0**32, *where, start + i, y[i:end]),
        x.size,
        unit=4,
        cost=_COST,
    )
    return y.reshape(x.shape)


@numba.njit(**OPTIONS)
def _block(key_0: int, key_1: int, layer: int, step: int, index: int) -> tuple[Any, Any, Any, Any]:
    """The four draws of index 4·index … 4·index + 3: ten rounds of Philox4x32."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = np.uint64(index), np.uint64(layer), np.uint64(step), np.uint64(random.DROPOUT)
    k0, k1 = np.uint64(key_0), np.uint64(key_1)
    for _ in range(10):
        product_0, product_1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (product_1 >> shift) ^ c1 ^ k0, product_1 & low
        c2, c3 = (product_0 >> shift) ^ c3 ^ k1, product_0 & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0, c1, c2, c3


@compiled("T[::1], float64, intp, intp, intp, intp, intp, boolean[::1]")
def _keep(
    _: Array, bound: float, key_0: int, key_1: int, layer: int, step: int, first: int, keep: Array
) -> None:
    for i in range(-(first % 4), len(keep), 4):
        draws = _block(key_0, key_1, layer, step, (first + i) // 4)
        for word in range(4):
            if 0 <= i + word < len(keep):
                keep[i + word] = draws[word] >= bound


@compiled("T[::1], T, float64, intp, intp, intp, intp, intp, T[::1]")
def _drop(
    x: Array,
    kept: float,
    bound: float,
    key_0: int,
    key_1: int,
    layer: int,
    step: int,
    first: int,
    y: Array,
) -> None:
    zero, one = x.dtype.type(0), x.dtype.type(1)
    for i in range(-(first % 4), len(x), 4):
        draws = _block(key_0, key_1, layer, step, (first + i) // 4)
        for word in range(4):
            if 0 <= i + word < len(x):
                y[i + word] = x[i + word] * (one if draws[word] >= bound else zero) / kept
