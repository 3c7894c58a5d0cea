"""Matrix products for the twins, in two ways. Not here: what is multiplied, and why.

`product` is for many rows: each of the pool's threads calls BLAS, held to one thread, for its share of them.

`multiply` is for the few rows of a recurrence, in a kernel, where one matrix B serves every step: B is
packed once (`packed`), and BLAS would pack it anew at each step, which costs as much as the product.
C ← F + A·B, with A (M, K), B (K, N), and F C itself or a row that is added to all. Packed means that B's
columns lie in panels as wide as a tile (_tile.py), each panel's rows one after the other, and N is rounded up
to whole vectors, with zeros. A panel's next _DEPTH rows stay in the first-level cache while the rows of A
pass by (Goto and van de Geijn 2008). An element of C is the same sum in the same order whatever rows are
beside it.
"""

import numba
import numpy as np
from numba.extending import register_jitable

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import OPTIONS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._tile import VECTOR_BYTES, copy_vectors, tiles_2, tiles_3, transpose_vectors
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.types import Array

_DEPTH = 8192 // VECTOR_BYTES
"""Rows of a panel that are used together: 24 KiB of them."""
_FAR = 2**23
"""Bytes of B beyond which its panels are fetched ahead of time: hardware alone begins too late (measured)."""
_ROWS_PACKED = 64
"""Rows of B that are packed together, as panels lie across them."""
_PRODUCT_COST, _PACK_COST, _SUM_COST = 0.03, 0.3, 0.3
"""Nanoseconds a multiply-add, a packed number and a summed one."""


def product(a: Array, b: Array, bias: Array | None = None, out: Array | None = None) -> Array:
    """a (M, K), b (K, N), bias (N,) or None -> a·b + bias (M, N), in `out` where given.

    Any strides; one floating dtype.
    """
    (M, K), N = a.shape, b.shape[1]
    c = empty((M, N), a.dtype) if out is None else out

    def part(rows: slice, columns: slice) -> None:
        c_part = c[rows, columns]
        np.matmul(a[rows], b[:, columns], out=c_part)
        if bias is not None:
            c_part += bias[columns]

    whole = slice(None)
    with threads.one_blas_thread():
        if M >= N:
            threads.share(lambda m, end: part(slice(m, end), whole), M, unit=8, cost=_PRODUCT_COST * N * K)
        else:
            threads.share(lambda n, end: part(whole, slice(n, end)), N, unit=16, cost=_PRODUCT_COST * M * K)
    return c


def packed(b: Array) -> Array:
    """b (K, N) in panels, for `multiply`."""
    b = for_kernel(b.T).T if b.T.flags.c_contiguous else for_kernel(b)
    K, N = b.shape
    result = empty(whole_vectors(N, b.itemsize) * K, b.dtype)
    lanes = VECTOR_BYTES // b.itemsize
    threads.share(lambda n, n_end: _pack(b, n, n_end, result), N, unit=3 * lanes, cost=_PACK_COST * K)
    return result


@numba.njit(**OPTIONS)
def multiply(A: Array, P: Array, rows_of_B: int, row: Array, C: Array, columns: int) -> None:
    """C ← row + A·B in a kernel: A (M, K), a packed B, whose first K rows count, row (N,), C (M, N).

    N is B's columns in whole vectors. Only the first `columns` need to be right, and panels beyond are left.
    """
    _multiply(A, P, rows_of_B, row.ctypes.data, 0, C, columns)


@numba.njit(**OPTIONS)
def multiply_add(A: Array, P: Array, rows_of_B: int, C: Array) -> None:
    """C ← C + A·B, as `multiply`."""
    _multiply(A, P, rows_of_B, C.ctypes.data, C.strides[0] // C.itemsize, C, C.shape[1])


@numba.njit(**OPTIONS)
def _multiply(A: Array, P: Array, rows_of_B: int, first: int, first_row: int, C: Array, columns: int) -> None:
    (M, K), N = A.shape, C.shape[1]
    size = P.itemsize
    lanes = VECTOR_BYTES // size
    a_row, a_k, c_row = A.strides[0] // size, A.strides[1] // size, C.strides[0] // size
    far = rows_of_B * N * size > _FAR
    j = 0
    while j < columns:
        vectors = _next_panel((N - j) // lanes)
        f, f_row, c = first + j * size, first_row, C.ctypes.data + j * size
        for k in range(0, K, _DEPTH):
            p, a = j * rows_of_B + k * vectors * lanes, A.ctypes.data + k * a_k * size
            depth = min(_DEPTH, K - k)
            if vectors == 3:
                tiles_3(P, p, a, a_row, a_k, f, f_row, c, c_row, M, depth, far)
            else:
                tiles_2(P, p, a, a_row, a_k, f, f_row, c, c_row, M, depth, far)
            f, f_row = c, c_row
        j += vectors * lanes


@register_jitable(**OPTIONS)
def whole_vectors(n: int, itemsize: int) -> int:
    """n rounded up to whole vectors, two at least: columns that nobody looks at."""
    lanes = VECTOR_BYTES // itemsize
    return max(2, -(-n // lanes)) * lanes


@register_jitable(**OPTIONS)
def _next_panel(left: int) -> int:
    """How many of the vectors that are left are the next panel: 3, or 2 where 3 would leave one alone."""
    return 3 if left == 3 or left > 4 else 2


@numba.njit(**OPTIONS)
def pack(B: Array, n: int, n_end: int, P: Array) -> None:
    """The panels of B (K, N) that begin in columns n…n_end−1. B's rows or its columns lie together."""
    K, N = B.shape
    size = B.itemsize
    lanes = VECTOR_BYTES // size
    b_row, b_column = B.strides[0] // size, B.strides[1] // size
    by_columns = b_row == 1 and b_column != 1
    at_once = K - K % lanes if by_columns else _ROWS_PACKED
    for k in range(0, K, max(1, at_once)):
        rows = min(max(1, at_once), K - k)
        j = 0
        while j < N:
            width = _next_panel((whole_vectors(N, size) - j) // lanes) * lanes
            for column in range(j, j + width if n <= j < n_end else 0, lanes):
                p, b = j * K + k * width + column - j, B.ctypes.data + (k * b_row + column * b_column) * size
                if column + lanes > N or (by_columns and rows < lanes):
                    for i in range(rows):
                        for c in range(lanes):
                            P[p + i * width + c] = B[k + i, column + c] if column + c < N else 0
                elif by_columns:
                    transpose_vectors(P, p, width, b, b_column, rows)
                else:
                    copy_vectors(P, p, width, b, b_row, rows)
            j += width


@compiled("T[:, :], intp, intp, T[::1]")
def _pack(B: Array, n: int, n_end: int, P: Array) -> None:
    pack(B, n, n_end, P)


def column_sums(a: Array) -> Array:
    """a (M, N) -> its columns' sums (N,), each added up from the first row on."""
    a = for_kernel(a)
    sums = np.zeros(a.shape[1], a.dtype)
    threads.share(lambda n, end: _add_columns(a, n, end, sums), len(sums), unit=16, cost=_SUM_COST * len(a))
    return sums


@compiled("T[:, ::1], intp, intp, T[::1]")
def _add_columns(a: Array, n: int, n_end: int, sums: Array) -> None:
    totals = sums[n:n_end]
    for i in range(len(a)):
        row = a[i, n:n_end]
        for j in range(len(totals)):
            totals[j] += row[j]
