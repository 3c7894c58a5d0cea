"""Which function computes an operation: its definition, or a compiled twin where the backend has one.

    ops = Backend("numba")
    y, cache = ops.gru.forward(x, h0, ...)

The path is the registry. `gru_ref/ops/gru.py` is the definition; `kernels/numba_cpu/gru.py` may redefine any
of its public functions with the same signature, and is then picked. There is no list to keep: a twin file
that defines nothing of its operation is an error, so nothing falls back in silence.
"""

import importlib
import inspect
import pkgutil
from types import ModuleType, SimpleNamespace
from typing import Any

from gru_ref import ops
from gru_ref.errors import BackendError

KERNEL_FOLDERS = {"numpy": None, "numba": "numba_cpu"}


def public_functions(module: ModuleType) -> dict[str, Any]:
    """The functions that a module itself defines (not the ones it imports), without leading underscore."""
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and not inspect.isclass(value)
        and getattr(value, "__module__", None) == module.__name__
    }


class Backend:
    """`Backend(name).<op>.<function>`: the function's twin where the backend has one, else its definition.

    name: 'numpy' (the definitions alone) or 'numba' (compiled twins on the CPU). Raises BackendError for
    another one.
    """

    def __init__(self, name: str = "numpy") -> None:
        if name not in KERNEL_FOLDERS:
            raise BackendError(f"unknown backend '{name}'; known: {', '.join(KERNEL_FOLDERS)}")
        self.name = name

    def __repr__(self) -> str:
        return f"Backend({self.name!r})"

    def __getattr__(self, op: str) -> SimpleNamespace:
        if op.startswith("_"):
            raise AttributeError(op)
        namespace = SimpleNamespace(**(public_functions(getattr(ops, op)) | self.twins(op)))
        setattr(self, op, namespace)  # looked up once
        return namespace

    def twins(self, op: str) -> dict[str, Any]:
        """The functions of `op` that this backend's kernel file redefines."""
        folder = KERNEL_FOLDERS[self.name]
        if folder is None:
            return {}
        package = importlib.import_module(f"gru_ref.kernels.{folder}")
        if op not in [module.name for module in pkgutil.iter_modules(package.__path__)]:
            return {}
        twins = public_functions(importlib.import_module(f"{package.__name__}.{op}"))
        defined = public_functions(getattr(ops, op))
        if not twins.keys() & defined.keys() or twins.keys() - defined.keys():
            raise BackendError(
                f"kernels/{folder}/{op}.py must redefine public functions of gru_ref/ops/{op}.py, "
                f"and nothing else: it has {', '.join(sorted(twins)) or 'none'}"
            )
        return twins

    def table(self) -> list[dict[str, str]]:
        """Every public function of every operation with the module that serves it."""
        return [
            {"op": op, "function": name, "served_by": getattr(getattr(self, op), name).__module__}
            for op in ops.names()
            for name in public_functions(getattr(ops, op))
            if name != "example"
        ]
