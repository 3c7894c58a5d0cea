"""Twin of gru_ref/ops/adamw.py, where the equations are.

Faster because one pass reads and writes each array once; the definition makes a dozen passes and as many
temporary arrays. Each element goes through the same operations in the same order, so the results are the same
to the last bit.
"""

import numpy as np

from gru_ref.kernels.numba_cpu._compile import compiled
from gru_ref.kernels.numba_cpu._update import updatable, update
from gru_ref.ops import adamw as definition
from gru_ref.types import Array

_COST = 1.2
"""Nanoseconds a parameter."""


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
    """As the definition, which gets arrays that are strided, read-only or not all of one dtype."""
    if not updatable(params, grads, m, v):
        return definition.step(
            params,
            grads,
            m,
            v,
            t=t,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
            grad_scale=grad_scale,
        )
    kept = 1 - lr * weight_decay if decoupled else 1.0
    scalars = (
        grad_scale,
        0.0 if decoupled else weight_decay,
        kept,
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**t),
        1 - beta2**t,
        eps,
    )
    return update(_update, (params, grads, m, v), scalars, _COST)


@compiled("T[::1], T[::1], T[::1], T[::1], T, T, T, T, T, T, T, T, T, T, boolean[::1]")
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
    rate: float,
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
        p = params[i] * kept - rate * m_i / (np.sqrt(v_i / v_correction) + eps)
        params[i], m[i], v[i] = p, m_i, v_i
        lost |= not (abs(p) < np.inf and v_i < np.inf)
    is_finite[0] = not lost
