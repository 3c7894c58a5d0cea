"""What this machine can do at best, as sides to measure in the same rounds as the work."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gru_ref.types import Array

SGEMM = 2048  # rows and columns of the product whose rate counts as the CPU's
STREAM = 2**26  # floats that the memory's rate is measured on: 256 MiB, more than any cache


def sgemm() -> Callable[[], object]:
    """A large product by NumPy's BLAS: `sgemm_flops()` operations a call."""
    a, b, out = np.ones((3, SGEMM, SGEMM), np.float32)
    return lambda: np.matmul(a, b, out=out)


def sgemm_flops() -> float:
    """Multiplications and additions in a call of `sgemm()`."""
    return 2.0 * SGEMM**3


def reading(threads: int) -> Callable[[], object]:
    """Read STREAM floats, each thread its part.

    By the minimum of their bytes, which NumPy computes faster than memory delivers them.
    """
    parts = np.array_split(np.ones(STREAM, np.float32).view(np.int8), threads)
    return _in_threads(threads, parts, np.min)


def updating(threads: int) -> Callable[[], object]:
    """Read and write back STREAM floats, each thread its part: 8 bytes a float, as an optimizer's update."""
    parts = np.array_split(np.ones(STREAM, np.float32), threads)
    one = np.float32(1)

    def update(part: Array) -> None:
        np.multiply(part, one, out=part)

    return _in_threads(threads, parts, update)


def _in_threads(threads: int, parts: list[Array], work: Callable[[Array], object]) -> Callable[[], object]:
    pool = ThreadPoolExecutor(threads)
    return lambda: list(pool.map(work, parts))
