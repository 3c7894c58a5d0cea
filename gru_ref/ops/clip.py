"""Clipping by the one global norm of all gradients.

    ‖g‖ = √( Σ over all parameters of Σ g² ), summed in fp64
    s   = min(1, c/‖g‖)

The product s·g is the first line of an optimizer's step, as its `grad_scale`: it reads g anyway. PyTorch's
clip_grad_norm_ divides by ‖g‖ + 10⁻⁶ instead.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from gru_ref.types import Array


def global_norm(grads: Iterable[Array]) -> float:
    """‖g‖ over arrays of any shapes; not finite if any value is not, or where the squares overflow fp64."""
    return math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads))


def factor(norm: float, max_norm: float) -> float:
    """s, by which gradients of norm `norm` get one of at most `max_norm` ≥ 0; 0 clips nothing."""
    return max_norm / norm if max_norm and norm > max_norm else 1.0


def example(rng: np.random.Generator, n: int = 7, dtype: Any = np.float64) -> dict[str, Any]:
    """The gradients of one parameter of n numbers."""
    return {"grads": rng.standard_normal((1, n)).astype(dtype)}
