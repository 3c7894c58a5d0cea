"""Nadam: Adam with Nesterov momentum (Dozat 2016), in place on flat arrays.

    μ_t = β₁ (1 − 0.96^(tψ)/2)       ψ = 0.004 (torch), 1 (keras);  μ_t = β₁ for every t (constant)
    Π_t = μ_1 μ_2 … μ_t
    g   ← s·g          s: grad_scale
    m   ← β₁ m + (1 − β₁) g
    v   ← β₂ v + (1 − β₂) g²
    θ   ← θ − lr · [ (1 − μ_t)/(1 − Π_t) · g + μ_{t+1}/(1 − Π_t μ_{t+1}) · m ] / ( √(v/(1 − β₂^t)) + ε )

Weight decay λ: decoupled, θ ← θ − lr·λ·θ before the update, or L2, g ← g + λ·θ. Which parameters decay is the
caller's choice: it passes them in slices. t counts from 1. Π_t is state: it belongs in the checkpoint, and it
advances once a step, not once a tensor.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array

MOMENTUM_DECAY = {"torch": 0.004, "keras": 1.0, "constant": None}


def momentum(t: int, beta1: float = 0.9, variant: str = "torch") -> float:
    """μ_t of step t."""
    psi = MOMENTUM_DECAY[variant]
    return beta1 if psi is None else beta1 * (1.0 - 0.5 * 0.96 ** (t * psi))


def step(
    params: Array,
    grads: Array,
    m: Array,
    v: Array,
    *,
    t: int,
    mu_product: float,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    variant: str = "torch",
    grad_scale: float = 1.0,
) -> bool:
    """One update of params, m and v (all of one shape) in place; mu_product is Π_t, with this step's μ_t.

    Numbers are Python's: one of NumPy's, such as np.float64, would make float32 arithmetic float64. Returns
    whether params and v are finite afterwards: an infinite v would freeze its parameter for ever.
    """
    mu, mu_next = momentum(t, beta1, variant), momentum(t + 1, beta1, variant)
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
    direction = (1 - mu) / (1 - mu_product) * grads + mu_next / (1 - mu_product * mu_next) * m
    params -= lr * direction / (np.sqrt(v / (1 - beta2**t)) + eps)
    return bool(np.isfinite(params).all() and np.isfinite(v).all())


CASES: dict[str, dict[str, Any]] = {
    "torch": {},
    "keras": {"variant": "keras"},
    "constant": {"variant": "constant"},
    "L2": {"decoupled": False},
    "no decay": {"weight_decay": 0.0, "grad_scale": 1.0},
}


def example(rng: np.random.Generator, n: int = 7, dtype: Any = np.float64, **options: Any) -> dict[str, Any]:
    """The second step of n parameters; options: of `step`."""
    params, grads, m, v = rng.standard_normal((4, n)).astype(dtype)
    variant = options.get("variant", "torch")
    return {
        "params": params,
        "grads": grads,
        "m": m,
        "v": np.square(v),
        "t": 2,
        "mu_product": momentum(1, variant=variant) * momentum(2, variant=variant),
        "lr": 2e-3,
        "weight_decay": 0.1,
        "grad_scale": 0.3,
    } | options
