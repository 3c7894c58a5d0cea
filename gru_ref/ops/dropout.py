"""Dropout whose mask is a function of coordinates, not of a generator's state.

    u_i  = the i-th 32-bit draw of the stream DROPOUT at (seed, step, layer)      gru_ref/random.py
    k_i  = 1 where u_i ≥ p·2³², else 0
    y    = x ⊙ k / (1 − p)            dx = dy ⊙ k / (1 − p)

Backward draws the same mask again, so nothing is stored, and recomputation after a checkpoint of activations
cannot draw another one. `step` counts micro-batches, so no two of them share a mask.
"""

from typing import Any

import numpy as np

from gru_ref import random
from gru_ref.types import Array


def keep_mask(shape: tuple[int, ...], p: float, *, seed: int, step: int, layer: int, start: int = 0) -> Array:
    """k: True where a value is kept, of the given shape. start: the first index, for a part of a mask."""
    n = int(np.prod(shape))
    draws = random.bits(n, seed=seed, stream=random.DROPOUT, step=step, layer=layer, start=start)
    return (draws >= p * 2.0**32).reshape(shape)


def forward(
    x: Array, p: float, *, seed: int, step: int = 0, layer: int = 0, start: int = 0
) -> tuple[Array, tuple[Any, ...]]:
    """x of any shape, p in [0, 1) -> y of the same shape, cache (p, seed, step, layer, start).

    start: the index of x's first value in the array that it is a part of, whose mask it gets its part of.
    """
    if not 0 <= p < 1:
        raise ValueError(f"p must be at least 0 and below 1, not {p}")
    cache = (p, seed, step, layer, start)
    return _apply(x, cache), cache


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array]:
    """dy -> dx: the same mask, the same factor."""
    return (_apply(dy, cache),)


def _apply(x: Array, cache: tuple[Any, ...]) -> Array:
    p, seed, step, layer, start = cache
    if p == 0:
        return x
    return x * keep_mask(x.shape, p, seed=seed, step=step, layer=layer, start=start) / (1 - p)


CASES: dict[str, dict[str, Any]] = {"p 0.5": {}, "p 0": {"p": 0.0}, "part of an array": {"start": 7}}


def example(
    rng: np.random.Generator,
    p: float = 0.5,
    shape: tuple[int, ...] = (4, 3, 5),
    start: int = 0,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """x (*shape) and coordinates."""
    x = rng.standard_normal(shape).astype(dtype)
    return {"x": x, "p": p, "seed": 7, "step": 3, "layer": 1, "start": start}
