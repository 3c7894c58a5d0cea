"""Twin of gru_ref/ops/embedding.py, where the equations are.

Faster because each row of dy is added to its row of dweight as it comes: no sort, and no sorted copy of dy.
A token's rows are added one by one; NumPy adds many in pairs of partial sums, so the last bits differ.
"""

from typing import Any

import numpy as np

from gru_ref.kernels.numba_cpu._compile import FLOATS, compiled, for_kernel
from gru_ref.ops import embedding as definition
from gru_ref.types import Array


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[None, Array]:
    """As the definition, which gets fp16 and ids that are not all in 0…V−1."""
    ids, vocab_size = cache
    rows = dy.reshape(-1, dy.shape[-1])
    if (
        dy.dtype not in FLOATS
        or ids.dtype.kind not in "iu"
        or not 0 < ids.size == len(rows)
        or not 0 <= ids.min() <= ids.max() < vocab_size
    ):
        return definition.backward(dy, cache)
    dweight = np.zeros((vocab_size, rows.shape[1]), dy.dtype)
    _add_rows(for_kernel(rows), for_kernel(ids.reshape(-1), np.intp), dweight)
    return None, dweight


@compiled("T[:, ::1], intp[::1], T[:, ::1]")
def _add_rows(rows: Array, ids: Array, dweight: Array) -> None:
    for i in range(len(ids)):
        row, total = rows[i], dweight[ids[i]]
        for j in range(len(row)):
            total[j] += row[j]
