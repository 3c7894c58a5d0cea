"""Where a measurement was made: facts that a reader needs to judge it, none that name a person's files."""

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from gru_ref.version import __version__


def facts(threads: int) -> dict[str, Any]:
    """The machine, versions, BLAS with the kernel it chose, how busy it is, and the date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": cpu_model(),
        "cores": psutil.cpu_count() or os.cpu_count(),
        "threads": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "gru_ref": __version__,
        "numpy": version("numpy"),
        "numba": version("numba"),
        "torch": version("torch"),
        "blas": blas(),
    }


def cpu_model() -> str:
    """Its name, as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text("utf-8", "replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def blas() -> list[str]:
    """Each BLAS that NumPy loaded, with its version and the kernels it chose for this CPU."""
    import numpy  # noqa: F401 (loads its BLAS)
    from threadpoolctl import threadpool_info

    return [
        " ".join(str(pool.get(key, "")) for key in ("internal_api", "version", "architecture")).strip()
        for pool in threadpool_info()
        if pool["user_api"] == "blas"
    ]
