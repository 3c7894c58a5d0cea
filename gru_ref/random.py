"""Counter-based random numbers: every draw is a function of (seed, stream, step, layer, index).

Not a generator with hidden state: there is nothing to save in a checkpoint and nothing to restore, and a
backward pass or a recomputation draws the same numbers again from the same coordinates.

The function is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), the
generator that GPU libraries use, so a CUDA twin can draw the same bits. One block turns a 128-bit counter
and a 64-bit key into four 32-bit words; here

    key     = (seed mod 2^32, seed div 2^32)
    counter = (index div 4, layer, step, stream)      word `index mod 4` of the result is the draw
"""

from collections.abc import Iterator

import numpy as np

from gru_ref.types import Array

# Streams keep draws for different purposes apart. The numbers are part of the format: never reuse one.
INITIALISATION = 1
DATA_ORDER = 2
DROPOUT = 3
SAMPLING = 4
GRADCHECK = 5

MAX_SEED = 2**64 - 1
PIECE = 2**12  # numbers, whose temporary arrays stay in the cache

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: Array, key: tuple[int, int]) -> Array:
    """Ten rounds of Philox: `counter` (4, N) uint32 and `key` two 32-bit integers give (4, N) uint32.

    A round multiplies two of the words by constants, and mixes high and low halves with the other two
    words and the key; after it the key is bumped by the Weyl constants.
    """
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0 = (product_1 >> _SHIFT) ^ c1 ^ np.uint64(k0)
        c1 = product_1 & _LOW
        c2 = (product_0 >> _SHIFT) ^ c3 ^ np.uint64(k1)
        c3 = product_0 & _LOW
        k0 = (k0 + _WEYL_0) & 0xFFFFFFFF
        k1 = (k1 + _WEYL_1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3]).astype(np.uint32)


def bits(n: int, *, seed: int, stream: int, step: int = 0, layer: int = 0, start: int = 0) -> Array:
    """The 32-bit draws of index start … start+n−1 at these coordinates: (n,) uint32.

    Raises ValueError where a coordinate does not fit its counter word.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must lie in 0…2^64−1, not {seed}")
    end = start + n
    for name, value in (("stream", stream), ("step", step), ("layer", layer), ("n // 4", end // 4)):
        if not 0 <= value < 2**32:
            raise ValueError(f"{name} must lie in 0…2^32−1, not {value}")
    block, end_block = start // 4, -(-end // 4)
    counter = np.empty((4, end_block - block), np.uint32)
    counter[0] = np.arange(block, end_block, dtype=np.uint32)
    counter[1], counter[2], counter[3] = layer, step, stream
    words = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return words.T.reshape(-1)[start % 4 : start % 4 + n]


def uniform(n: int, *, seed: int, stream: int, step: int = 0, layer: int = 0, start: int = 0) -> Array:
    """Draws start … start+n−1 in [0, 1), with 53 random bits each: (n,) float64, two words a draw."""
    words = bits(2 * n, seed=seed, stream=stream, step=step, layer=layer, start=2 * start).astype(np.uint64)
    high, low = words[0::2] >> np.uint64(5), words[1::2] >> np.uint64(6)
    return (high * np.float64(2**26) + low) * np.float64(2.0**-53)


def normal(n: int, *, seed: int, stream: int, step: int = 0, layer: int = 0, start: int = 0) -> Array:
    """Draws start … start+n−1 from N(0, 1) by Box–Muller, √(−2 ln(1−u₁))·cos(2πu₂): (n,) float64."""
    u = uniform(2 * n, seed=seed, stream=stream, step=step, layer=layer, start=2 * start)
    return np.sqrt(-2.0 * np.log1p(-u[0::2])) * np.cos(2.0 * np.pi * u[1::2])


def pieces(array: Array) -> Iterator[tuple[int, Array]]:
    """A C-contiguous array piece by piece, (start, flat view): a draw needs 100 times a number's memory."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, PIECE):
        yield start, flat[start : start + PIECE]


def permutation(n: int, *, seed: int, stream: int, step: int = 0, layer: int = 0) -> Array:
    """The numbers 0…n−1 in a random order: (n,) int64, by sorting one 64-bit draw each."""
    words = bits(2 * n, seed=seed, stream=stream, step=step, layer=layer).astype(np.uint64)
    return np.argsort((words[0::2] << _SHIFT) | words[1::2], kind="stable")
