"""Twin of gru_ref/ops/linear.py, where the equations are.

Faster because the pool's threads each multiply a share of the rows (_product.py), add the bias to it while it
is in their cache, and sum the bias's gradient in vector instructions.
"""

from typing import Any

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import FLOATS
from gru_ref.kernels.numba_cpu._product import column_sums, product
from gru_ref.kernels.numba_cpu.matmul import round_to
from gru_ref.ops import linear as definition
from gru_ref.types import Array

_FEW = 8
"""Rows up to which a product is as fast as the weight is read, and BLAS reads it with all its threads."""


def forward(
    x: Array, weight: Array, bias: Array | None = None, precision: str = "fp32"
) -> tuple[Array, tuple[Any, ...]]:
    """As the definition."""
    rows = x.size // x.shape[-1]
    one_dtype = x.dtype == weight.dtype in FLOATS and (bias is None or bias.dtype == x.dtype)
    rounds_float64 = precision != "fp32" and x.dtype != np.float32  # to float32, which a bias widens again
    if rows < _FEW or not one_dtype or rounds_float64:
        return definition.forward(x, weight, bias, precision)
    x, weight = round_to(x, precision), round_to(weight, precision)
    y = product(x.reshape(rows, -1), weight.T, bias)
    return y.reshape(*x.shape[:-1], len(weight)), (x, weight, bias is not None, precision)


def backward(
    dy: Array, cache: tuple[Any, ...], out: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """As the definition."""
    x, weight, has_bias, precision = cache
    rows = dy.size // dy.shape[-1]
    if rows < _FEW or not dy.dtype == x.dtype in FLOATS:
        return definition.backward(dy, cache, out)
    dy = dy.reshape(rows, -1)
    rounded = round_to(dy, precision)
    with threads.at_once():
        dbias = column_sums(dy) if has_bias else None
        dweight = product(rounded.T, x.reshape(rows, -1), out=out)
        dx = product(rounded, weight)
    return dx.reshape(x.shape), dweight, dbias
