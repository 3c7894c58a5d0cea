"""What the optimizers' twins share: which arrays they update, and in how many threads."""

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import FLOATS, Kernel
from gru_ref.types import Array


def updatable(*arrays: Array) -> bool:
    """Whether a kernel can update them in place: one shape, one of FLOATS, C-contiguous and writable."""
    first = arrays[0]
    return first.dtype in FLOATS and all(
        a.dtype == first.dtype and a.shape == first.shape and a.flags.carray for a in arrays
    )


def update(kernel: Kernel, arrays: tuple[Array, ...], scalars: tuple[float, ...], cost: float) -> bool:
    """kernel(*arrays, *scalars, is_finite) over parts of the arrays; whether all that it made is finite.

    cost: nanoseconds an element.
    """
    flat = [array.reshape(-1) for array in arrays]
    finite = []

    def part(start: int, end: int) -> None:
        is_finite = np.empty(1, np.bool_)
        kernel(*(array[start:end] for array in flat), *scalars, is_finite)
        finite.append(bool(is_finite[0]))

    threads.share(part, flat[0].size, unit=16, cost=cost)
    return all(finite)
