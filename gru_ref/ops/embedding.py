"""Rows of a table, one for each token.

    y[i] = W[ids[i]]            dW[v] = Σ dy[i] over all i with ids[i] = v

Repeated ids add up: `dW[ids] += dy` would keep only one of them.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array


def forward(ids: Array, weight: Array) -> tuple[Array, tuple[Any, ...]]:
    """ids (…) integer in 0…V−1, weight (V, E) -> y (…, E), cache (ids, V)."""
    return weight[ids], (ids, weight.shape[0])


def backward(dy: Array, cache: tuple[Any, ...], total: Array | None = None) -> tuple[None, Array]:
    """dy (…, E) -> None for the ids, dweight (V, E), or `total`, where given, to which dweight is added.

    The rows of dy are sorted by id, and each run of equal ids is summed.
    """
    ids, vocab_size = cache
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    dweight = np.zeros((vocab_size, dy.shape[1]), dy.dtype) if total is None else total
    if ids.size:
        order = np.argsort(ids, kind="stable")
        present, starts = np.unique(ids[order], return_index=True)
        dweight[present] += np.add.reduceat(dy[order], starts, axis=0)
    return None, dweight


CASES: dict[str, dict[str, Any]] = {"repeated ids": {}, "time-major": {"lead": (4, 3)}}


def example(
    rng: np.random.Generator, V: int = 6, E: int = 4, lead: tuple[int, ...] = (9,), dtype: Any = np.float64
) -> dict[str, Any]:
    """ids (*lead) below V, more of them than V so that some repeat; weight (V, E)."""
    return {
        "ids": rng.integers(0, V, lead),
        "weight": rng.standard_normal((V, E)).astype(dtype),
    }
