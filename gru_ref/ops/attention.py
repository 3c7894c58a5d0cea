"""Causal multi-head attention, each head and each sequence of the batch by itself: the plain statement.

Query i stands at position i + offset and sees the keys j at its own position and before it:

    s_ij = (q_i · k_j)/√D                                    for j ≤ i + offset, else not seen
    p_ij = exp(s_ij − max_j s_ij) / Σ_j exp(s_ij − max_j s_ij)       0 where not seen
    p̃_ij = p_ij · keep_ij/(1 − dropout)                      keep as in gru_ref/ops/dropout.py
    y_i  = Σ_j p̃_ij v_j                                      0 where a query sees no key at all

Backward, through the softmax too (docs/gpt2.md derives every line):

    dv_j  = Σ_i p̃_ij dy_i
    dp_ij = (dy_i · v_j) · keep_ij/(1 − dropout)
    ds_ij = p_ij · (dp_ij − Σ_m p_im dp_im)
    dq_i  = Σ_j ds_ij k_j/√D            dk_j = Σ_i ds_ij q_i/√D

    q (T, B, N, D): T queries, B sequences, N heads, D wide       k (S, B, N, D)    v (S, B, N, D)    y as q

offset is 0 where queries and keys are the same tokens, and with a cache of keys the number of tokens before
the first query. Inputs of the products are rounded as gru_ref/ops/matmul.py says. The draw of keep_ij, of
sequence b and head n, is the one of index ((j·T + i)·B + b)·N + n at (seed, step, layer).

This is the definition that gru_ref/ops/attention_blocked.py, which models use, is compared with: it holds
all T·S probabilities of a head at once.
"""

import math
from typing import Any

import numpy as np

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
) -> tuple[Array, tuple[Any, ...]]:
    """q (T, B, N, D), k (S, B, N, D), v (S, B, N, D) -> y (T, B, N, D), cache.

    cache = (q (B, N, T, D), k, v (B, N, S, D), p (B, N, T, S), keep_ij/(1 − dropout) or None, precision),
    with q, k and v rounded.
    """
    (T, B, N, D), S = q.shape, k.shape[0]
    q, k, v = (round_to(heads_first(a), precision) for a in (q, k, v))
    s = (q @ np.swapaxes(k, -1, -2)) / math.sqrt(D)
    p = softmax(np.where(is_seen(range(T), range(S), offset), s, -np.inf))
    keep = None
    p_kept = p
    if dropout:
        mask = keep_mask((S, T, B, N), dropout, seed=seed, step=step, layer=layer)
        keep = mask.transpose(2, 3, 1, 0) / p.dtype.type(1 - dropout)
        p_kept = p * keep
    y = round_to(p_kept, precision) @ v
    return time_first(y), (q, k, v, p, keep, precision)


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array, Array, Array]:
    """dy (T, B, N, D) -> dq (T, B, N, D), dk and dv (S, B, N, D)."""
    q, k, v, p, keep, precision = cache
    scale = 1 / math.sqrt(q.shape[-1])
    dy = round_to(heads_first(dy), precision)
    # y = p̃ v
    p_kept = p if keep is None else p * keep
    dv = np.swapaxes(round_to(p_kept, precision), -1, -2) @ dy
    dp = dy @ np.swapaxes(v, -1, -2)
    # p̃ = p ⊙ keep/(1 − dropout)
    if keep is not None:
        dp = dp * keep
    # p = softmax(s)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    # s = q kᵀ/√D
    ds = round_to(ds, precision)
    dq = (ds @ k) * scale
    dk = (np.swapaxes(ds, -1, -2) @ q) * scale
    return time_first(dq), time_first(dk), time_first(dv)


def softmax(s: Array) -> Array:
    """exp(s)/Σ exp(s) over the last axis; a row that is −inf throughout gives zeros."""
    largest = s.max(axis=-1, keepdims=True)
    e = np.exp(s - np.where(largest == -np.inf, np.zeros_like(largest), largest))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, np.ones_like(total), total)


def is_seen(queries: range, keys: range, offset: int) -> Array:
    """Whether query i sees key j, for ranges of them: (queries, keys) bool."""
    return np.array(keys) <= np.array(queries)[:, None] + offset


def heads_first(a: Array) -> Array:
    """(T, B, N, D) as (B, N, T, D), a view: the last two axes are a head's matrix."""
    return a.transpose(1, 2, 0, 3)


def time_first(a: Array) -> Array:
    """The inverse of `heads_first`."""
    return a.transpose(2, 0, 1, 3)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "key/value cache": {"T": 2, "S": 5, "offset": 3},
    "queries that see nothing": {"offset": -2},
    "dropout": {"dropout": 0.3},
}


def example(
    rng: np.random.Generator,
    T: int = 4,
    S: int = 4,
    B: int = 2,
    N: int = 2,
    D: int = 3,
    offset: int = 0,
    dropout: float = 0.0,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """q (T, B, N, D), k and v (S, B, N, D), and the dropout's coordinates."""
    return {
        "q": rng.standard_normal((T, B, N, D)).astype(dtype),
        "k": rng.standard_normal((S, B, N, D)).astype(dtype),
        "v": rng.standard_normal((S, B, N, D)).astype(dtype),
        "offset": offset,
        "dropout": dropout,
        "seed": 7,
        "step": 3,
        "layer": 1,
    }
