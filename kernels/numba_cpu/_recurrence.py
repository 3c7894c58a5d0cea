"""The recurrence of gru_ref/ops/gru.py in the form of PyTorch and cuDNN, for the twins of a GRU layer.

A thread of the pool takes its sequences of the batch through all steps on its own: U is packed once for all
of them, and the gates of a step are one pass over its arrays with vector instructions. A first state of zeros
is not multiplied. Not here: the products with the input and with gradients of weights.
"""

import numba
import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import FLOATS, OPTIONS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._elementary import sigmoid, tanh
from gru_ref.kernels.numba_cpu._product import multiply, multiply_add, packed, product, whole_vectors
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.types import Array

_FEW = 16
"""Rows below which packing U costs more than it saves."""


def takes(
    rows: int,
    B: int,
    x: Array,
    h0: Array | None,
    weight_ih: Array,
    weight_hh: Array,
    bias_ih: Array,
    bias_hh: Array,
) -> bool:
    """Whether the kernels take this layer for B sequences, and the rows of x are not too few.

    They are compiled for arrays of one dtype, and would read beyond one whose shape does not fit.
    """
    H = weight_hh.shape[-1]
    return (
        _take(rows, x, h0, weight_ih, weight_hh, bias_ih, bias_hh)
        and weight_hh.shape == (3 * H, H)
        and len(weight_ih) == 3 * H
        and bias_ih.shape == bias_hh.shape == (3 * H,)
        and (h0 is None or h0.shape == (B, H))
    )


def takes_back(dy: Array, dh_T: Array | None, h: Array, *weights: Array) -> bool:
    """Whether the kernels take the gradients of h[1:] (T, B, H) and of its last state."""
    y = h[1:]
    fit = dy.shape == y.shape and (dh_T is None or dh_T.shape == y.shape[1:])
    return fit and _take(len(y) * y.shape[1], dy, h, *weights)


def _take(rows: int, *arrays: Array | None) -> bool:
    dtypes = {a.dtype for a in arrays if a is not None}
    return rows >= _FEW and len(dtypes) == 1 and dtypes < set(FLOATS)


