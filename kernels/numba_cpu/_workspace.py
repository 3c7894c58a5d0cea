"""Memory for the twins' large arrays that is used again, step after step, instead of returned to the system.

Fresh memory costs a page fault every 4 KiB, a tenth of a training step. `empty` is np.empty, but the memory
of an array that nothing refers to any more goes to the next one of its size, or of a few rows less; so a step
after the first asks the system for nothing large. It needs no care from anyone: arrays live as long as they
are referred to.

Few rows less, because slices of a window differ by a step, and h has one more than the gates. Where only
memory of a few rows too few is free, it is returned, and larger takes its place: soon all have the same.
"""

import math
from typing import Any

import numpy as np

from gru_ref.types import Array

_LEAST = 2**16
"""Bytes below which NumPy's own cache and the C library's serve well."""
_PAGE = 4096
_LINE = 64
"""Bytes that the cache holds together: vectors that begin with one lie in one."""
_OLD = 4096
"""Calls after which memory that nothing asked for is returned to the system."""

_SLACK = 1.25
"""How many times as large as asked for memory may be, if its array had rows of the same size."""

_free: dict[int, list[tuple[Array, int, int]]] = {}
"""By size: memory, the bytes of its last array's rows, and the call that it was last used by."""
_calls = 0


class _Lease:
    """What an array's memory belongs to; when the last view is gone, so is this, and the memory is free."""

    def __init__(self, memory: Array, row: int) -> None:
        self._memory, self._row = memory, row
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        _free.setdefault(self._memory.nbytes, []).append((self._memory, self._row, _calls))


def empty(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """An array of this shape and dtype with any values in it; C-contiguous."""
    global _calls
    _calls += 1
    shape = shape if isinstance(shape, tuple) else (shape,)
    n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if n_bytes < _LEAST:
        return np.empty(shape, dtype)
    size = -(-n_bytes // _PAGE) * _PAGE
    row = shape[-1] * np.dtype(dtype).itemsize
    memory = _take(size, int(size * _SLACK), row)
    if memory is None:
        _take(int(size / _SLACK), size, row)
        _return_what_is_old()
        memory = np.empty(size + _LINE, np.uint8)
        memory = memory[-memory.ctypes.data % _LINE :][:size]
    return np.asarray(_Lease(memory, row))[:n_bytes].view(dtype).reshape(shape)


def _take(least: int, most: int, row: int) -> Array | None:
    """Free memory of `least` bytes, or else the smallest up to `most` whose last array had such rows."""
    if _free.get(least):
        return _free[least].pop()[0]
    for size in sorted(size for size in _free if least < size <= most):
        for i, block in enumerate(_free[size]):
            if block[1] == row:
                return _free[size].pop(i)[0]
    return None


def _return_what_is_old() -> None:
    for size, blocks in list(_free.items()):
        _free[size] = [block for block in blocks if _calls - block[2] < _OLD]
