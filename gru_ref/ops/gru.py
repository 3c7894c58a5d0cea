"""A gated recurrent unit over a whole sequence: one layer, forward and backward through time.

Gates in the order r, z, n; x is the input, h the state before the step, h′ the state after it:

    reset_after=True (PyTorch, cuDNN)                  reset_after=False (Cho et al. 2014)
    r  = σ(W_r x + b_ir + U_r h + b_hr)                the same
    z  = σ(W_z x + b_iz + U_z h + b_hz)                the same
    q  = U_n h + b_hn                                  q  = r ⊙ h
    n  = tanh(W_n x + b_in + r ⊙ q)                    n  = tanh(W_n x + b_in + U_n q + b_hn)
    h′ = (1 − z) ⊙ n + z ⊙ h                           the same

Backward, with da the gradient of a gate's argument (docs/gru.md derives every line):

    da_n = dh′ (1 − z) (1 − n²)                        the same
    da_z = dh′ (h − n) z (1 − z)                       the same
    dq   = da_n r                                      dq   = U_nᵀ da_n
    da_r = da_n q r (1 − r)                            da_r = dq h r (1 − r)
    dh   = dh′ z + U_rᵀ da_r + U_zᵀ da_z + U_nᵀ dq     dh   = dh′ z + U_rᵀ da_r + U_zᵀ da_z + dq r

    x (T, B, I)   h0 (B, H)   y (T, B, H)   weight_ih (3H, I) = [W_r; W_z; W_n]   bias_ih (3H,)
                                            weight_hh (3H, H) = [U_r; U_z; U_n]   bias_hh (3H,)

Time comes first, so a step's slice is contiguous. Products with x and all weight gradients are one product
over the T·B rows, outside the loop. Inputs of products are rounded as gru_ref/ops/matmul.py says.
"""

from typing import Any

import numpy as np

from gru_ref.ops.matmul import round_to
from gru_ref.types import Array


