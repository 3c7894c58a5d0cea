"""Hand-written backward passes against finite differences of the definitions, in float64.

An operation is checked element by element, for every float array input and a random cotangent dy; a model
along random directions u of every parameter tensor θ:

    operation   a = backward(dy)[i]         n = d/dx_i Σ dy ⊙ forward(x)
    model       a = Σ dL/dθ ⊙ u             n = d/ds L(θ + s·u)  at s = 0

    f′(0) ≈ ( f(−2h) − 8 f(−h) + 8 f(h) − f(2h) ) / 12h          wrong by h⁴f⁽⁵⁾/30, and by rounding, ε·f/h

h = 2⁻¹¹·max(1, |x|) is near ε^(1/5), where both errors are about 1e-12. What is reported is the largest

    |a − n| / max(|a|, |n|, s)              s = max(root mean square of n, 1e-3)

over an input's elements (a parameter's directions): relative to an element's own size, except that a much
smaller element is measured by the size of its neighbours, and rounding noise around 0 is no error at all.
An array that forward or backward changes in place is an error of its own.
"""

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gru_ref import models, random
from gru_ref import ops as definitions
from gru_ref.backend import Backend
from gru_ref.config import ModelConfig
from gru_ref.errors import GruRefError, UsageError
from gru_ref.types import Array

TOLERANCE = 1e-6
"""Worst relative error that still passes. A right gradient stays near 1e-10, a wrong one is far above."""

STEP = 2.0**-11
SCALE_FLOOR = 1e-3
DIRECTIONS = 3

_UNTIED = ModelConfig(layers=2, hidden=5, embedding=3, vocab_size=7, vocab_padding=4, dropout=0.25)
_TIED = replace(_UNTIED, embedding=0, tied=True)
_GPT2 = replace(_TIED, kind="gpt2", hidden=16, heads=2, context=7)
MODELS = {
    "gru-lm": {
        "reset_after": _UNTIED,
        "reset_before": replace(_UNTIED, reset_after=False),
        "reset_after, tied": _TIED,
        "reset_before, tied": replace(_TIED, reset_after=False),
    },
    "gpt2": {
        "tied": _GPT2,
        "untied, no bias": replace(_GPT2, tied=False, bias=False),
    },
}
"""Model kind -> case -> the small configuration it is checked at."""


@dataclass(frozen=True)
class GradcheckResult:
    """How far one gradient is from the finite differences."""

    name: str  # of the operation or the model kind
    case: str
    input: str  # of the operation, or the model's parameter
    worst: float  # the largest relative error; infinite where a value is not finite
    where: tuple[int, ...]  # the index of that element, or of that direction
    checked: int  # elements, or directions
    ok: bool  # worst is at most the tolerance


def checkable() -> list[str]:
    """What `gradcheck` knows: every operation that has a backward, then every model kind."""
    ops = [name for name in definitions.names() if hasattr(getattr(definitions, name), "backward")]
    return [*ops, *MODELS]


def gradcheck(
    names: Sequence[str] = (), *, seed: int = 0, tolerance: float = TOLERANCE, backend: str = "numpy"
) -> list[GradcheckResult]:
    """Check the operations and models of these names, or all of them: one result for each case and input.

    backend: whose forward and backward are checked; the differences are always those of the definitions.
    A gradient that is too far off or not finite has `ok` False. Raises UsageError for an unknown name, and
    GruRefError for a backward that breaks its contract: a missing gradient, a wrong shape, an array changed.
    """
    ops = Backend(backend)
    results = []
    for name in _selected(names):
        check = _check_model if name in MODELS else _check_op
        for case in MODELS[name] if name in MODELS else getattr(definitions, name).CASES:
            rng = np.random.default_rng([seed, random.GRADCHECK])
            for key, analytic, numeric in check(name, case, ops, rng):
                results.append(_compare(name, case, key, analytic, numeric, tolerance))
    return results


def _selected(names: Sequence[str]) -> list[str]:
    """`names` without repeats, all known; everything where there are none. One string is one name."""
    wanted = dict.fromkeys([names] if isinstance(names, str) else names)
    known = checkable()
    for name in wanted:
        if name in known:
            continue
        if name in definitions.names():
            raise UsageError(f"'{name}' has no backward to check; choose from {', '.join(known)}")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(known)
        raise UsageError(f"unknown operation or model '{name}'; {hint}")
    return list(wanted) or known


def _check_op(
    name: str, case: str, ops: Backend, rng: np.random.Generator
) -> Iterator[tuple[str, Array, Array]]:
    """Yields (input, analytic, numeric gradient) for every float input of one case of an operation."""
    definition, op = getattr(definitions, name), getattr(ops, name)
    inputs = definition.example(rng, **definition.CASES[case])
    arrays = {key: value for key, value in inputs.items() if isinstance(value, np.ndarray)}
    with _unchanged(f"{name} ({case}): forward", arrays):
        y, cache = op.forward(**inputs)
    dy = rng.standard_normal(y.shape)
    extra = {}
    if "dh_T" in inspect.signature(definition.backward).parameters:
        # an operation over time also takes the gradient of its last state, which is y[-1], used by itself
        extra["dh_T"] = rng.standard_normal(y.shape[1:])
    with _unchanged(f"{name} ({case}): backward", arrays | {"dy": dy} | extra):
        gradients = op.backward(dy, cache, **extra)
    if extra:
        dy[-1] += extra["dh_T"]
    for key, analytic in _paired(f"{name} ({case})", definition, inputs, gradients):
        yield key, analytic, _numeric(definition.forward, inputs, key, dy)


