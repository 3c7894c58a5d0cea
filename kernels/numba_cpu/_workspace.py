"""Memory for the twins' large arrays that is used again, step after step, instead of returned to the system.

Fresh memory costs a page fault every 4 KiB, a tenth of a training step. `empty` is np.empty, but the memory
of an array that nothing refers to any more goes to the next one of its size; so a step after the first asks
the system for nothing large. It needs no care from anyone: arrays live as long as they are referred to.
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

_free: dict[int, list[tuple[Array, int]]] = {}  # by size: memory, and the call that it was last used by
_calls = 0


class _Lease:
    """What an array's memory belongs to; when the last view is gone, so is this, and the memory is free."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        _free.setdefault(self._memory.nbytes, []).append((self._memory, _calls))


def empty(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """An array of this shape and dtype with any values in it; C-contiguous."""
    global _calls
    _calls += 1
    n_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
    if n_bytes < _LEAST:
        return np.empty(shape, dtype)
    size = -(-n_bytes // _PAGE) * _PAGE
    try:
        memory = _free[size].pop()[0]
    except (KeyError, IndexError):
        _return_what_is_old()
        memory = np.empty(size + _LINE, np.uint8)
        memory = memory[-memory.ctypes.data % _LINE :][:size]
    return np.asarray(_Lease(memory))[:n_bytes].view(dtype).reshape(shape)


def _return_what_is_old() -> None:
    for size, blocks in list(_free.items()):
        _free[size] = [block for block in blocks if _calls - block[1] < _OLD]
