"""Softmax cross-entropy of each row, with ignored targets, a padded vocabulary and label smoothing.

    log p = z − max z − log Σ exp(z − max z)                           over the true vocabulary V only
    loss  = (1 − ε)·(−log p[target]) − (ε/V)·Σ_v log p[v]              0 where the target is ignored
    dz    = dloss · (p − (1 − ε)·onehot(target) − ε/V)                 0 in padded columns and ignored rows

The loss comes a row at a time; whoever needs the mean divides the fp64 sum by the number of counted targets
over everything that one optimizer step sees, never a mean of means.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array

IGNORE = -1
"""A target of this value is not counted: its loss and its gradient are 0."""


def forward(
    logits: Array, targets: Array, *, vocab_size: int | None = None, label_smoothing: float = 0.0
) -> tuple[Array, tuple[Any, ...]]:
    """logits (N, P) with P ≥ V columns, targets (N,) in 0…V−1 or IGNORE -> loss (N,), cache.

    cache = (log p (N, V), targets, P, label_smoothing). fp16 logits are computed in fp32.
    Raises ValueError for a target outside the vocabulary.
    """
    padded_size = logits.shape[1]
    V = padded_size if vocab_size is None else vocab_size
    counted = targets != IGNORE
    if np.any(counted & ((targets < 0) | (targets >= V))):
        raise ValueError(f"targets must lie in 0…{V - 1} or be {IGNORE} (ignored)")
    z = logits[:, :V]
    if z.dtype == np.float16:
        z = z.astype(np.float32)
    z = z - z.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    # clip only gives ignored rows a column to read; their loss is masked
    loss = -log_p[np.arange(len(targets)), targets.clip(0)]
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - (label_smoothing / V) * log_p.sum(axis=1)
    return np.where(counted, loss, np.zeros_like(loss)), (log_p, targets, padded_size, label_smoothing)


def backward(dloss: Array, cache: tuple[Any, ...]) -> tuple[Array, None]:
    """dloss (N,) -> dlogits (N, P), None for the targets."""
    log_p, targets, padded_size, label_smoothing = cache
    N, V = log_p.shape
    dz = np.exp(log_p)
    dz[np.arange(N), targets.clip(0)] -= 1 - label_smoothing
    dz -= label_smoothing / V
    dz *= dloss[:, None]
    dz[targets == IGNORE] = 0  # not a product with 0, which would keep a NaN
    if padded_size == V:
        return dz, None
    dlogits = np.zeros((N, padded_size), dz.dtype)
    dlogits[:, :V] = dz
    return dlogits, None


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded vocabulary": {"padding": 3},
    "label smoothing": {"label_smoothing": 0.1, "padding": 2},
}


def example(
    rng: np.random.Generator,
    N: int = 6,
    V: int = 5,
    padding: int = 0,
    label_smoothing: float = 0.0,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """logits (N, V + padding), targets (N,) of which the last is ignored."""
    targets = rng.integers(0, V, N)
    targets[-1] = IGNORE
    return {
        "logits": rng.standard_normal((N, V + padding)).astype(dtype),
        "targets": targets,
        "vocab_size": V,
        "label_smoothing": label_smoothing,
    }
