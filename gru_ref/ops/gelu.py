"""GELU, the Gaussian error linear unit, in its two forms.

    y = x·(1 + s)/2              dy/dx = (1 + s + x·s′)/2

    erf    s = erf(x/√2)         s′ = √(2/π)·e^(−x²/2)                  x·Φ(x), Φ the normal distribution
    tanh   s = tanh u            s′ = (1 − s²)·√(2/π)·(1 + 3a x²)       u = √(2/π)·(x + a x³), a = 0.044715

GPT-2 uses the tanh form; it differs from the exact one by up to 5e-4. (Hendrycks and Gimpel 2016.)
Backward computes tanh or erf again: x alone is kept, as the result is four times as wide as the model.
"""

import math
from typing import Any

import numpy as np

from gru_ref.types import Array

FORMS = ("tanh", "erf")
_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def erf(x: Array) -> Array:
    """The error function of every element, in the precision of `x`; NumPy has none of its own."""
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), x.dtype)


def forward(x: Array, approximate: str = "tanh") -> tuple[Array, tuple[Any, ...]]:
    """x of any shape, approximate 'tanh' or 'erf' (exact) -> y of that shape, cache (x, approximate)."""
    return x * (1 + _sigmoidal(x, approximate)) / 2, (x, approximate)


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array]:
    """dy -> dx."""
    x, approximate = cache
    s = _sigmoidal(x, approximate)
    if approximate == "tanh":
        ds = (1 - np.square(s)) * _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * np.square(x))
    else:
        ds = _SQRT_2_OVER_PI * np.exp(-np.square(x) / 2)
    return (dy * (1 + s + x * ds) / 2,)


def _sigmoidal(x: Array, approximate: str) -> Array:
    """s, which rises from −1 to 1."""
    if approximate == "tanh":
        return np.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * (x * x * x)))
    if approximate == "erf":
        return erf(x / math.sqrt(2))
    raise ValueError(f"approximate must be one of {', '.join(FORMS)}, not '{approximate}'")


CASES: dict[str, dict[str, Any]] = {"tanh": {}, "erf": {"approximate": "erf"}}


def example(
    rng: np.random.Generator,
    approximate: str = "tanh",
    shape: tuple[int, ...] = (4, 3, 5),
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """x (*shape), so wide that both tails are reached."""
    return {"x": (2 * rng.standard_normal(shape)).astype(dtype), "approximate": approximate}
