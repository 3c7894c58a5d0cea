"""Matrix product with the rounding of mixed precision: inputs rounded, products summed in fp32.

    c = ⌊a⌉ · ⌊b⌉            da = ⌊dc⌉ · ⌊b⌉ᵀ            db = ⌊a⌉ᵀ · ⌊dc⌉

⌊·⌉ rounds to the nearest number (ties to even) that `precision` can hold and returns it as fp32:
    fp32   no rounding; float64 stays float64
    fp16   1 sign, 5 exponent, 10 fraction bits; beyond 65504 it becomes infinite
    bf16   1 sign, 8 exponent, 7 fraction bits: the upper half of an fp32

This is what a tensor core does (16-bit inputs, 32-bit sums), so a kernel is compared with it at 1e-6, not at
the 1e-3 of its inputs. The rule lives here alone; linear and gru apply it through `round_to`.
"""

from typing import Any

import numpy as np

from gru_ref.types import Array

PRECISIONS = ("fp32", "fp16", "bf16")


def round_to(x: Array, precision: str) -> Array:
    """⌊x⌉: the values of `x` rounded to `precision`, as float32 (float64 stays itself under fp32)."""
    if precision == "fp32":
        return x.astype(np.float32) if x.dtype == np.float16 else x
    if precision == "fp16":
        with np.errstate(over="ignore"):  # too large becomes inf; the finite check of the step reports it
            return x.astype(np.float16).astype(np.float32)
    if precision == "bf16":
        return _round_to_bf16(x)
    raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not '{precision}'")


def _round_to_bf16(x: Array) -> Array:
    """Nearest even on the bits: add just under half of the last kept bit, plus that bit itself, then cut."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    result: Array = rounded.view(np.float32)
    np.copyto(result, x, where=np.isnan(x))  # a NaN's fraction could carry into its sign
    return result


def forward(a: Array, b: Array, precision: str = "fp32") -> tuple[Array, tuple[Any, ...]]:
    """a (…, M, K), b (K, N) or (…, K, N) -> c (…, M, N), cache (rounded a, rounded b, precision)."""
    a, b = round_to(a, precision), round_to(b, precision)
    return a @ b, (a, b, precision)


def backward(dc: Array, cache: tuple[Any, ...]) -> tuple[Array, Array]:
    """dc (…, M, N) -> da (…, M, K), db of b's shape."""
    a, b, precision = cache
    dc = round_to(dc, precision)
    da = dc @ np.swapaxes(b, -1, -2)
    if b.ndim == 2:  # one b served every leading index: its gradient is the sum over them
        db = a.reshape(-1, a.shape[-1]).T @ dc.reshape(-1, dc.shape[-1])
    else:
        db = np.swapaxes(a, -1, -2) @ dc
    return da, db


CASES: dict[str, dict[str, Any]] = {
    "2-D": {},
    "shared b": {"lead": (2, 3)},
    "batched": {"lead": (4,), "batched": True},
}


def example(
    rng: np.random.Generator,
    M: int = 5,
    K: int = 7,
    N: int = 3,
    lead: tuple[int, ...] = (),
    batched: bool = False,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """a (*lead, M, K) and b (K, N), or (*lead, K, N) where `batched`."""
    b_lead = lead if batched else ()
    return {
        "a": rng.standard_normal((*lead, M, K)).astype(dtype),
        "b": rng.standard_normal((*b_lead, K, N)).astype(dtype),
    }
