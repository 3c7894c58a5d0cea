"""Matrix products for the twins, in two ways. Not here: what is multiplied, and why.

`product` is for many rows: each of the pool's threads calls BLAS, held to one thread, for its share of them.

`multiply` is for the few rows of a recurrence, in a kernel, where one matrix B serves every step: B is
packed once (`packed`), and BLAS would pack it anew at each step, which costs as much as the product.
C ← C + A·B, with A (M, K), B (K, N). Packed means that B's columns lie in panels as wide as a tile
(_tile.py), each panel's rows one after the other, the last panel filled up with zeros. A panel's next _DEPTH
rows stay in the first-level cache while the rows of A pass by (Goto and van de Geijn 2008). An element of C
is the same sum in the same order whatever rows are beside it.
"""

import numba
import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import OPTIONS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._tile import PANEL_BYTES, panel, tiles
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.types import Array

_DEPTH = 256
"""Rows of a panel that are used together: 24 KiB of them with 32-byte vectors."""
_ROWS_PACKED = 64
"""Rows of a matrix that are packed together."""
_SMALL = 2**17
"""Multiply-adds below which a product is not worth a second thread."""


def product(a: Array, b: Array, bias: Array | None = None) -> Array:
    """a (M, K), b (K, N), bias (N,) or None -> a·b + bias (M, N). Any strides; one floating dtype."""
    (M, K), N = a.shape, b.shape[1]
    c = empty((M, N), a.dtype)

    def part(rows: slice, columns: slice) -> None:
        out = c[rows, columns]
        np.matmul(a[rows], b[:, columns], out=out)
        if bias is not None:
            out += bias[columns]

    whole = slice(None)
    with threads.one_blas_thread():
        if M >= N:
            threads.share(lambda m, end: part(slice(m, end), whole), M, unit=8, least=_SMALL // max(1, N * K))
        else:
            threads.share(
                lambda n, end: part(whole, slice(n, end)), N, unit=16, least=_SMALL // max(1, M * K)
            )
    return c


def packed(b: Array) -> Array:
    """b (K, N) in panels, for `multiply`."""
    K, N = b.shape
    result = empty(whole_panels(N, b.itemsize) * K, b.dtype)
    transposed = b.T.flags.c_contiguous
    kernel, source = (_pack_transposed, for_kernel(b.T)) if transposed else (_pack, for_kernel(b))
    threads.share(
        lambda n, n_end: kernel(source, n, n_end, result), N, unit=panel(b.dtype), least=_SMALL // max(1, K)
    )
    return result


@numba.njit(**OPTIONS)
def multiply(A: Array, P: Array, rows_of_B: int, C: Array) -> None:
    """C ← C + A·B in a kernel: A (M, K), a packed B, whose first K rows count, C (M, N), N whole panels."""
    M, K = A.shape
    size = P.itemsize
    width = PANEL_BYTES // size
    a_row, a_k, c_row = A.strides[0] // size, A.strides[1] // size, C.strides[0] // size
    for j in range(0, C.shape[1], width):
        for k in range(0, K, _DEPTH):
            p = j * rows_of_B + k * width
            a, c = A.ctypes.data + k * a_k * size, C.ctypes.data + j * size
            tiles(P, p, a, a_row, a_k, c, c_row, M, min(_DEPTH, K - k))


@numba.njit(**OPTIONS)
def whole_panels(n: int, itemsize: int) -> int:
    """n rounded up to whole panels: columns that nobody looks at are cheaper than tiles of other widths."""
    width = PANEL_BYTES // itemsize
    return -(-n // width) * width


@numba.njit(**OPTIONS)
def pack(B: Array, n: int, n_end: int, P: Array) -> None:
    """Columns n…n_end−1 of B (K, N) into their panels, a few rows at a time: panels lie across them."""
    K = B.shape[0]
    width = PANEL_BYTES // P.itemsize
    for k in range(0, K, _ROWS_PACKED):
        for j in range(n, n_end, width):
            rows = B[k : min(k + _ROWS_PACKED, K), j : min(j + width, n_end)]
            panel_rows = P[j * K : (j + width) * K].reshape(K, width)[k:]
            for i in range(rows.shape[0]):
                for c in range(rows.shape[1]):
                    panel_rows[i, c] = rows[i, c]
                for c in range(rows.shape[1], width):
                    panel_rows[i, c] = 0


@compiled("T[:, ::1], intp, intp, T[::1]")
def _pack(B: Array, n: int, n_end: int, P: Array) -> None:
    pack(B, n, n_end, P)


@compiled("T[:, ::1], intp, intp, T[::1]")
def _pack_transposed(B: Array, n: int, n_end: int, P: Array) -> None:
    """The same for B (N, K), whose rows are the columns of what is packed: it is read along its rows."""
    K = B.shape[1]
    width = PANEL_BYTES // P.itemsize
    for j in range(n, n_end, width):
        panel_rows = P[j * K : (j + width) * K].reshape(K, width)
        for k in range(0, K, _ROWS_PACKED):
            end = min(k + _ROWS_PACKED, K)
            columns = min(width, n_end - j)
            for c in range(columns):
                row = B[j + c]
                for i in range(k, end):
                    panel_rows[i, c] = row[i]
            for i in range(k, end):
                for c in range(columns, width):
                    panel_rows[i, c] = 0


def column_sums(a: Array) -> Array:
    """a (M, N) -> its columns' sums (N,), each added up from the first row on."""
    a = for_kernel(a)
    sums = np.zeros(a.shape[1], a.dtype)
    threads.share(
        lambda n, end: _add_columns(a, n, end, sums), len(sums), unit=16, least=_SMALL // max(1, len(a))
    )
    return sums


@compiled("T[:, ::1], intp, intp, T[::1]")
def _add_columns(a: Array, n: int, n_end: int, sums: Array) -> None:
    totals = sums[n:n_end]
    for i in range(len(a)):
        row = a[i, n:n_end]
        for j in range(len(totals)):
            totals[j] += row[j]
