"""A function called in a fresh process, for what the memory of this one would spoil."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def in_child(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Its result; the function must be one that a file defines at its top."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args, **kwargs).result()


def peak_resident_bytes() -> int:
    """The most memory that this process has had at once.

    From /proc where there is one: what getrusage says starts from the peak of the process that started it.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
