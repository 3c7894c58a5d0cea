"""Golden values of an operation: inputs, outputs, cache and gradients, in float64 and in float32.

For people who test their own engine against the definitions: everything that `forward` and `backward` take
and give, for every case that the operation's file lists, in one npz. The names in it are

    <case>/<dtype>/input/<argument>         of forward, or of an optimizer's step before it
    <case>/<dtype>/output/<result>          y; or the arguments that a step changed; or what it returned
    <case>/<dtype>/cache/<i>                the arrays of the cache, numbered as the tuple is
    <case>/<dtype>/cotangent/<argument>     of backward: dy, the gradient of y, and whatever else it takes
    <case>/<dtype>/gradient/d<argument>     of the inputs

and the array `__metadata__` holds JSON about them: options, absent inputs, what else is in the cache, the
equations. Inputs and cotangents are rounded to float32 once, so that both dtypes compute from equal numbers.

They are drawn by NumPy's Generator on Philox with the seed as its key, anew for each case. NumPy promises
that Philox gives the same bits for ever, not that the same normal numbers are made of them: a file states
the version of NumPy, and what is compared stands in the file, not in the seed.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gru_ref import ops
from gru_ref.backend import public_functions
from gru_ref.errors import UsageError
from gru_ref.interop.tensor_files import write_tensors
from gru_ref.random import MAX_SEED
from gru_ref.types import Array
from gru_ref.version import __version__

FORMAT = "gru-ref golden"
DTYPES = ("float64", "float32")


def cases(op: str) -> dict[str, dict[str, Any]]:
    """Each case of an operation, under the name that it has in a file, with its options of `example`."""
    if op not in ops.names():
        raise UsageError(f"there is no operation {op!r}; known: {', '.join(ops.names())}")
    listed: dict[str, dict[str, Any]] = getattr(getattr(ops, op), "CASES", {"example": {}})
    return {re.sub(r"\W+", "_", name).strip("_"): options for name, options in listed.items()}


def write_golden(op: str, path: str | Path, *, seed: int = 0, overwrite: bool = False) -> dict[str, Any]:
    """Write the golden values of an operation as an npz file; returns its metadata.

    Raises UsageError for an unknown operation, a seed out of range or an output that cannot be used.
    """
    if Path(path).suffix != ".npz":
        raise UsageError(f"{path}: golden values are written as .npz; name the file so")
    arrays, metadata = golden(op, seed=seed)
    write_tensors(path, arrays, metadata, overwrite=overwrite)
    return metadata


def golden(op: str, *, seed: int = 0) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays under the names above, and what the metadata says."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed {seed}: must lie in 0…2^64−1")
    listed, definition = cases(op), getattr(ops, op)
    arrays: dict[str, Array] = {}
    described: dict[str, Any] = {}
    for case, options in listed.items():
        for dtype in DTYPES:
            rng = np.random.Generator(np.random.Philox(key=seed))
            inputs = {k: _rounded(v, dtype) for k, v in definition.example(rng, **options).items()}
            run = _differentiate if hasattr(definition, "backward") else _update
            results, description = run(definition, inputs, rng, dtype)
            arrays |= {f"{case}/{dtype}/{name}": np.array(array) for name, array in results.items()}
            described[case] = description
    metadata = {
        "format": FORMAT,
        "op": op,
        "seed": seed,
        "gru_ref": __version__,
        "numpy": np.__version__,
        "source": f"gru_ref/ops/{op}.py",
        "equations": inspect.getdoc(definition),
        "cases": described,
    }
    return arrays, metadata


def _rounded(value: Any, dtype: str) -> Any:
    """A floating-point array in `dtype`, by way of float32; everything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.astype(np.float32).astype(dtype)
    return value


def _differentiate(
    definition: ModuleType, inputs: dict[str, Any], rng: np.random.Generator, dtype: str
) -> tuple[dict[str, Array], dict[str, Any]]:
    """One forward and one backward of an operation."""
    y, cache = definition.forward(**inputs)
    first, _, *others = inspect.signature(definition.backward).parameters
    cotangents = {first: _rounded(rng.standard_normal(y.shape), dtype)}
    if "dh_T" in others:  # the gradient of the last state, used by itself
        cotangents["dh_T"] = _rounded(rng.standard_normal(y.shape[1:]), dtype)
    dy, *extra = cotangents.values()
    gradients = definition.backward(dy, cache, *extra)
    # a gradient each for the first arguments of forward, None for one that has none
    names = [f"d{name}" for name in inspect.signature(definition.forward).parameters]
    results = _inputs(definition.forward, inputs) | {"output/y": y}
    results |= {f"cache/{i}": value for i, value in enumerate(cache)}
    results |= {f"cotangent/{name}": value for name, value in cotangents.items()}
    results |= {f"gradient/{name}": value for name, value in zip(names, gradients, strict=False)}
    return _described(results, definition.forward, definition.backward)


def _update(
    definition: ModuleType, inputs: dict[str, Any], rng: np.random.Generator, dtype: str
) -> tuple[dict[str, Array], dict[str, Any]]:
    """One call of the function that takes all that `example` gives: what it changes, or else returns."""
    functions = [
        function
        for name, function in public_functions(definition).items()
        if name != "example" and inputs.keys() <= inspect.signature(function).parameters.keys()
    ]
    before = _inputs(
        functions[0], {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    )
    result = functions[0](**inputs)
    changed = {
        f"output/{name}": value
        for name, value in inputs.items()
        if isinstance(value, np.ndarray) and not np.array_equal(value, before[f"input/{name}"])
    }
    return _described(
        before | (changed or {f"output/{functions[0].__name__}": np.array(result)}), functions[0]
    )


def _inputs(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call under their names in a file, defaults where `given` has none."""
    call = inspect.signature(function).bind(**given)
    call.apply_defaults()
    return {f"input/{name}": value for name, value in call.arguments.items()}


def _described(
    results: dict[str, Any], *functions: Callable[..., Any]
) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays, and a description of the rest: numbers and strings as they are, a tuple by its repr."""
    arrays = {n: np.asarray(v) for n, v in results.items() if isinstance(v, np.ndarray | np.generic)}
    plain = (bool, int, float, str, type(None))
    others = {
        name: value if isinstance(value, plain) else repr(value)
        for name, value in results.items()
        if name not in arrays
    }
    documented = {function.__name__: inspect.getdoc(function) for function in functions}
    return arrays, {"functions": documented, "not_arrays": others}