def sigmoid(x: Array) -> Array:
    """σ(x) = 1/(1 + e⁻ˣ), so written that the exponential never overflows and small values keep digits."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, np.ones_like(e), e) / (1 + e)


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
    """x (T, B, I), h0 (B, H) or None for zeros, weights and biases as above -> y (T, B, H), cache.

    The last state is y[-1]. cache = (x, h (T+1, B, H) with h[0] = h0, r, z, n, q each (T, B, H), weight_ih,
    weight_hh, whether h0 was given, reset_after, precision), with x and the weights rounded.
    """
    (T, B, _), H = x.shape, weight_hh.shape[1]
    x, weight_ih, weight_hh = (round_to(a, precision) for a in (x, weight_ih, weight_hh))
    cell = _cell_reset_after if reset_after else _cell_reset_before
    gates_x = (x.reshape(T * B, -1) @ weight_ih.T + bias_ih).reshape(T, B, 3 * H)
    h = np.empty((T + 1, B, H), gates_x.dtype)
    h[0] = 0 if h0 is None else h0
    r, z, n, q = (np.empty((T, B, H), gates_x.dtype) for _ in range(4))
    for t in range(T):
        r[t], z[t], n[t], q[t] = cell(gates_x[t], h[t], weight_hh, bias_hh, precision)
        h[t + 1] = (1 - z[t]) * n[t] + z[t] * h[t]
    return h[1:], (x, h, r, z, n, q, weight_ih, weight_hh, h0 is not None, reset_after, precision)


def _cell_reset_after(
    gates_x: Array, h: Array, weight_hh: Array, bias_hh: Array, precision: str
) -> tuple[Array, Array, Array, Array]:
    """gates_x (B, 3H) = W x + b_i, h (B, H) -> r, z, n, q, each (B, H)."""
    H = h.shape[1]
    gates_h = round_to(h, precision) @ weight_hh.T + bias_hh
    rz = sigmoid(gates_x[:, : 2 * H] + gates_h[:, : 2 * H])
    r, z, q = rz[:, :H], rz[:, H:], gates_h[:, 2 * H :]
    n = np.tanh(gates_x[:, 2 * H :] + r * q)
    return r, z, n, q


def _cell_reset_before(
    gates_x: Array, h: Array, weight_hh: Array, bias_hh: Array, precision: str
) -> tuple[Array, Array, Array, Array]:
    """The same arguments and results for the form of 2014."""
    H = h.shape[1]
    gates_h = round_to(h, precision) @ weight_hh[: 2 * H].T + bias_hh[: 2 * H]
    rz = sigmoid(gates_x[:, : 2 * H] + gates_h)
    r, z = rz[:, :H], rz[:, H:]
    q = r * h
    n = np.tanh(gates_x[:, 2 * H :] + round_to(q, precision) @ weight_hh[2 * H :].T + bias_hh[2 * H :])
    return r, z, n, q


def backward(
    dy: Array, cache: tuple[Any, ...], dh_T: Array | None = None
) -> tuple[Array, Array | None, Array, Array, Array, Array]:
    """dy (T, B, H), and dh_T (B, H) where the last state was used by itself ->
    dx (T, B, I), dh0 (B, H) or None, dweight_ih, dweight_hh, dbias_ih, dbias_hh."""
    x, h, r, z, n, q, weight_ih, weight_hh, has_h0, reset_after, precision = cache
    T, B, H = dy.shape
    cell = _cell_reset_after_backward if reset_after else _cell_reset_before_backward
    dgates_x = np.empty((T, B, 3 * H), h.dtype)  # da_r, da_z, da_n
    dgates_h = np.empty((T, B, 3 * H), h.dtype)  # da_r, da_z, and what reaches U_n's product
    dh = np.zeros((B, H), h.dtype) if dh_T is None else dh_T
    for t in reversed(range(T)):
        dh = dy[t] + dh  # y[t] is h′ itself, and the step after it used it too
        # h′ = (1 − z) ⊙ n + z ⊙ h
        da_n = dh * (1 - z[t]) * (1 - n[t] ** 2)
        da_z = dh * (h[t] - n[t]) * z[t] * (1 - z[t])
        dgates_x[t, :, H : 2 * H] = dgates_h[t, :, H : 2 * H] = da_z
        dgates_x[t, :, 2 * H :] = da_n
        dh = dh * z[t] + cell(da_n, h[t], r[t], q[t], weight_hh, dgates_h[t], precision)
        dgates_x[t, :, :H] = dgates_h[t, :, :H]

    # gates_x = W x + b_i
    dbias_ih = dgates_x.reshape(T * B, -1).sum(axis=0)
    dgates_x = round_to(dgates_x, precision).reshape(T * B, -1)
    dweight_ih = dgates_x.T @ x.reshape(T * B, -1)
    dx = (dgates_x @ weight_ih).reshape(x.shape)

    # gates_h = U h + b_h, where U_n multiplies r ⊙ h in the form of 2014
    dbias_hh = dgates_h.reshape(T * B, -1).sum(axis=0)
    dgates_h = round_to(dgates_h, precision).reshape(T * B, -1)
    h_before = round_to(h[:-1], precision).reshape(T * B, -1)
    if reset_after:
        dweight_hh = dgates_h.T @ h_before
    else:
        reset_h = round_to(q, precision).reshape(T * B, -1)
        dweight_hh = np.concatenate([dgates_h[:, : 2 * H].T @ h_before, dgates_h[:, 2 * H :].T @ reset_h])
    return dx, dh if has_h0 else None, dweight_ih, dweight_hh, dbias_ih, dbias_hh


def _cell_reset_after_backward(
    da_n: Array, h: Array, r: Array, q: Array, weight_hh: Array, dgates_h: Array, precision: str
) -> Array:
    """Writes da_r and dq to dgates_h, whose middle is da_z already; returns what U passes to dh."""
    H = r.shape[1]
    # n = tanh(W_n x + b_in + r ⊙ q)
    dgates_h[:, 2 * H :] = da_n * r
    dgates_h[:, :H] = da_n * q * r * (1 - r)
    # gates_h = U h + b_h
    return round_to(dgates_h, precision) @ weight_hh


def _cell_reset_before_backward(
    da_n: Array, h: Array, r: Array, q: Array, weight_hh: Array, dgates_h: Array, precision: str
) -> Array:
    """Writes da_r and da_n to dgates_h, whose middle is da_z already; returns what U and q pass to dh."""
    H = r.shape[1]
    # n = tanh(W_n x + b_in + U_n q + b_hn)
    dgates_h[:, 2 * H :] = da_n
    dq = round_to(da_n, precision) @ weight_hh[2 * H :]
    # q = r ⊙ h
    dgates_h[:, :H] = dq * h * r * (1 - r)
    return round_to(dgates_h[:, : 2 * H], precision) @ weight_hh[: 2 * H] + dq * r


CASES: dict[str, dict[str, Any]] = {
    "reset_after": {},
    "reset_before": {"reset_after": False},
    "reset_after, no h0": {"h0": False},
    "reset_before, no h0": {"reset_after": False, "h0": False},
    "one step": {"T": 1},
}


def example(
    rng: np.random.Generator,
    T: int = 5,
    B: int = 3,
    I: int = 4,  # noqa: E741 (the field's letter for the input width)
    H: int = 6,
    h0: bool = True,
    reset_after: bool = True,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """Non-zero biases for every gate: zero ones hide a wrong order."""

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype)

    return {
        "x": normal(T, B, I),
        "h0": normal(B, H) if h0 else None,
        "weight_ih": normal(3 * H, I) / 2,
        "weight_hh": normal(3 * H, H) / 2,
        "bias_ih": normal(3 * H),
        "bias_hh": normal(3 * H),
        "reset_after": reset_after,
    }