def steps(
    gates_x: Array, row: Array, h0: Array | None, panels: Array, bias_ih: Array, bias_hh: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """gates_x (N, 3H) = W x without bias, row (T, B) its row for each step and sequence, h0 (B, H) or None
    for zeros, panels: the packed Uᵀ -> h (T+1, B, H) from h0 on, r, z, n, q (T, B, H)."""
    (T, B), H = row.shape, gates_x.shape[1] // 3
    h = empty((T + 1, B, H), gates_x.dtype)
    h[0] = 0 if h0 is None else h0
    r, z, n, q = (empty((T, B, H), gates_x.dtype) for _ in range(4))
    gates_x, row = for_kernel(gates_x), for_kernel(row, np.intp)
    bias_ih, bias_hh = for_kernel(bias_ih), for_kernel(bias_hh)
    first = 1 if h0 is None and T > 1 else 0
    threads.share(
        lambda b, end: _steps(gates_x, row, panels, bias_ih, bias_hh, h, r, z, n, q, first, b, end), B
    )
    return h, r, z, n, q


def steps_back(
    dy: Array,
    dh_T: Array | None,
    h: Array,
    r: Array,
    z: Array,
    n: Array,
    q: Array,
    weight_hh: Array,
    has_h0: bool,
) -> tuple[Array, Array, Array | None]:
    """dy (T, B, H), dh_T (B, H) or None, what `steps` gave, U, whether there was an h0 ->
    dgates_x, dgates_h (T·B, 3H), dh0 (B, H) or None."""
    T, B, H = dy.shape
    dgates_x, dgates_h = empty((T, B, 3 * H), h.dtype), empty((T, B, 3 * H), h.dtype)
    dh = np.zeros((B, H), h.dtype)
    if dh_T is not None:
        dh[...] = dh_T
    panels = packed(weight_hh)
    dy, r, z, n, q, h = (for_kernel(a) for a in (dy, r, z, n, q, h))
    first = 0 if has_h0 else 1
    threads.share(
        lambda b, end: _steps_back(dy, h, r, z, n, q, panels, dgates_x, dgates_h, dh, first, b, end), B
    )
    return dgates_x.reshape(T * B, -1), dgates_h.reshape(T * B, -1), dh if has_h0 else None


def weight_gradient(dgates_h: Array, h: Array, has_h0: bool) -> Array:
    """dgates_h (T·B, 3H), h (T+1, B, H) -> dU (3H, H): their product, without rows where h is zero."""
    first = 0 if has_h0 else 1
    before = h[first:-1]
    return product(dgates_h[first * h.shape[1] :].T, before.reshape(-1, h.shape[2]))


@compiled(
    "T[:, ::1], intp[:, ::1], T[::1], T[::1], T[::1], T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], "
    "T[:, :, ::1], T[:, :, ::1], intp, intp, intp",
    fastmath=("contract",),
)
def _steps(
    gates_x: Array,
    row: Array,
    panels: Array,
    bias_ih: Array,
    bias_hh: Array,
    h: Array,
    r: Array,
    z: Array,
    n: Array,
    q: Array,
    first: int,
    b: int,
    end: int,
) -> None:
    """Sequences b…end−1 through all steps: fills their part of h[1:], r, z, n and q.

    first: the first step whose state is multiplied; before it the state is zero.
    """
    T, _, H = r.shape
    gates_h = np.empty((end - b, whole_vectors(3 * H, h.itemsize)), h.dtype)
    bias = np.zeros(gates_h.shape[1], h.dtype)
    bias[: 3 * H] = bias_hh
    for t in range(T):
        if t >= first:
            multiply(h[t, b:end], panels, H, bias, gates_h, 3 * H)
        else:
            gates_h[:] = bias
        for i in range(b, end):
            _cell(
                gates_x[row[t, i]],
                bias_ih,
                gates_h[i - b],
                h[t, i],
                h[t + 1, i],
                r[t, i],
                z[t, i],
                n[t, i],
                q[t, i],
            )


@numba.njit(**OPTIONS, fastmath={"contract"})
def _cell(
    gates_x: Array,
    bias_ih: Array,
    gates_h: Array,
    h: Array,
    h_next: Array,
    r: Array,
    z: Array,
    n: Array,
    q: Array,
) -> None:
    """gates_x is W x without its bias, which is added here rather than in a pass of its own."""
    H = len(h)
    one = h.dtype.type(1)
    for j in range(H):
        r_j = sigmoid(gates_x[j] + bias_ih[j] + gates_h[j])
        z_j = sigmoid(gates_x[H + j] + bias_ih[H + j] + gates_h[H + j])
        q_j = gates_h[2 * H + j]
        n_j = tanh(gates_x[2 * H + j] + bias_ih[2 * H + j] + r_j * q_j)
        h_next[j] = (one - z_j) * n_j + z_j * h[j]
        r[j] = r_j
        z[j] = z_j
        n[j] = n_j
        q[j] = q_j


@compiled(
    "T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], T[::1], "
    "T[:, :, ::1], T[:, :, ::1], T[:, ::1], intp, intp, intp",
    fastmath=("contract",),
)
def _steps_back(
    dy: Array,
    h: Array,
    r: Array,
    z: Array,
    n: Array,
    q: Array,
    panels: Array,
    dgates_x: Array,
    dgates_h: Array,
    dh: Array,
    first: int,
    b: int,
    end: int,
) -> None:
    """Sequences b…end−1 back through all steps: fills their part of dgates_x and dgates_h, updates dh.

    first: the first step whose state has a gradient that is wanted.
    """
    T, _, H = r.shape
    wide_dh = np.zeros((end - b, whole_vectors(H, h.itemsize)), h.dtype)
    for i in range(b, end):
        for j in range(H):
            wide_dh[i - b, j] = dh[i, j]
    for t in range(T - 1, -1, -1):
        for i in range(b, end):
            into = dgates_x[t, i], dgates_h[t, i], wide_dh[i - b]
            _cell_back(dy[t, i], h[t, i], r[t, i], z[t, i], n[t, i], q[t, i], *into)
        # gates_h = U h + b_h
        if t >= first:
            multiply_add(dgates_h[t, b:end], panels, 3 * H, wide_dh)
    for i in range(b, end):
        for j in range(H):
            dh[i, j] = wide_dh[i - b, j]


@numba.njit(**OPTIONS, fastmath={"contract"})
def _cell_back(
    dy: Array, h: Array, r: Array, z: Array, n: Array, q: Array, dgates_x: Array, dgates_h: Array, dh: Array
) -> None:
    """dh holds what later steps pass back to h′, and then what h′ = (1 − z) ⊙ n + z ⊙ h passes to h."""
    H = len(h)
    one = h.dtype.type(1)
    for j in range(H):
        r_j, z_j, n_j = r[j], z[j], n[j]
        dh_j = dy[j] + dh[j]
        # h′ = (1 − z) ⊙ n + z ⊙ h
        da_n = dh_j * (one - z_j) * (one - n_j * n_j)
        da_z = dh_j * (h[j] - n_j) * z_j * (one - z_j)
        dh[j] = dh_j * z_j
        # n = tanh(W_n x + b_in + r ⊙ q)
        da_r = da_n * q[j] * r_j * (one - r_j)
        dgates_x[j] = da_r
        dgates_h[j] = da_r
        dgates_x[H + j] = da_z
        dgates_h[H + j] = da_z
        dgates_x[2 * H + j] = da_n
        dgates_h[2 * H + j] = da_n * r_j
