"""Twin of gru_ref/ops/matmul.py, where the rounding's rule is.

Faster because rounding to bf16 is one pass over the bits, shared among the pool's threads, without temporary
arrays; the results are the same to the last bit. fp16 is converted by NumPy, in the same shares.
"""

import numpy as np

from gru_ref import threads
from gru_ref.kernels.numba_cpu._compile import compiled, for_kernel
from gru_ref.kernels.numba_cpu._workspace import empty
from gru_ref.ops import matmul as definition
from gru_ref.types import Array

_COST = {"bf16": 0.5, "fp16": 11.0}
"""Nanoseconds a number."""


def round_to(x: Array, precision: str) -> Array:
    """As the definition."""
    if precision not in ("fp16", "bf16") or x.dtype != np.float32:
        return definition.round_to(x, precision)
    result = empty(x.shape, np.float32)
    source, target = for_kernel(x).reshape(-1), result.reshape(-1)

    def part(start: int, end: int) -> None:
        if precision == "fp16":
            target[start:end] = definition.round_to(source[start:end], precision)
        else:
            _round_to_bf16(source[start:end], target[start:end])

    threads.share(part, len(source), unit=16, cost=_COST[precision])
    return result


@compiled("T[::1], T[::1]")
def _round_to_bf16(x: Array, rounded: Array) -> None:
    bits, out = x.view(np.uint32), rounded.view(np.uint32)
    for i in range(len(bits)):
        b = bits[i]
        nearest = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        is_nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[i] = b if is_nan else nearest
