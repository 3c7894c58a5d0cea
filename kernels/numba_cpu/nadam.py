"""Twin of gru_ref/ops/nadam.py, where the equations are.

Faster, and the same to the last bit, for the reasons given in kernels/numba_cpu/adamw.py.
"""

import numpy as np

from gru_ref.kernels.numba_cpu._compile import compiled
from gru_ref.kernels.numba_cpu._update import updatable, update
from gru_ref.ops import nadam as definition
from gru_ref.types import Array

_COST = 1.4
"""Nanoseconds a parameter."""


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
    """As the definition, which gets arrays that are strided, read-only or not all of one dtype."""
    if not updatable(params, grads, m, v):
        return definition.step(
            params,
            grads,
            m,
            v,
            t=t,
            mu_product=mu_product,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            variant=variant,
            grad_scale=grad_scale,
        )
    mu, mu_next = definition.momentum(t, beta1, variant), definition.momentum(t + 1, beta1, variant)
    kept = 1 - lr * weight_decay if decoupled else 1.0
    scalars = (
        grad_scale,
        0.0 if decoupled else weight_decay,
        kept,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - mu) / (1 - mu_product),
        mu_next / (1 - mu_product * mu_next),
        lr,
        1 - beta2**t,
        eps,
    )
    return update(_update, (params, grads, m, v), scalars, _COST)


@compiled("T[::1], T[::1], T[::1], T[::1], T, T, T, T, T, T, T, T, T, T, T, T, boolean[::1]")
def _update(
    params: Array,
    grads: Array,
    m: Array,
    v: Array,
    grad_scale: float,
    l2: float,
    kept: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    grad_share: float,
    m_share: float,
    lr: float,
    v_correction: float,
    eps: float,
    is_finite: Array,
) -> None:
    lost = False
    for i in range(len(params)):
        g = grad_scale * grads[i]
        if l2:
            g += l2 * params[i]
        m_i = m[i] * beta1 + one_minus_beta1 * g
        v_i = v[i] * beta2 + one_minus_beta2 * (g * g)
        direction = grad_share * g + m_share * m_i
        p = params[i] * kept - lr * direction / (np.sqrt(v_i / v_correction) + eps)
        params[i], m[i], v[i] = p, m_i, v_i
        lost |= not (abs(p) < np.inf and v_i < np.inf)
    is_finite[0] = not lost
