"""How far two sets of tensors are apart: checkpoints, runs, exported files, golden values, in any mixture.

    L2-relative  ‖a − b‖ / max(‖a‖, ‖b‖)     0 where both are zero, at most 2; over one tensor, or over all
    largest      max |a − b|

Norms are in float64, of scaled values, so that no square overflows. Integers and booleans are subtracted
exactly, so that none passes for its neighbour; beside a float they count as float64. Equal values are no
difference, NaN beside NaN too, and a NaN or Inf in both is left out of the norms; any other NaN or Inf is a
difference beyond every tolerance. What is in a layout that import knows is compared under our names, so a
checkpoint can be held against its own export; anything else under the names in the file.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gru_ref.checkpoint.find import newest_checkpoint
from gru_ref.checkpoint.layout import HIDDEN
from gru_ref.checkpoint.read import load_checkpoint
from gru_ref.errors import UsageError
from gru_ref.interop.exchange import KINDS, family, interpret, is_hf_folder, read_weights, recognise
from gru_ref.types import Array

_BLOCK = 1 << 20  # elements that are turned into float64 at a time


@dataclass(frozen=True)
class Difference:
    """Of one tensor; the numbers are NaN where the shapes differ."""

    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    relative: float
    largest: float
    where: tuple[int, ...] | None  # of the largest; None where there is no difference
    within: bool  # whether `relative` is within the tolerance


@dataclass
class Comparison:
    """What `compare` found; `ok` says whether it is within the tolerance."""

    a: str
    b: str
    tolerance: float
    tensors: list[Difference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # that differ; they decide nothing
    notes: list[str] = field(default_factory=list)
    relative: float = math.nan  # over all tensors of equal shapes together; NaN where there are none
    largest: float = math.nan

    @property
    def ok(self) -> bool:
        return not self.only_a and not self.only_b and all(tensor.within for tensor in self.tensors)

    @property
    def identical(self) -> bool:
        return self.ok and not any(tensor.largest for tensor in self.tensors)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that are valid JSON: a number that is not finite is None."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        tensors = [
            {**vars(t), "relative": finite(t.relative), "largest": finite(t.largest)} for t in self.tensors
        ]
        numbers = {"relative": finite(self.relative), "largest": finite(self.largest)}
        return {**vars(self), "tensors": tensors, **numbers, "ok": self.ok, "identical": self.identical}


def compare(a: str | Path, b: str | Path, *, tolerance: float = 0.0) -> Comparison:
    """Hold two files against each other, tensor by tensor.

    `tolerance` bounds the L2-relative difference of every tensor. A tensor that only one of them has, or of
    another shape, is beyond it. Raises UsageError or CheckpointError for a file that cannot be read.
    """
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"--tolerance {tolerance}: must be a number of 0 or more")
    left, right = _read(a), _read(b)
    _drop_what_one_lacks(left, right)
    result = Comparison(str(a), str(b), tolerance)
    result.only_a = [name for name in left.tensors if name not in right.tensors]
    result.only_b = [name for name in right.tensors if name not in left.tensors]
    total = np.zeros(3)
    largest_of = []
    for name in left.tensors:
        if name not in right.tensors:
            continue
        x, y = _without_padding(name, left, right)
        dtypes = (left.dtypes.get(name, x.dtype.name), right.dtypes.get(name, y.dtype.name))
        relative = largest = math.nan
        where = None
        if x.shape == y.shape:
            norms, largest, where = _distances(x, y)
            total = np.hypot(total, norms)
            largest_of.append(largest)
            relative = _relative(norms)
        # with no tolerance even a difference whose square is too small for a number counts
        within = relative <= tolerance and (tolerance > 0 or largest == 0)
        result.tensors.append(Difference(name, (x.shape, y.shape), dtypes, relative, largest, where, within))
    if largest_of:
        result.relative, result.largest = _relative(total), float(np.max(largest_of))  # a NaN stays one
    result.notes = left.notes + right.notes
    for key in sorted(left.settings.keys() & right.settings.keys()):
        if left.settings[key] != right.settings[key]:
            result.settings[key] = (left.settings[key], right.settings[key])
    return result


@dataclass
class _Side:
    """One of the two, in our names where they are known."""

    tensors: dict[str, Array]
    settings: dict[str, Any]  # dotted keys
    dtypes: dict[str, str] = field(default_factory=dict)  # where NumPy has no name for one
    vocabulary: tuple[str, ...] = ()  # names of tensors with one row a token
    vocab_size: int = 0
    notes: list[str] = field(default_factory=list)
    knows_padding: bool = True  # False for other programs' files, which count every row as a token


def _read(path: str | Path) -> _Side:
    path = Path(path)
    if (path.is_dir() and not is_hf_folder(path)) or path.suffix == ".h5":
        return _read_checkpoint(newest_checkpoint(path))
    if not path.exists():
        raise UsageError(f"{path}: no such file; name a checkpoint, a run, a .safetensors or an .npz file")
    content = read_weights(path)
    reason = "its names are of no layout that import knows"
    for kind in KINDS:
        if family(kind).detect(content.tensors) is None:
            continue
        try:
            layout, selected = recognise(content, kind)
            weights = interpret(selected, kind, layout, {})
        except UsageError as error:
            reason = str(error).removeprefix(f"{content.path}: ")
            break
        model = weights.config.model
        settings = _flat(content.metadata.get("config", {}))
        side = _Side(weights.parameters, settings, {}, family(kind).VOCABULARY, model.vocab_size)
        side.knows_padding = layout == "own" or bool(settings)
        return side
    note = f"{path}: compared under the names in the file: {reason}"
    return _Side(content.tensors, _flat(content.metadata), content.dtypes, notes=[note])


def _read_checkpoint(path: Path) -> _Side:
    """Weights under their own names; moments, carried state and where the run stands under the file's."""
    checkpoint = load_checkpoint(path)
    model = checkpoint.config.model
    tensors = dict(checkpoint.model)
    for moment, arrays in checkpoint.moments.items():
        tensors |= {f"/optimizer/{moment}/{name}": array for name, array in arrays.items()}
    if checkpoint.hidden is not None:
        tensors[HIDDEN] = checkpoint.hidden
    settings = _flat(checkpoint.config.to_dict())
    settings |= {f"/optimizer/{name}": value for name, value in checkpoint.optimizer.items()}
    settings |= {f"/trainer/{name}": value for name, value in checkpoint.trainer.items()}
    return _Side(tensors, settings, {}, family(model.kind).VOCABULARY, model.vocab_size)


