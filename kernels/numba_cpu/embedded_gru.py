"""Twin of gru_ref/ops/embedded_gru.py, where the equations are.

Faster where the vocabulary has at most half as many rows as the batch has tokens: the products with W are
over the rows of the table. Elsewhere it is the twin of gru.py on the rows that the ids say.
"""

from typing import Any

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu import _recurrence, embedding, gru
from gru_ref.kernels.numba_cpu._product import column_sums, packed, product
from gru_ref.kernels.numba_cpu.matmul import round_to
from gru_ref.types import Array


def forward(
    ids: Array,
    table: Array,
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
    weights = (h0, weight_ih, weight_hh, bias_ih, bias_hh)
    if not (
        reset_after
        and precision == "fp32"
        and _recurrence.takes(ids.size, ids.shape[-1], table, *weights)
        and _is_by_id(ids, table)
    ):
        y, cache = gru.forward(table[ids], *weights, reset_after=reset_after, precision=precision)
        return y, (table, *cache[1:], ids)
    with threads.at_once():
        gates_x = product(table, weight_ih.T)
        panels = packed(weight_hh.T)
    h, r, z, n, q = _recurrence.steps(gates_x, ids, h0, panels, bias_ih, bias_hh)
    cache = (table, h, r, z, n, q, weight_ih, weight_hh, h0 is not None, reset_after, precision, ids)
    return h[1:], cache


def backward(
    dy: Array, cache: tuple[Any, ...], dh_T: Array | None = None, total: Array | None = None
) -> tuple[None, Array, Array | None, Array, Array, Array, Array]:
    """As the definition."""
    table, *others, ids = cache
    h, r, z, n, q, weight_ih, weight_hh, has_h0, reset_after, precision = others
    if not (
        reset_after
        and precision == "fp32"
        and _recurrence.takes_back(dy, dh_T, h, weight_hh, table)
        and _is_by_id(ids, table)
    ):
        x = round_to(table[ids], precision)
        dx, dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh = gru.backward(dy, (x, *others), dh_T)
        _, dtable = embedding.backward(dx, (ids, len(table)), total)
        return None, dtable, dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh
    dgates_x, dgates_h, dh0 = _recurrence.steps_back(dy, dh_T, h, r, z, n, q, weight_hh, has_h0)
    _, by_id = embedding.backward(dgates_x, (ids, len(table)))
    with threads.at_once():
        dtable = product(by_id, weight_ih)
        dweight_ih = product(by_id.T, table)
        dweight_hh = _recurrence.weight_gradient(dgates_h, h, has_h0)
        dbias_ih, dbias_hh = column_sums(by_id), column_sums(dgates_h)
    if total is not None:
        total += dtable
        dtable = total
    return None, dtable, dh0, dweight_ih, dweight_hh, dbias_ih, dbias_hh


def _is_by_id(ids: Array, table: Array) -> bool:
    """Whether the products are over the table's rows. Ones that no id names must not matter: all finite."""
    return (
        2 * len(table) <= ids.size
        and ids.dtype.kind in "iu"
        and 0 <= ids.min() <= ids.max() < len(table)
        and bool(np.isfinite(table).all())
    )
