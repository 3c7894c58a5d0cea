"""Twins compiled by numba for the CPU. `<op>.py` redefines public functions of `gru_ref/ops/<op>.py`.

Kernels are serial and release the GIL, and gru_ref/threads.py shares the work: numba's own threads beside
those of BLAS made a step 14 times slower.
"""

from gru_ref.errors import BackendError

try:
    import numba  # noqa: F401  (before any kernel, so that its absence is one clear line)
except (ImportError, OSError) as error:  # absent, too old for this NumPy, or its library does not load
    raise BackendError(f"numba cannot be used here ({error}); take --kernels numpy") from error