def _without_padding(name: str, left: _Side, right: _Side) -> tuple[Array, Array]:
    """A tensor of both; rows that pad one's vocabulary are left out where the other does not know them."""
    x, y = left.tensors[name], right.tensors[name]
    for side, other in ((left, right), (right, left)):
        V = side.vocab_size
        if name not in side.vocabulary or side.tensors[name].shape[:1] <= (V,):
            continue
        if x.shape == y.shape and not other.knows_padding:
            note = f"rows from {V} on only pad the vocabulary of one of them; not compared"
            left.notes += [note] if note not in left.notes else []
            return x[:V], y[:V]
        if other.tensors[name].shape[:1] == (V,):
            return x[:V], y[:V]
    return x, y


def _drop_what_one_lacks(left: _Side, right: _Side) -> None:
    """Moments and carried state are compared where both have them: no export has any."""
    for side, other in ((left, right), (right, left)):
        for prefix in ("/optimizer/m/", "/optimizer/v/", HIDDEN):
            mine = [name for name in side.tensors if name.startswith(prefix)]
            if mine and not any(name.startswith(prefix) for name in other.tensors):
                for name in mine:
                    del side.tensors[name]
                side.notes.append(f"{prefix.rstrip('/')}: only one of them has it; not compared")


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """{'train': {'steps': 5}} as {'train.steps': 5}."""
    if not isinstance(value, Mapping):
        return {prefix.rstrip("."): value}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{prefix}{key}.").items()}


def _distances(a: Array, b: Array) -> tuple[Array, float, tuple[int, ...] | None]:
    """(‖a−b‖, ‖a‖, ‖b‖), max |a−b| and where it is, of two arrays of one shape."""
    x, y = a.reshape(-1), b.reshape(-1)
    norms, largest, index = np.zeros(3), 0.0, None
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, x.size, _BLOCK):
            p, q = (v[start : start + _BLOCK] for v in (x, y))
            difference, p, q = _difference(p, q)
            norms = np.hypot(norms, [_norm(v) for v in (difference, p, q)])
            at = int(np.argmax(difference))  # a NaN counts as the largest
            if difference[at] > largest or (np.isnan(difference[at]) and not np.isnan(largest)):
                largest, index = float(difference[at]), start + at
    where = None if index is None else tuple(int(i) for i in np.unravel_index(index, a.shape))
    return norms, largest, where


def _difference(p: Array, q: Array) -> tuple[Array, Array, Array]:
    """|p − q|, p and q in float64, with 0 in all three for an equal NaN or Inf."""
    x, y = p.astype(np.float64), q.astype(np.float64)
    if all(v.dtype.kind in "iub" for v in (p, q)) and 8 in (p.itemsize, q.itemsize):
        # Python's integers: float64 cannot hold all of 64 bits, nor int64 every difference
        return np.abs(p.astype(object) - q.astype(object)).astype(np.float64), x, y
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    odd = same & ~np.isfinite(x)
    return np.abs(np.where(same, 0.0, x - y)), np.where(odd, 0.0, x), np.where(odd, 0.0, y)


def _norm(v: Array) -> float:
    """‖v‖, from squares of values that are first scaled to below 1 by a power of two."""
    largest = float(np.abs(v).max())
    if not math.isfinite(largest):
        return largest
    exponent = math.frexp(largest)[1]
    return float(np.ldexp(np.sqrt(np.square(np.ldexp(v, -exponent)).sum()), exponent))


def _relative(norms: Array) -> float:
    """‖a−b‖ / max(‖a‖, ‖b‖); NaN where one of them is not finite."""
    difference, of_a, of_b = norms.tolist()
    if not all(map(math.isfinite, (difference, of_a, of_b))):
        return math.nan
    return difference / max(of_a, of_b) if difference else 0.0
