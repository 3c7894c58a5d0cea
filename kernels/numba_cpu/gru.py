"""Twin of gru_ref/ops/gru.py, where the equations are, for the form of PyTorch and cuDNN.

Faster because a thread of the pool takes its sequences of the batch through all steps on its own: U is packed
once for all of them, and the gates of a step are one pass over its arrays with vector instructions. The form
of 2014 and inputs rounded to 16 bits get the definition, as does a single sequence step, where reading U from
memory is all there is to do.
"""

from typing import Any

import numba
import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import FLOATS, OPTIONS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._elementary import sigmoid, tanh
from gru_ref.kernels.numba_cpu._product import (
    column_sums,
    multiply,
    multiply_add,
    packed,
    product,
    whole_vectors,
)
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.ops import gru as definition
from gru_ref.types import Array

_FEW = 16
"""Rows below which packing U costs more than it saves."""


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
    (T, B, _), H = x.shape, weight_hh.shape[1]
    arrays = (x, weight_ih, weight_hh, bias_ih, bias_hh) + (() if h0 is None else (h0,))
    one_dtype = x.dtype in FLOATS and all(a.dtype == x.dtype for a in arrays)
    if not (reset_after and precision == "fp32" and one_dtype and T * B >= _FEW):
        return definition.forward(
            x, h0, weight_ih, weight_hh, bias_ih, bias_hh, reset_after=reset_after, precision=precision
        )
    with threads.at_once():
        gates_x = product(x.reshape(T * B, -1), weight_ih.T).reshape(T, B, 3 * H)
        panels = packed(weight_hh.T)
    h = empty((T + 1, B, H), x.dtype)
    h[0] = 0 if h0 is None else h0
    r, z, n, q = (empty((T, B, H), x.dtype) for _ in range(4))
    bias_ih, bias_hh = for_kernel(bias_ih), for_kernel(bias_hh)
    threads.share(lambda b, end: _steps(gates_x, panels, bias_ih, bias_hh, h, r, z, n, q, b, end), B)
    return h[1:], (x, h, r, z, n, q, weight_ih, weight_hh, h0 is not None, reset_after, precision)


def backward(
    dy: Array, cache: tuple[Any, ...], dh_T: Array | None = None
) -> tuple[Array, Array | None, Array, Array, Array, Array]:
    """As the definition."""
    x, h, r, z, n, q, weight_ih, weight_hh, has_h0, reset_after, precision = cache
    T, B, H = dy.shape
    if not (reset_after and precision == "fp32" and h.dtype == dy.dtype in FLOATS and T * B >= _FEW):
        return definition.backward(dy, cache, dh_T)
    dy = for_kernel(dy)
    dgates_x, dgates_h = empty((T, B, 3 * H), h.dtype), empty((T, B, 3 * H), h.dtype)
    dh = np.zeros((B, H), h.dtype)
    if dh_T is not None:
        dh[...] = dh_T
    panels = packed(weight_hh)
    r, z, n, q, h = (for_kernel(a) for a in (r, z, n, q, h))
    threads.share(lambda b, end: _steps_back(dy, h, r, z, n, q, panels, dgates_x, dgates_h, dh, b, end), B)

    dgates_x, dgates_h = dgates_x.reshape(T * B, -1), dgates_h.reshape(T * B, -1)
    with threads.at_once():
        dx = product(dgates_x, weight_ih).reshape(x.shape)
        dweight_ih = product(dgates_x.T, x.reshape(T * B, -1))
        dweight_hh = product(dgates_h.T, h[:-1].reshape(T * B, -1))
        dbias_ih, dbias_hh = column_sums(dgates_x), column_sums(dgates_h)
    return dx, dh if has_h0 else None, dweight_ih, dweight_hh, dbias_ih, dbias_hh


@compiled(
    "T[:, :, ::1], T[::1], T[::1], T[::1], T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], T[:, :, ::1], "
    "T[:, :, ::1], intp, intp",
    fastmath=("contract",),
)
def _steps(
    gates_x: Array,
    panels: Array,
    bias_ih: Array,
    bias_hh: Array,
    h: Array,
    r: Array,
    z: Array,
    n: Array,
    q: Array,
    b: int,
    end: int,
) -> None:
    """Sequences b…end−1 through all steps: fills their part of h[1:], r, z, n and q."""
    T, _, H = r.shape
    gates_h = np.empty((end - b, whole_vectors(3 * H, h.itemsize)), h.dtype)
    bias = np.zeros(gates_h.shape[1], h.dtype)
    bias[: 3 * H] = bias_hh
    for t in range(T):
        multiply(h[t, b:end], panels, H, bias, gates_h, 3 * H)
        for i in range(b, end):
            _cell(
                gates_x[t, i],
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
    "T[:, :, ::1], T[:, :, ::1], T[:, ::1], intp, intp",
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
    b: int,
    end: int,
) -> None:
    """Sequences b…end−1 back through all steps: fills their part of dgates_x and dgates_h, updates dh."""
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
