"""Affine map of the last axis.

    y = x·Wᵀ + b        dx = dy·W        dW = Σ dyᵀ·x        db = Σ dy        (Σ over all leading axes)

Inputs of the products are rounded as gru_ref/ops/matmul.py says; the bias is not.
"""

from typing import Any

import numpy as np

from gru_ref.ops.matmul import round_to
from gru_ref.types import Array


def forward(
    x: Array, weight: Array, bias: Array | None = None, precision: str = "fp32"
) -> tuple[Array, tuple[Any, ...]]:
    """x (…, I), weight (O, I), bias (O,) or None -> y (…, O), cache.

    cache = (rounded x, rounded weight, whether there is a bias, precision).
    """
    x, weight = round_to(x, precision), round_to(weight, precision)
    y = x.reshape(-1, x.shape[-1]) @ weight.T
    if bias is not None:
        y = y + bias
    return y.reshape(*x.shape[:-1], weight.shape[0]), (x, weight, bias is not None, precision)


def backward(
    dy: Array, cache: tuple[Any, ...], out: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """dy (…, O) -> dx (…, I), dweight (O, I), dbias (O,) or None. out: where dweight is written, if given."""
    x, weight, has_bias, precision = cache
    dbias = dy.reshape(-1, dy.shape[-1]).sum(axis=0) if has_bias else None
    dy = round_to(dy, precision).reshape(-1, dy.shape[-1])
    dweight = np.matmul(dy.T, x.reshape(-1, x.shape[-1]), out=out)
    dx = (dy @ weight).reshape(x.shape)
    return dx, dweight, dbias


CASES: dict[str, dict[str, Any]] = {"bias": {}, "no bias": {"bias": False}, "time-major": {"lead": (3, 2)}}


def example(
    rng: np.random.Generator,
    I: int = 5,  # noqa: E741 (the field's letter for the input width)
    O: int = 4,  # noqa: E741
    lead: tuple[int, ...] = (6,),
    bias: bool = True,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """x (*lead, I), weight (O, I), bias (O,) or None."""
    return {
        "x": rng.standard_normal((*lead, I)).astype(dtype),
        "weight": rng.standard_normal((O, I)).astype(dtype),
        "bias": rng.standard_normal(O).astype(dtype) if bias else None,
    }
