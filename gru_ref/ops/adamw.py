"""AdamW (Loshchilov and Hutter 2019), in place on flat arrays.

    g ← s·g          s: grad_scale
    m ← β₁ m + (1 − β₁) g
    v ← β₂ v + (1 − β₂) g²
    θ ← θ − lr · ( m/(1 − β₁^t) / ( √(v/(1 − β₂^t)) + ε ) + λ·θ )

With decoupled=False the decay is L2 instead, g ← g + λ·θ: plain Adam. Which parameters decay is the caller's
choice: it passes them in slices. t counts from 1.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array


def step(
    params: Array,
    grads: Array,
    m: Array,
    v: Array,
    *,
    t: int,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    grad_scale: float = 1.0,
) -> bool:
    """One update of params, m and v (all of one shape) in place.

    Numbers are Python's: one of NumPy's, such as np.float64, would make float32 arithmetic float64. Returns
    whether params and v are finite afterwards: an infinite v would freeze its parameter for ever.
    """
    if grad_scale != 1:
        grads = grad_scale * grads
    if weight_decay and decoupled:
        params *= 1 - lr * weight_decay
    elif weight_decay:
        grads = grads + weight_decay * params
    m *= beta1
    m += (1 - beta1) * grads
    v *= beta2
    v += (1 - beta2) * np.square(grads)
    params -= lr / (1 - beta1**t) * m / (np.sqrt(v / (1 - beta2**t)) + eps)
    return bool(np.isfinite(params).all() and np.isfinite(v).all())


CASES: dict[str, dict[str, Any]] = {
    "decoupled": {},
    "L2": {"decoupled": False},
    "no decay": {"weight_decay": 0.0, "grad_scale": 1.0},
}


def example(rng: np.random.Generator, n: int = 7, dtype: Any = np.float64, **options: Any) -> dict[str, Any]:
    """The second step of n parameters; options: of `step`."""
    params, grads, m, v = rng.standard_normal((4, n)).astype(dtype)
    return {
        "params": params,
        "grads": grads,
        "m": m,
        "v": np.square(v),
        "t": 2,
        "lr": 2e-3,
        "weight_decay": 0.1,
        "grad_scale": 0.3,
    } | options
