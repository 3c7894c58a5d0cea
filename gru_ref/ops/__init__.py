"""The definitions: one file an operation, its equations, then forward, then backward, then `example`.

    forward(inputs…, options…) -> (output, cache)       plain NumPy, no input changed
    backward(doutput, cache)   -> one gradient for each array input of forward, in that order
                                  (None for integer inputs and for inputs that were None)
    example(rng, …)            -> the keyword arguments of a small forward call
    CASES                      -> names and `example` options that tests and gradcheck run through

The optimizers have `step`, which works in place on flat arrays, instead of forward and backward. The folder
is the registry: `names()` lists it, `gru_ref.Backend` picks a compiled twin for a function where one exists.
"""

import importlib
import pkgutil
from types import ModuleType


def names() -> list[str]:
    """The names of all operations, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    if name not in names():
        raise AttributeError(f"there is no operation '{name}'; known: {', '.join(names())}")
    return importlib.import_module(f"gru_ref.ops.{name}")