def _paired(
    what: str, definition: Any, inputs: dict[str, Any], gradients: tuple[Array | None, ...]
) -> Iterator[tuple[str, Array]]:
    """Yields (input, its gradient) for the float inputs; GruRefError where backward broke its contract."""
    keys = [
        key
        for key in inspect.signature(definition.forward).parameters
        if key in inputs and (inputs[key] is None or isinstance(inputs[key], np.ndarray))
    ]
    if len(gradients) != len(keys):
        raise GruRefError(f"{what}: backward gave {len(gradients)} gradients for inputs {', '.join(keys)}")
    for key, gradient in zip(keys, gradients, strict=True):
        x = inputs[key]
        differentiable = x is not None and np.issubdtype(x.dtype, np.floating)
        if differentiable != (gradient is not None):
            raise GruRefError(
                f"{what}: backward must give {'a gradient' if differentiable else 'None'} for {key}"
            )
        if gradient is None:
            continue
        if gradient.shape != x.shape:
            raise GruRefError(f"{what}: the gradient of {key} has shape {gradient.shape}, not {x.shape}")
        yield key, gradient


def _numeric(forward: Callable[..., Any], inputs: dict[str, Any], key: str, dy: Array) -> Array:
    """d/dx Σ dy ⊙ forward(x) for x = inputs[key], of x's shape."""
    x = inputs[key]

    def partial(index: tuple[int, ...]) -> float:
        def y_at(s: float) -> Array:
            moved = x.copy()
            moved[index] += s
            y: Array = forward(**inputs | {key: moved})[0]
            return y

        # differences are taken before the sum: the other elements' rounding then cancels
        return float(np.sum(dy * _derivative(y_at, STEP * max(1.0, abs(x[index])))))

    return np.array([partial(index) for index in np.ndindex(x.shape)]).reshape(x.shape)


def _check_model(
    kind: str, case: str, ops: Backend, rng: np.random.Generator
) -> Iterator[tuple[str, Array, Array]]:
    """Yields (parameter, analytic, numeric derivatives along DIRECTIONS directions) of one configuration.

    Dropout, ignored targets, label smoothing and a state that earlier tokens left are all on.
    """
    config = MODELS[kind][case]
    T, B = 5, 3
    ids, targets = rng.integers(0, config.vocab_size, (2, T, B))
    targets[1, 0] = targets[-1, -1] = definitions.cross_entropy.IGNORE
    earlier = rng.integers(0, config.vocab_size, (2, B))

    model, definition = (
        models.family(kind).Model(config, seed=3, backend=backend, dtype=np.float64)
        for backend in (ops, Backend("numpy"))
    )
    # not `initialise`: its zeros and ones hide errors, and beside its small weights a step of h is large
    model.arena.params[...] = definition.arena.params[...] = rng.standard_normal(model.arena.size) / 2
    _, state, _ = definition.forward(earlier)
    with _unchanged(f"{kind} ({case})", {"ids": ids, "state": state, "parameters": model.arena.params}):
        _, backward = _loss(model, ids, targets, state)
        backward()
    for name, parameter in definition.arena.param.items():
        directions = rng.standard_normal((DIRECTIONS, *parameter.shape))
        analytic = np.array([np.sum(model.arena.grad[name] * u) for u in directions])
        numeric = np.array(
            [_along(u, parameter, lambda: _loss(definition, ids, targets, state)[0]) for u in directions]
        )
        yield name, analytic, numeric


def _loss(model: Any, ids: Array, targets: Array, state: Array) -> tuple[float, Callable[[], None]]:
    """The mean loss of the counted targets, and a function that adds its gradients to `arena.grad`."""
    ops, count = model.ops, np.sum(targets != definitions.cross_entropy.IGNORE)
    logits, _, cache = model.forward(ids, state, dropout_step=2)
    losses, loss_cache = ops.cross_entropy.forward(
        logits.reshape(ids.size, -1),
        targets.reshape(-1),
        vocab_size=model.config.vocab_size,
        label_smoothing=0.1,
    )

    def backward() -> None:
        dlogits, _ = ops.cross_entropy.backward(np.full(ids.size, 1 / count), loss_cache)
        model.backward(dlogits.reshape(logits.shape), cache)

    return losses.sum(dtype=np.float64) / count, backward


def _along(u: Array, parameter: Array, loss: Callable[[], float]) -> float:
    """The derivative of `loss` as `parameter` moves along u; it ends where it was."""
    value = parameter.copy()

    def loss_at(s: float) -> float:
        parameter[...] = value + s * u
        return loss()

    derivative: float = _derivative(loss_at, STEP)
    parameter[...] = value
    return derivative


def _derivative(f: Callable[[float], Any], h: float) -> Any:
    """f′(0) from four values of f."""
    return (8 * (f(h) - f(-h)) - (f(2 * h) - f(-2 * h))) / (12 * h)


def _compare(
    name: str, case: str, key: str, analytic: Array, numeric: Array, tolerance: float
) -> GradcheckResult:
    scale = max(float(np.sqrt(np.mean(np.square(numeric)))), SCALE_FLOOR)
    largest = np.maximum(np.abs(analytic), np.abs(numeric))
    with np.errstate(invalid="ignore"):
        error = np.abs(analytic - numeric) / np.maximum(largest, scale)
    error[~np.isfinite(error)] = np.inf
    where = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
    worst = float(error[where])
    return GradcheckResult(name, case, key, worst, where, error.size, worst <= tolerance)


@contextmanager
def _unchanged(what: str, arrays: Mapping[str, Array]) -> Iterator[None]:
    """GruRefError if the body changes any byte of these arrays."""
    before = {key: a.tobytes() for key, a in arrays.items()}
    yield
    for key, a in arrays.items():
        if a.tobytes() != before[key]:
            raise GruRefError(f"{what} changed '{key}' in place; it must leave its arguments as they are")
