"""Layer normalisation of the last axis.

    μ = mean x        rstd = 1/√(mean (x − μ)² + ε)        x̂ = (x − μ)·rstd        y = γ ⊙ x̂ + β

    dγ = Σ dy ⊙ x̂        dβ = Σ dy                              (Σ over all leading axes)
    dx̂ = dy ⊙ γ
    dx = rstd · ( dx̂ − mean dx̂ − x̂ · mean (dx̂ ⊙ x̂) )           (mean over the last axis)

The variance is the biased one (division by C), as everywhere in the field. docs/gpt2.md derives dx.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array


def forward(
    x: Array, weight: Array, bias: Array | None = None, eps: float = 1e-5
) -> tuple[Array, tuple[Any, ...]]:
    """x (…, C), weight (C,) γ, bias (C,) β or None -> y (…, C), cache.

    cache = (x̂, rstd (…, 1), γ, whether there is a β).
    """
    centred = x - x.mean(axis=-1, keepdims=True)
    rstd = 1 / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps)
    x_hat = centred * rstd
    y = weight * x_hat
    if bias is not None:
        y = y + bias
    return y, (x_hat, rstd, weight, bias is not None)


def backward(dy: Array, cache: tuple[Any, ...]) -> tuple[Array, Array, Array | None]:
    """dy (…, C) -> dx (…, C), dweight (C,), dbias (C,) or None."""
    x_hat, rstd, weight, has_bias = cache
    C = dy.shape[-1]
    # y = γ ⊙ x̂ + β
    dbias = dy.reshape(-1, C).sum(axis=0) if has_bias else None
    dweight = (dy * x_hat).reshape(-1, C).sum(axis=0)
    dx_hat = dy * weight
    # x̂ = (x − μ)·rstd, where μ and rstd depend on every x of the row
    mean_1 = dx_hat.mean(axis=-1, keepdims=True)
    mean_2 = (dx_hat * x_hat).mean(axis=-1, keepdims=True)
    return rstd * (dx_hat - mean_1 - x_hat * mean_2), dweight, dbias


CASES: dict[str, dict[str, Any]] = {"bias": {}, "no bias": {"bias": False}, "time-major": {"lead": (3, 2)}}


def example(
    rng: np.random.Generator,
    C: int = 7,
    lead: tuple[int, ...] = (5,),
    bias: bool = True,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """x (*lead, C), weight (C,), bias (C,) or None."""
    return {
        "x": (2 * rng.standard_normal((*lead, C)) + 1).astype(dtype),
        "weight": rng.standard_normal(C).astype(dtype),
        "bias": rng.standard_normal(C).astype(dtype) if bias else None,
    }
