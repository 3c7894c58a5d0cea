"""Twin of gru_ref/ops/embedding.py, where the equations are.

Faster because each row of dy is added to its row of dweight as it comes: no sort, and no sorted copy of dy.
A token's rows are added one by one; NumPy adds many in pairs of partial sums, so the last bits differ.
"""

from typing import Any

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import FLOATS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.ops import embedding as definition
from gru_ref.types import Array

_COST = 0.5
"""Nanoseconds a number."""


def backward(dy: Array, cache: tuple[Any, ...], total: Array | None = None) -> tuple[None, Array]:
    """As the definition, which gets fp16 and ids that are not all in 0…V−1."""
    ids, vocab_size = cache
    rows = dy.reshape(-1, dy.shape[-1])
    if (
        dy.dtype not in FLOATS
        or (total is not None and not _takes(total, dy, vocab_size))
        or ids.dtype.kind not in "iu"
        or not 0 < ids.size == len(rows)
        or not 0 <= ids.min() <= ids.max() < vocab_size
    ):
        return definition.backward(dy, cache, total)
    dweight = total
    if dweight is None:
        dweight = empty((vocab_size, rows.shape[1]), dy.dtype)
        dweight[...] = 0
    rows, ids = for_kernel(rows), for_kernel(ids.reshape(-1), np.intp)
    threads.share(
        lambda j, end: _add_rows(rows, ids, j, end, dweight), rows.shape[1], unit=16, cost=_COST * len(rows)
    )
    return None, dweight


def _takes(total: Array, dy: Array, vocab_size: int) -> bool:
    """Whether the kernel can add to `total`."""
    same = total.dtype == dy.dtype and total.shape == (vocab_size, dy.shape[-1])
    return same and total.flags.carray


@compiled("T[:, ::1], intp[::1], intp, intp, T[:, ::1]")
def _add_rows(rows: Array, ids: Array, j: int, end: int, dweight: Array) -> None:
    """Columns j…end−1 of dweight: threads share columns, as two tokens may be one row."""
    for i in range(len(ids)):
        row, total = rows[i, j:end], dweight[ids[i], j:end]
        for c in range(len(row)):
            total[c] += row[c]
