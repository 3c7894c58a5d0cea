"""The draws of the stream DROPOUT inside kernels, those that gru_ref/random.py defines."""

import math
from typing import Any

import numba
import numpy as np

from gru_ref import random
from gru_ref.kernels.numba_cpu._compile import OPTIONS
from gru_ref.types import Array

_WORD = 2**32


def fits(n: int, seed: int, step: int, layer: int, start: int) -> bool:
    """Whether every coordinate has its word of the counter; the definition says which has not."""
    return (
        0 <= seed <= random.MAX_SEED and max(step, layer, (start + n) // 4) < _WORD and min(step, layer) >= 0
    )


def coordinates(seed: int, step: int, layer: int) -> tuple[int, int, int, int]:
    """The first arguments of what is below: the key's two words, layer and step."""
    return seed % _WORD, seed // _WORD, layer, step


def bound(p: float) -> int:
    """The least draw whose value is kept."""
    return math.ceil(p * 2.0**32)


@numba.njit(**OPTIONS)
def _round(c0: Any, c1: Any, c2: Any, c3: Any, key_0: Any, key_1: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Every factor is masked to 32 bits, needed or not: then LLVM multiplies four at a time."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    product_0, product_1 = np.uint64(0xD2511F53) * (c0 & low), np.uint64(0xCD9E8D57) * (c2 & low)
    c0, c1 = (product_1 >> shift) ^ c1 ^ key_0, product_1 & low
    c2, c3 = (product_0 >> shift) ^ c3 ^ key_1, product_0 & low
    return c0, c1, c2, c3, (key_0 + np.uint64(0x9E3779B9)) & low, (key_1 + np.uint64(0xBB67AE85)) & low


@numba.njit(**OPTIONS)
def _block(key_0: int, key_1: int, layer: int, step: int, index: Any) -> tuple[Any, Any, Any, Any]:
    """The four draws of index 4·index … 4·index + 3: ten rounds of Philox4x32.

    Not in a loop: LLVM would unroll that too late to make vector instructions of the loop around it.
    """
    counter = np.uint64(index), np.uint64(layer), np.uint64(step), np.uint64(random.DROPOUT)
    state = (*counter, np.uint64(key_0), np.uint64(key_1))
    state = _round(*_round(*_round(*_round(*_round(*state)))))
    c0, c1, c2, c3, _, _ = _round(*_round(*_round(*_round(*_round(*state)))))
    return c0, c1, c2, c3


@numba.njit(**OPTIONS)
def draws(key_0: int, key_1: int, layer: int, step: int, block: int, result: Array) -> None:
    """The draws from index 4·block on, a whole number of fours."""
    for i in range(len(result) // 4):
        words = _block(key_0, key_1, layer, step, block + i)
        result[4 * i], result[4 * i + 1], result[4 * i + 2], result[4 * i + 3] = words


@numba.njit(**OPTIONS)
def draws_apart(
    key_0: int, key_1: int, layer: int, step: int, first: int, distance: int, result: Array
) -> None:
    """The draws of the indices first, first + distance, …"""
    zero, one, two = np.uint64(0), np.uint64(1), np.uint64(2)
    index = np.uint64(first)
    for i in range(len(result)):
        c0, c1, c2, c3 = _block(key_0, key_1, layer, step, index >> two)
        # of the four the one that the index's last bits say, chosen without a branch
        last, next_to_last = zero - (index & one), zero - ((index & two) >> one)
        low, high = c0 ^ ((c0 ^ c1) & last), c2 ^ ((c2 ^ c3) & last)
        result[i] = np.uint32(low ^ ((low ^ high) & next_to_last))
        index += np.uint64(distance)
