"""What `gru-ref bench` measures: one file a benchmark, the folder is the list of them.

    run(settings) -> list[Row]        in every file without a leading underscore; docstring's first line: what
    LONG = True                       in those that take minutes, which run only where they are asked for

Peers are measured in the same run, by turns with ours (_timing.py), from the same weights, after a check that
both compute the same. A bar is what this project wants to reach; a missed one is a result, not a failure.

Not here: what is printed (cli/bench.py), and tests: no timing is a test.
"""

import importlib
import os
import pkgutil
from types import ModuleType
from typing import Any

from gru_ref.bench._settings import Settings
from gru_ref.errors import UsageError

REMOVED = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
"""Environment variables that change how fast libraries compute, taken away from a measuring process."""


def names() -> list[str]:
    """The benchmarks, sorted: `gpt_step.py` is gpt-step, `import_.py` is import."""
    return sorted(_files())


def _files() -> dict[str, str]:
    files = (module.name for module in pkgutil.iter_modules(__path__))
    return {name.rstrip("_").replace("_", "-"): name for name in files if not name.startswith("_")}


def find(name: str) -> ModuleType:
    """The file of a benchmark; raises UsageError for an unknown name."""
    if name not in names():
        raise UsageError(f"no benchmark '{name}'; known: {', '.join(names())}")
    return importlib.import_module(f"gru_ref.bench.{_files()[name]}")


def summary(name: str) -> str:
    """What a benchmark measures, in a line."""
    return (find(name).__doc__ or "").partition("\n")[0]


def is_long(name: str) -> bool:
    """Whether a benchmark takes minutes."""
    return bool(getattr(find(name), "LONG", False))


def run(name: str, settings: Settings) -> list[dict[str, Any]]:
    """Measure in this process: the rows of a benchmark as plain values; see _settings.py and _rows.py."""
    from gru_ref import threads

    with threads.limited(settings.threads, pool=False):  # BLAS too: it is a peer and a limit
        return [row.to_dict() for row in find(name).run(settings)]


def measuring_environment() -> dict[str, str]:
    """This process's environment without REMOVED: how a measuring process is to be started."""
    return {key: value for key, value in os.environ.items() if key not in REMOVED}
