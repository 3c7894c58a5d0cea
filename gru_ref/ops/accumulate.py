"""Adding a gradient to the sum of those before it.

    total ← total + gradient

Operations return gradients and models add them up with this: over both uses of a tied weight, over slices of
a window, over micro-batches.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array


def add(total: Array, gradient: Array) -> None:
    """total and gradient of one shape; `total` is changed in place."""
    total += gradient


def example(rng: np.random.Generator, n: int = 7, dtype: Any = np.float64) -> dict[str, Any]:
    """total and gradient (n,)."""
    total, gradient = rng.standard_normal((2, n)).astype(dtype)
    return {"total": total, "gradient": gradient}
