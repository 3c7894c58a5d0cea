"""How far the compiled twins are from their definitions: figures, and what the tests of the twins assert.

The yardstick is the definition in float64, on the same inputs. For float32, the error of the twin stands
beside that of the definition itself in float32; for float64 it is the difference of the two. Both are in
units of ε·max|y| with ε = 2⁻²³ or 2⁻⁵² and y the true result: a unit in the last place of the largest value.
A sum of n terms of the size of y costs about √n of them, however it is computed.
"""

import inspect
from typing import Any

import numpy as np

from gru_ref import ops
from gru_ref.backend import Backend
from gru_ref.types import Array

SIZES: dict[str, dict[str, Any]] = {
    "accumulate": {"n": 40_009},
    "adamw": {"n": 20_011},
    "attention": {"T": 40, "S": 40, "B": 2, "N": 3, "D": 32},
    "attention_blocked": {"T": 150, "S": 150, "B": 3, "N": 2, "D": 32, "block": 64},
    "clip": {"n": 40_009},
    "cross_entropy": {"N": 151, "V": 1151},
    "embedded_gru": {"V": 37, "T": 33, "B": 21, "E": 65, "H": 130},
    "embedding": {"V": 37, "E": 129, "lead": (64, 16)},
    "gelu": {"shape": (31, 1151)},
    "gru": {"T": 33, "B": 21, "I": 65, "H": 130},
    "layer_norm": {"C": 384, "lead": (31, 5)},
    "linear": {"I": 384, "O": 1151, "lead": (31, 5)},
    "matmul": {"M": 65, "K": 257, "N": 33},
    "nadam": {"n": 20_011},
}
"""What is computed: larger than an operation's own example, with sizes that no block or vector divides."""
_SMALLER = dict.fromkeys(("embedded_gru", "gru"), ("weight_ih", "weight_hh"))
"""Inputs divided by 8: at these sizes a recurrence of larger weights is chaotic, any rounding grows."""


def errors(op: str, dtype: Any, backend: Backend, seed: int = 1, **options: Any) -> list[dict[str, Any]]:
    """The errors of an operation's results and gradients, a row each.

    A row has op, function, result, dtype, twin and definition. options: of the operation's example, beside
    those of SIZES. Functions that `backend` has no twin of are left out. twin and definition are in the unit
    of the module's docstring, definition None for float64.
    """
    twins = backend.twins(op)
    example = getattr(ops, op).example
    options = SIZES.get(op, {}) | options
    inputs = example(np.random.default_rng(seed), dtype=dtype, **options)
    for name in _SMALLER.get(op, ()):
        inputs[name] = inputs[name] / 8
    exact = _results(op, Backend("numpy"), _as(inputs, np.float64))
    plain = _results(op, Backend("numpy"), inputs)
    fast = _results(op, backend, inputs)
    rows = []
    for key, true in exact.items():
        if key[0] not in twins:
            continue
        unit = float(np.finfo(dtype).eps) * float(np.max(np.abs(true), initial=0)) or 1.0
        against = true if np.dtype(dtype) == np.float32 else plain[key]
        rows.append(
            {
                "op": op,
                "function": key[0],
                "result": key[1],
                "dtype": np.dtype(dtype).name,
                "twin": _largest(fast[key], against) / unit,
                "definition": _largest(plain[key], true) / unit if against is true else None,
            }
        )
    return rows


def _largest(a: Array, b: Array) -> float:
    return float(np.max(np.abs(a.astype(np.float64) - b), initial=0))


def _as(inputs: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Copies, the floating arrays among them in another dtype."""
    return {
        k: (v.astype(dtype) if v.dtype.kind == "f" else v.copy()) if isinstance(v, np.ndarray) else v
        for k, v in inputs.items()
    }


def _results(op: str, backend: Backend, inputs: dict[str, Any]) -> dict[tuple[str, str], Array]:
    """What the functions of an operation return for these inputs, by function and name of the result."""
    functions = getattr(backend, op)
    if op == "matmul":
        return {("round_to", to): functions.round_to(inputs["a"], to) for to in ("bf16", "fp16")}
    if hasattr(functions, "forward"):
        return _forward_and_backward(functions, inputs)
    inputs = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    if op == "clip":
        return {("global_norm", "norm"): np.array(functions.global_norm(**inputs))}
    if op == "accumulate":
        functions.add(**inputs)
        return {("add", "total"): inputs["total"]}
    functions.step(**inputs)
    return {("step", name): inputs[name] for name in ("params", "m", "v")}


def _forward_and_backward(functions: Any, inputs: dict[str, Any]) -> dict[tuple[str, str], Array]:
    y, cache = functions.forward(**inputs)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(np.float32).astype(y.dtype)
    gradients = functions.backward(dy, cache)
    names = [
        k for k, v in inspect.signature(functions.forward).parameters.items() if v.default in (v.empty, None)
    ]
    results = {("forward", "y"): y}
    for name, gradient in zip(names, gradients, strict=False):
        if gradient is not None:
            results["backward", f"d{name}"] = gradient
    return results


def elementary_errors() -> list[dict[str, Any]]:
    """The largest errors of the kernels' float32 eˣ, σ and tanh, in units in the last place of each value.

    Measured on 400,001 numbers spread over all sizes that matter, against float64.
    """
    from gru_ref.kernels.numba_cpu import _elementary

    size = 10.0 ** np.random.default_rng(1).uniform(-6, np.log10(85), 200_000)
    x = np.concatenate([size, -size, [0]]).astype(np.float32)
    rows = []
    for name, domain, exact in (
        ("exp", x[x <= 0], np.exp),
        ("sigmoid", x, lambda v: 1 / (1 + np.exp(-v))),
        ("tanh", x, np.tanh),
    ):
        true = exact(domain.astype(np.float64))
        ulp = np.spacing(np.abs(true).astype(np.float32)).astype(np.float64)
        rows.append(
            {"function": name, "ulp": float(np.max(np.abs(_elementary.over(name, domain) - true) / ulp))}
        )
    return rows
