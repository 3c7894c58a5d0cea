"""The attention of gru_ref/ops/attention.py in blocks of keys: memory in proportion to T, not to T·S.

Forward keeps, for each query, the largest score m so far, the sum l (`total`) of exp(s − m) and the sum y of
exp(s − m)·v, and corrects both sums where a block J of keys has a larger score (the online softmax of
Milakov and Gimelshein 2018; in blocks, Dao et al. 2022):

    m′ = max(m, max_J s_ij)        c = exp(m − m′)
    l  ← c·l + Σ_J exp(s_ij − m′)
    y  ← c·y + Σ_J exp(s_ij − m′)·keep_ij/(1 − dropout)·v_j
    at the end        y_i = y/l        λ_i = m + ln l

Backward computes a block's scores again, and from them p_ij = exp(s_ij − λ_i). The sum that the softmax's
gradient needs is known before the first block, because y is made of the same terms:

    δ_i = Σ_m p_im dp_im = Σ_m p̃_im (dy_i · v_m) = dy_i · y_i

A query that stands before a block's first key sees none of it: such rows are left out, which is half of the
work. Arguments, shapes and the dropout's mask are those of attention.py; results differ by rounding only. In
fp16 and bf16 that includes the rounding of the products' inputs: exp(s − m) is rounded before it is divided.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gru_ref.ops import attention
from gru_ref.ops.attention import heads_first, is_seen, time_first
from gru_ref.ops.dropout import keep_mask
from gru_ref.ops.matmul import round_to
from gru_ref.types import Array


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
    """q (T, B, N, D), k (S, B, N, D), v (S, B, N, D) -> y (T, B, N, D), cache.

    block: keys that are looked at together. cache = (q (B, N, T, D), k, v (B, N, S, D), y, λ (B, N, T, 1),
    offset, block, precision, (dropout, seed, step, layer)), with q, k and v rounded.
    """
    T, B, N, D = q.shape
    q, k, v = (round_to(heads_first(a), precision) for a in (q, k, v))
    coordinates = (dropout, seed, step, layer)
    result = np.zeros((T, B, N, D), q.dtype)
    y = heads_first(result)
    m = np.full((B, N, T, 1), -np.inf, q.dtype)
    total = np.zeros((B, N, T, 1), q.dtype)
    for i, j in _tiles(T, k.shape[2], offset, block):
        s = _scores(q, k, i, j, offset)
        m_new = np.maximum(m[:, :, i], s.max(axis=-1, keepdims=True))
        e = np.exp(s - m_new)
        c = np.exp(m[:, :, i] - m_new)
        total[:, :, i] = c * total[:, :, i] + e.sum(axis=-1, keepdims=True)
        if dropout:
            e = e * _keep(coordinates, (T, B, N), i, j, e.dtype)
        y[:, :, i] = c * y[:, :, i] + round_to(e, precision) @ v[:, :, j]
        m[:, :, i] = m_new
    total = np.where(total == 0, np.ones_like(total), total)  # 0 where a query sees no key
    y /= total
    return result, (q, k, v, y, m + np.log(total), offset, block, precision, coordinates)


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """dy (T, B, N, D) -> dq (T, B, N, D), dk and dv (S, B, N, D)."""
    q, k, v, y, lam, offset, block, precision, coordinates = cache
    B, N, T, D = q.shape
    scale = 1 / math.sqrt(D)
    dy = round_to(heads_first(dy), precision)
    delta = (dy * y).sum(axis=-1, keepdims=True)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i, j in _tiles(T, k.shape[2], offset, block):
        p = np.exp(_scores(q, k, i, j, offset) - lam[:, :, i])
        # y = p̃ v, p̃ = p ⊙ keep/(1 − dropout)
        dp = dy[:, :, i] @ np.swapaxes(v[:, :, j], -1, -2)
        p_kept = p
        if coordinates[0]:
            keep = _keep(coordinates, (T, B, N), i, j, p.dtype)
            p_kept, dp = p * keep, dp * keep
        dv[:, :, j] = np.swapaxes(round_to(p_kept, precision), -1, -2) @ dy[:, :, i]
        # p = softmax(s)
        ds = round_to(p * (dp - delta[:, :, i]), precision)
        # s = q kᵀ/√D
        dq[:, :, i] += (ds @ k[:, :, j]) * scale
        dk[:, :, j] = (np.swapaxes(ds, -1, -2) @ q[:, :, i]) * scale
    return time_first(dq), time_first(dk), time_first(dv)


def _tiles(T: int, S: int, offset: int, block: int) -> Iterator[tuple[slice, slice]]:
    """The queries that see the first key of a block, and the block, for every block that any query sees."""
    for j in range(0, S, block):
        i = max(0, j - offset)
        if i < T:
            yield slice(i, T), slice(j, min(j + block, S))


def _scores(q: Array, k: Array, i: slice, j: slice, offset: int) -> Array:
    """s of queries i and keys j, −inf where a key is not seen; each query sees at least the first."""
    s = (q[:, :, i] @ np.swapaxes(k[:, :, j], -1, -2)) / math.sqrt(q.shape[-1])
    return np.where(is_seen(range(i.start, i.stop), range(j.start, j.stop), offset), s, -np.inf)


def _keep(coordinates: tuple[Any, ...], shape: tuple[int, ...], i: slice, j: slice, dtype: Any) -> Array:
    """keep_ij/(1 − dropout) of queries i and keys j, (B, N, i, j); shape is (T, B, N)."""
    dropout, seed, step, layer = coordinates
    mask = keep_mask(
        (j.stop - j.start, *shape),
        dropout,
        seed=seed,
        step=step,
        layer=layer,
        start=j.start * math.prod(shape),
    )
    factor: Array = mask[:, i].transpose(2, 3, 1, 0) / dtype.type(1 - dropout)
    return factor


CASES: dict[str, dict[str, Any]] = {case: {"block": 2} | options for case, options in attention.CASES.items()}


def example(rng: np.random.Generator, block: int = 2, **options: Any) -> dict[str, Any]:
    """The example of attention.py, in blocks of `block` keys."""
    return attention.example(rng, **options) | {"block": block}
