"""Compiles a kernel when it is first called, and keeps its machine code on disk where that is possible.

Numba's own cache does the keeping: in the folder NUMBA_CACHE_DIR, else in `__pycache__` beside the kernels,
else in the user's cache folder. Two things are added here.

A cache that cannot be written is no error: the kernel is compiled without one, and one warning says so.

A seal guards the cached files: numba unpickles and runs whatever they hold, and of single flipped bits 1 in
7 ended the process and 1 in 200 changed the results; and it compiles anew where the kernel's own file has
changed, but not where one has that the kernel calls. `<kernel>.sha256` has the digests of a kernel's cached
files and of this folder's sources; where it does not match, they are deleted and made again. A seal finds
damage, not tampering.
"""

import contextlib
import functools
import hashlib
import re
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np

from gru_ref.types import Array

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
"""The dtypes that kernels are compiled for."""

# x/0 is ∞, as in NumPy; no fastmath, which drops NaN and ∞
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
# A loop over many arrays is only vectorised where it may first check that none overlaps another it writes to,
# and LLVM gives up at 8 pairs of them unless told otherwise.
llvm.set_option("", "--runtime-memory-check-threshold=200")
_config: Any = numba.config
_LOCK = threading.Lock()
_warned = False
watchers: list[Callable[[str], None]] = []
"""Called with the name of a kernel that is about to be compiled, for want of one that was kept."""


class Kernel:
    """A loop over arrays of float32 or of float64; the first argument's dtype says which.

    It takes and changes arrays of exactly the types in its signature, and returns nothing.
    """

    def __init__(self, function: Callable[..., None], signature: str, fastmath: tuple[str, ...] = ()) -> None:
        self.function = function
        self.signature = signature
        self.options = OPTIONS | ({"fastmath": set(fastmath)} if fastmath else {})
        self.compiled: dict[np.dtype[Any], Any] = {}

    def __call__(self, *arguments: Any) -> None:
        dtype = arguments[0].dtype
        if dtype not in self.compiled:
            with _LOCK:
                if dtype not in self.compiled:
                    self.compiled[dtype] = _compile(self, dtype.name)
        self.compiled[dtype](*arguments)


def compiled(signature: str, *, fastmath: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Kernel]:
    """Decorator: the types of a kernel's arguments in numba's notation, where T is the floating dtype.

    `@compiled("T[:, ::1], intp[::1], T")` is a matrix, a vector of indices and a number. fastmath: what LLVM
    may do that changes last bits, and not where a twin promises the definition's: 'contract' a·b + c to one
    fused multiply-add, which rounds once; 'reassoc', sum in another order, as vector instructions must.
    """
    return lambda function: Kernel(function, signature, fastmath)


def for_kernel(array: Array, dtype: Any = None) -> Array:
    """`array` as kernels take it, C-contiguous, aligned and writable; a copy only where it is not."""
    if type(array) is np.ndarray and array.flags.carray and dtype in (None, array.dtype):
        return array
    return np.require(array, dtype, ["C", "A", "W", "E"])


def _compile(kernel: Kernel, dtype: str) -> Callable[..., None]:
    """A kernel for one dtype: from the cache, else compiled and, where possible, cached."""
    function, options = kernel.function, kernel.options
    if _config.DISABLE_JIT:
        return function
    # A name of its own gives each dtype cache files of its own: numba's index of several signatures loses one
    # when two processes add to it at once, and then pairs the other with the wrong code.
    variant = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    variant.__qualname__ = f"{function.__qualname__}.{dtype}"
    signature = "void(" + re.sub(r"\bT\b", dtype, kernel.signature) + ")"
    try:
        return _compile_cached(variant, signature, options)
    except (OSError, RuntimeError) as error:  # RuntimeError: numba found no folder that it can write
        _warn_uncached(error)
    _announce(variant.__qualname__)
    return numba.njit(signature, **options)(variant)


def _compile_cached(
    function: Callable[..., None], signature: str, options: dict[str, Any]
) -> Callable[..., None]:
    folder = Path(numba.njit(cache=True, **options)(function).stats.cache_path)
    chosen = _config.CACHE_DIR
    if chosen and folder.parent != Path(chosen):  # numba goes elsewhere without a word
        raise OSError(f"NUMBA_CACHE_DIR={chosen} cannot be written")
    name = f"{Path(function.__code__.co_filename).stem}.{function.__qualname__}"
    seal = folder / f"{name}.sha256"
    files = _cached_files(folder, name)
    if files and not (seal.is_file() and seal.read_bytes() == _digests(files)):
        for file in files:
            file.unlink(missing_ok=True)
    if not _cached_files(folder, name):
        _announce(name)
    kernel = numba.njit(signature, cache=True, **options)(function)
    if kernel.stats.cache_misses:
        seal.write_bytes(_digests(_cached_files(folder, name)))
    return kernel


def _announce(name: str) -> None:
    for watcher in watchers:
        watcher(name)


def _cached_files(folder: Path, name: str) -> list[Path]:
    """Numba's index (.nbi) and data (.nbc) of the kernel `name`."""
    return sorted(folder.glob(f"{name}-*.nb[ic]"))


@functools.cache
def _sources() -> str:
    """A digest of every source in this folder: a kernel may call any of them."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _digests(files: list[Path]) -> bytes:
    """The lines of a seal: a comment, and what `sha256sum -c` accepts."""
    lines = [f"# sources {_sources()}\n"]
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # another process has just discarded it
            lines.append(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n")
    return "".join(lines).encode()


def _warn_uncached(error: Exception) -> None:
    """One warning a process: what is true of one kernel's folder is true of all."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled kernels are not cached, so every run compiles them again ({error}); "
            "set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
