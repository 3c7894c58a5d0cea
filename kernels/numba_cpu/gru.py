"""Twin of gru_ref/ops/gru.py, where the equations are, for the form of PyTorch and cuDNN.

Faster by the steps of _recurrence.py. The form of 2014 and inputs rounded to 16 bits get the definition, as
does a single sequence step, where reading U from memory is all there is to do, and arrays whose shapes do not
fit, for which it raises its errors.
"""

from typing import Any

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu import _recurrence
from gru_ref.kernels.numba_cpu._product import column_sums, packed, product
from gru_ref.ops import gru as definition
from gru_ref.types import Array


def forward(
    x: Array,
    h0: Array | None,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array,
    bias_hh: Array,
    *,
    reset_after: bool = True,
    precision: str = "fp32",
) -> tuple[Array, tuple[Any, ...]]:
    """As the definition."""
    T, B, _ = x.shape
    arrays = (x, h0, weight_ih, weight_hh, bias_ih, bias_hh)
    if not (reset_after and precision == "fp32" and _recurrence.takes(T * B, B, *arrays)):
        return definition.forward(*arrays, reset_after=reset_after, precision=precision)
    with threads.at_once():
        gates_x = product(x.reshape(T * B, -1), weight_ih.T)
        panels = packed(weight_hh.T)
    row = np.arange(T * B).reshape(T, B)
    h, r, z, n, q = _recurrence.steps(gates_x, row, h0, panels, bias_ih, bias_hh)
    return h[1:], (x, h, r, z, n, q, weight_ih, weight_hh, h0 is not None, reset_after, precision)


def backward(
    dy: Array, cache: tuple[Any, ...], dh_T: Array | None = None
) -> tuple[Array, Array | None, Array, Array, Array, Array]:
    """As the definition."""
    x, h, r, z, n, q, weight_ih, weight_hh, has_h0, reset_after, precision = cache
    if not (reset_after and precision == "fp32" and _recurrence.takes_back(dy, dh_T, h, weight_hh)):
        return definition.backward(dy, cache, dh_T)
    T, B, _ = dy.shape
    dgates_x, dgates_h, dh0 = _recurrence.steps_back(dy, dh_T, h, r, z, n, q, weight_hh, has_h0)
    with threads.at_once():
        dx = product(dgates_x, weight_ih).reshape(x.shape)
        dweight_ih = product(dgates_x.T, x.reshape(T * B, -1))
        dweight_hh = _recurrence.weight_gradient(dgates_h, h, has_h0)
        dbias_ih, dbias_hh = column_sums(dgates_x), column_sums(dgates_h)
    return dx, dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh
