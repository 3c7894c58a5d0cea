"""Twin of gru_ref/ops/attention_blocked.py, where the equations are.

Faster because a thread of the pool computes one head of one sequence after the other, with the scores of a
few queries at a time in the CPU's cache, and only those of keys that are seen. Inputs rounded to 16 bits get
the definition.
"""

import math
from typing import Any

import numba
import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu import _philox as philox
from gru_ref.kernels.numba_cpu._compile import FLOATS, OPTIONS, compiled, for_kernel
from gru_ref.kernels.numba_cpu._elementary import exp
from gru_ref.kernels.numba_cpu._product import multiply, multiply_add, pack, whole_vectors
from gru_ref.kernels.numba_cpu._tile import VECTOR_BYTES, copy_vectors
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.ops import attention_blocked as definition
from gru_ref.ops.attention import heads_first
from gru_ref.types import Array

_COST = 0.5
"""Nanoseconds a number of a key and of its value, for one query."""
_QUERIES = 32
"""Queries whose scores are computed together."""


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    offset: int = 0,
    precision: str = "fp32",
    dropout: float = 0.0,
    seed: int = 0,
    step: int = 0,
    layer: int = 0,
    block: int = 64,
) -> tuple[Array, tuple[Any, ...]]:
    """As the definition; `block` is kept for its backward."""
    (T, B, N, D), S = q.shape, len(k)
    fit = q.shape[1:] == k.shape[1:] and k.shape == v.shape
    one_dtype = q.dtype == k.dtype == v.dtype and q.dtype in FLOATS
    if T == 1 and fit and one_dtype and precision == "fp32" and not dropout and 0 < S <= offset + 1:
        one_q, one_k, one_v = (for_kernel(a).reshape(len(a), B * N, D) for a in (q, k, v))
        y, lam = np.empty((1, B, N, D), q.dtype), np.empty((B, N, 1, 1), q.dtype)
        y_and_lam = y.reshape(B * N, D), lam.reshape(-1)
        threads.share(
            lambda i, end: _one_query(one_q[0], one_k, one_v, *y_and_lam, i, end), B * N, cost=_COST * S * D
        )
        q, k, v = (heads_first(a) for a in (q, k, v))
        return y, (q, k, v, heads_first(y), lam, offset, block, precision, (dropout, seed, step, layer))
    drawn = philox.fits(S * T * B * N, seed, step, layer, 0) if dropout else True
    if precision != "fp32" or not drawn or not fit or not one_dtype or T < 2 or not S:
        return definition.forward(
            q,
            k,
            v,
            offset=offset,
            precision=precision,
            dropout=dropout,
            seed=seed,
            step=step,
            layer=layer,
            block=block,
        )
    q, k, v = (heads_first(_last_axis_contiguous(a)) for a in (q, k, v))
    y, lam = empty((T, B, N, D), q.dtype), np.empty((B, N, T, 1), q.dtype)
    mask = _mask(dropout, seed, step, layer)
    threads.share(lambda i, end: _heads(q, k, v, offset, *mask, y, lam, i, end), B * N)
    return y, (q, k, v, heads_first(y), lam, offset, block, precision, (dropout, seed, step, layer))


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """As the definition."""
    q, k, v, y, lam, offset, _, precision, (dropout, seed, step, layer) = cache
    B, N, T, D = q.shape
    one_dtype = all(a.dtype == dy.dtype for a in (q, k, v, y, lam)) and dy.dtype in FLOATS
    drawn = philox.fits(B * N * T * k.shape[2], seed, step, layer, 0) if dropout else True
    fit = dy.shape == (T, B, N, D) and k.shape == v.shape
    if precision != "fp32" or not drawn or not fit or not one_dtype or T < 2:
        return definition.backward(dy, cache)
    dy = heads_first(_last_axis_contiguous(dy))
    dq, dk, dv = (empty((a.shape[2], B, N, D), dy.dtype) for a in (q, k, v))
    mask = _mask(dropout, seed, step, layer)
    threads.share(lambda i, end: _heads_back(dy, q, k, v, lam, offset, *mask, dq, dk, dv, i, end), B * N)
    return dq, dk, dv


def _mask(dropout: float, seed: int, step: int, layer: int) -> tuple[float, int, int, int, int, int]:
    """1 − dropout, the least draw that is kept, 0 for no dropout, and the coordinates of draws."""
    return 1 - dropout, philox.bound(dropout), *philox.coordinates(seed, step, layer)


def _last_axis_contiguous(a: Array) -> Array:
    """As kernels read it: a number after the other along D, any strides else; a copy only where it is not."""
    return a if a.strides[-1] == a.itemsize and a.flags.writeable and a.flags.aligned else a.copy()


@compiled(
    "T[:, :, :, :], T[:, :, :, :], T[:, :, :, :], intp, T, intp, intp, intp, intp, intp, "
    "T[:, :, :, ::1], T[:, :, :, ::1], intp, intp",
    fastmath=("contract", "reassoc"),
)
def _heads(
    q: Array,
    k: Array,
    v: Array,
    offset: int,
    kept: float,
    bound: int,
    key_0: int,
    key_1: int,
    layer: int,
    step: int,
    y: Array,
    lam: Array,
    first: int,
    end: int,
) -> None:
    """Heads first…end−1, counted over sequences and heads: fills y (T, B, N, D) and λ (B, N, T, 1)."""
    N, T, D = q.shape[1:]
    S = k.shape[2]
    S_wide, D_wide = whole_vectors(S, q.itemsize), whole_vectors(D, q.itemsize)
    keys, values = np.empty(D * S_wide, q.dtype), np.empty(S * D_wide, q.dtype)
    s, some_y = np.empty((_QUERIES, S_wide), q.dtype), np.empty((_QUERIES, D_wide), q.dtype)
    zeros, shares = np.zeros(S_wide + D_wide, q.dtype), np.zeros(_QUERIES, q.dtype)
    draws, scale = np.empty(S, np.uint32), _scale(q, D)
    for head in range(first, end):
        b, n = head // N, head % N
        pack(k[b, n].T, 0, S, keys)
        pack(v[b, n], 0, D, values)
        for i in range(0, T, _QUERIES):
            rows = min(_QUERIES, T - i)
            seen = max(0, min(S, i + rows + offset))  # keys that the last of these queries sees
            multiply(q[b, n, i : i + rows], keys, D, zeros, s[:rows], seen)
            for r in range(rows):
                own = max(0, min(S, i + r + offset + 1))
                lam[b, n, i + r, 0], shares[r] = _softmax(s[r], scale, own, seen)
                if bound:
                    _draws((key_0, key_1, layer, step), q.shape, b, n, i + r, draws[:own])
                    _drop(s[r], draws[:own], bound, kept)
            multiply(s[:rows, :seen], values, S, zeros, some_y[:rows], D if seen else 0)
            for r in range(rows):
                y_row, share = some_y[r], shares[r]
                for d in range(D):
                    y_row[d] = y_row[d] * share if seen else zeros[0]
            _put(some_y[:rows], y, i, b, n)


@compiled(
    "T[:, ::1], T[:, :, ::1], T[:, :, ::1], T[:, ::1], T[::1], intp, intp", fastmath=("contract", "reassoc")
)
def _one_query(q: Array, k: Array, v: Array, y: Array, lam: Array, first: int, end: int) -> None:
    """A query that sees all keys, of heads first…end−1: q and y (heads, D), k and v (S, heads, D).

    Token by token, all heads, as they lie in memory: reading them is the work.
    """
    S, _, D = k.shape
    s, scale = np.empty((end - first, S), q.dtype), _scale(q, D)
    for j in range(S):
        for head in range(first, end):
            key, query, total = k[j, head], q[head], q.dtype.type(0)
            for d in range(D):
                total += key[d] * query[d]
            s[head - first, j] = total
    for head in range(first, end):
        lam[head], share = _softmax(s[head - first], scale, S, S)
        s[head - first] *= share
        y[head] = 0
    for j in range(S):
        for head in range(first, end):
            value, p, out = v[j, head], s[head - first, j], y[head]
            for d in range(D):
                out[d] += p * value[d]


@numba.njit(**OPTIONS)
def _draws(
    coordinates: tuple[int, ...], shape: tuple[int, ...], b: int, n: int, i: int, result: Array
) -> None:
    """Those of p_ij for j = 0, 1, …, which have the indices ((j·T + i)·B + b)·N + n; shape (B, N, T, D)."""
    B, N, T, _ = shape
    philox.draws_apart(*coordinates, (i * B + b) * N + n, T * B * N, result)


@numba.njit(**OPTIONS)
def _drop(row: Array, draws: Array, bound: int, kept: float) -> None:
    """p̃ of p or dp of dp̃: times 0 where the draw is too small, which NaN survives, over 1 − dropout."""
    zero, one = row.dtype.type(0), row.dtype.type(1)
    for j in range(len(draws)):
        row[j] = row[j] * (one if np.int64(draws[j]) >= bound else zero) / kept


@numba.njit(**OPTIONS)
def _put(rows: Array, target: Array, i: int, b: int, n: int) -> None:
    """target[i + r, b, n] ← rows[r] without what fills up its vectors; target is contiguous along D."""
    D, size = target.shape[3], target.itemsize
    lanes = VECTOR_BYTES // size
    first = (i * target.strides[0] + b * target.strides[1] + n * target.strides[2]) // size
    whole = D - D % lanes
    for d in range(0, whole, lanes):
        source = rows.ctypes.data + d * size
        copy_vectors(target, first + d, target.strides[0] // size, source, rows.shape[1], len(rows))
    for r in range(len(rows)):
        for d in range(whole, D):
            target[i + r, b, n, d] = rows[r, d]


@numba.njit(**OPTIONS)
def _scale(a: Array, D: int) -> float:
    """1/√D as a's dtype."""
    return a.dtype.type(1 / math.sqrt(D))


@numba.njit(**OPTIONS, fastmath={"contract", "reassoc"})
def _softmax(s: Array, scale: float, own: int, seen: int) -> tuple[float, float]:
    """s → e^(s·scale − top) of the `own` keys that a query sees, 0 up to `seen`; λ, 1/Σ."""
    T = s.dtype.type
    if own == 0:
        s[:seen] = 0
        return T(-np.inf), T(0)
    top = _largest(s[:own]) * scale
    total = T(0)
    for j in range(seen):  # whole vectors mostly, which `own` are not
        e = exp(s[j] * scale - top)
        s[j] = e if j < own else T(0)
        total += s[j]
    return top + T(math.log(total)), T(1) / total


@numba.njit(**OPTIONS, fastmath={"nnan", "nsz"})
def _largest(s: Array) -> float:
    """The largest; anything where one is NaN, whose e^s makes the sum NaN all the same."""
    top = s[0]
    for j in range(1, len(s)):
        top = s[j] if s[j] > top else top
    return top


@compiled(
    "T[:, :, :, :], T[:, :, :, :], T[:, :, :, :], T[:, :, :, :], T[:, :, :, ::1], intp, T, intp, intp, intp, "
    "intp, intp, T[:, :, :, ::1], T[:, :, :, ::1], T[:, :, :, ::1], intp, intp",
    fastmath=("contract", "reassoc"),
)
def _heads_back(
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    lam: Array,
    offset: int,
    kept: float,
    bound: int,
    key_0: int,
    key_1: int,
    layer: int,
    step: int,
    dq: Array,
    dk: Array,
    dv: Array,
    first: int,
    end: int,
) -> None:
    """Heads first…end−1: fills their part of dq (T, B, N, D), dk and dv (S, B, N, D)."""
    N, T, D = q.shape[1:]
    S = k.shape[2]
    S_wide, D_wide = whole_vectors(S, q.itemsize), whole_vectors(D, q.itemsize)
    by_key, by_value = np.empty(D * S_wide, q.dtype), np.empty(D * S_wide, q.dtype)
    keys = np.empty(S * D_wide, q.dtype)
    some_q, some_dy = np.empty(_QUERIES * D_wide, q.dtype), np.empty(_QUERIES * D_wide, q.dtype)
    p, ds = np.empty((_QUERIES, S_wide), q.dtype), np.empty((_QUERIES, S_wide), q.dtype)
    some_dq = np.empty((_QUERIES, D_wide), q.dtype)
    head_dk, head_dv = np.empty((S, D_wide), q.dtype), np.empty((S, D_wide), q.dtype)
    zeros = np.zeros(S_wide + D_wide, q.dtype)
    draws, scale = np.empty(S, np.uint32), _scale(q, D)
    for head in range(first, end):
        b, n = head // N, head % N
        pack(k[b, n].T, 0, S, by_key)
        pack(v[b, n].T, 0, S, by_value)
        pack(k[b, n], 0, D, keys)
        head_dk[:] = 0
        head_dv[:] = 0
        for i in range(0, T, _QUERIES):
            rows = min(_QUERIES, T - i)
            seen = max(0, min(S, i + rows + offset))
            if not seen:
                dq[i : i + rows, b, n] = 0
                continue
            some_queries, dy_of_them = q[b, n, i : i + rows], dy[b, n, i : i + rows]
            multiply(some_queries, by_key, D, zeros, p[:rows], seen)
            # y = p v
            multiply(dy_of_them, by_value, D, zeros, ds[:rows], seen)
            # p = softmax(s)
            for r in range(rows):
                own = max(0, min(S, i + r + offset + 1))
                if bound:
                    _draws((key_0, key_1, layer, step), q.shape, b, n, i + r, draws[:own])
                    _drop(ds[r], draws[:own], bound, kept)
                _softmax_back(p[r], ds[r], lam[b, n, i + r, 0], scale, own, seen)
                if bound:
                    _drop(p[r], draws[:own], bound, kept)
            # s = q kᵀ/√D
            multiply(ds[:rows, :seen], keys, S, zeros, some_dq[:rows], D)
            _put(some_dq[:rows], dq, i, b, n)
            pack(some_queries, 0, D, some_q)
            pack(dy_of_them, 0, D, some_dy)
            multiply_add(ds[:rows, :seen].T, some_q, rows, head_dk[:seen])
            multiply_add(p[:rows, :seen].T, some_dy, rows, head_dv[:seen])
        _put(head_dk, dk, 0, b, n)
        _put(head_dv, dv, 0, b, n)


@numba.njit(**OPTIONS, fastmath={"contract", "reassoc"})
def _softmax_back(p: Array, ds: Array, lam: float, scale: float, own: int, seen: int) -> None:
    """p: √D·s → probabilities; ds: dp → ds/√D; both 0 for the keys from `own` to `seen`, which are not seen.

    Δ = Σ p ⊙ dp here, which is the definition's Σ dy ⊙ y: these rows are in the cache.
    """
    zero = p.dtype.type(0)
    delta = zero
    for j in range(seen):
        e = exp(p[j] * scale - lam)
        p[j] = e if j < own else zero
        delta += e * ds[j] if j < own else zero
    for j in range(seen):
        ds[j] = p[j] * (ds[j] - delta) * scale if j < own else zero
