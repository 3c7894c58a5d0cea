"""Clipping by the one global norm of all gradients.

‖g‖ = √( Σ over all parameters of Σ g² ), summed in fp64
g ← g · min(1, c/‖g‖)
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from gru_ref.types import Array


def global_norm(grads: Iterable[Array]) -> float:
    """‖g‖ over arrays of any shapes; not finite if any value is not."""
    return math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads))


def clip(grads: Array, norm: float, max_norm: float) -> None:
    """Scale `grads` in place from their norm `norm` to at most `max_norm`; 0 clips nothing."""
    if max_norm and norm > max_norm:
        grads *= max_norm / norm


def example(rng: np.random.Generator, n: int = 7, dtype: Any = np.float64) -> dict[str, Any]:
    """n gradients whose norm is above 1."""
    grads = 3 * rng.standard_normal(n).astype(dtype)
    return {"grads": grads, "norm": global_norm([grads]), "max_norm": 1.0}
