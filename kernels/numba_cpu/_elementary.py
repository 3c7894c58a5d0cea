"""eˣ, σ and tanh for kernels, written so that a loop over an array compiles to vector instructions.

In float64 they are the C library's, value by value. In float32:

    eˣ       2ᵏ·eʳ with k = round(x/ln 2) and r = x − k·ln 2, |r| ≤ ln 2/2, where seven terms of the series do
    eˣ − 1   2ᵏ·(eʳ − 1) + (2ᵏ − 1): for small x, where k = 0, no digit is lost
    σ(x)     1/(1 + e⁻ˣ)
    tanh x   (e²ˣ − 1)/(e²ˣ − 1 + 2)

NaN stays NaN. `gru-ref backends --errors` measures the errors, in units in the last place (ULP).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from gru_ref.kernels.numba_cpu._compile import compiled
from gru_ref.types import Array

_CONTRACT: Any = {"error_model": "numpy", "fastmath": {"contract"}}
"""a·b + c as one fused multiply-add: half the instructions, and rounded once."""
_LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts, the first with 9 bits, so that its product with a small whole number is exact
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.1219444005469057e-4)
# from 2^23 to 2^24 a float32 is a whole number, its lowest bits those of the fraction
_ROUND = np.float32(1.5 * 2**23)
_ONE, _TWO = np.float32(1), np.float32(2)
_C2, _C3, _C4, _C5, _C6, _C7 = (np.float32(1 / math.factorial(n)) for n in range(2, 8))
_SMALLEST = np.float32(-87)  # e⁻⁸⁷ is near float32's smallest normal number
_LARGEST = np.float32(88)
_TANH_IS_ONE = np.float32(9.5)


def exp(x: Any) -> Any:
    """eˣ; float32: of x ≤ 88, and 0 below −87."""
    return np.exp(x)


def sigmoid(x: Any) -> Any:
    """σ(x)."""
    return 1 / (1 + np.exp(-x))


def tanh(x: Any) -> Any:
    """tanh x."""
    return np.tanh(x)


def _double_exp(x: Any) -> Any:
    return math.exp(x)


def _double_sigmoid(x: Any) -> Any:
    e = math.exp(-abs(x))
    return (1.0 if x >= 0 else e) / (1.0 + e)


def _double_tanh(x: Any) -> Any:
    return math.tanh(x)


@register_jitable(**_CONTRACT)
def _series(x: Any) -> Any:
    """2ᵏ and eʳ − 1, for |x| ≤ 88."""
    shifted = x * _LOG2_E + _ROUND
    k = shifted - _ROUND
    r = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = ((((_C7 * r + _C6) * r + _C5) * r + _C4) * r + _C3) * r + _C2
    # k is in the low bits of `shifted`; moved to the exponent's place and biased, it is 2ᵏ
    bits = (np.float32(shifted).view(np.int32) << np.int32(23)) + np.float32(1).view(np.int32)
    return np.int32(bits).view(np.float32), series * r * r + r


def single_exp(x: Any) -> Any:
    """eˣ of one float32."""
    power, less_one = _series(x)
    return np.float32(0) if x < _SMALLEST else (less_one + _ONE) * power


def single_sigmoid(x: Any) -> Any:
    """σ of one float32."""
    e, less_one = _series(min(max(-x, _SMALLEST), _LARGEST))
    return _ONE / (_ONE + (less_one + _ONE) * e)


def single_tanh(x: Any) -> Any:
    """tanh of one float32."""
    power, less_one = _series(_TWO * min(max(x, -_TANH_IS_ONE), _TANH_IS_ONE))
    e = power * less_one + (power - _ONE)
    return e / (e + _TWO)


def _by_dtype(name: str, single: Callable[[Any], Any], double: Callable[[Any], Any]) -> None:
    """In a kernel, the function of this name is `single` for float32 and `double` for float64."""

    @overload(globals()[name], jit_options=_CONTRACT)
    def _choose(x: Any) -> Any:
        return single if x == types.float32 else double


_by_dtype("exp", single_exp, _double_exp)
_by_dtype("sigmoid", single_sigmoid, _double_sigmoid)
_by_dtype("tanh", single_tanh, _double_tanh)


def over(name: str, x: Array) -> Array:
    """The function of this name of every element of x (n,), as kernels compute it."""
    y = np.empty_like(x)
    {"exp": _exp_over, "sigmoid": _sigmoid_over, "tanh": _tanh_over}[name](x, y)
    return y


@compiled("T[::1], T[::1]", fastmath=("contract",))
def _exp_over(x: Array, y: Array) -> None:
    for i in range(len(x)):
        y[i] = exp(x[i])


@compiled("T[::1], T[::1]", fastmath=("contract",))
def _sigmoid_over(x: Array, y: Array) -> None:
    for i in range(len(x)):
        y[i] = sigmoid(x[i])


@compiled("T[::1], T[::1]", fastmath=("contract",))
def _tanh_over(x: Array, y: Array) -> None:
    for i in range(len(x)):
        y[i] = tanh(x[i])
