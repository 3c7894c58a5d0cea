"""Judging a checkpoint: every check of a verifying load, then whether the values look like a trained model's.

`RANGES` says what is accepted. It is meant to find damage that md5 cannot see, because it was there when the
file was written (a zeroed matrix, an exploded weight); it is wide enough for every model trained honestly.
Not here: reading (read.py) and printing (cli/verify.py).
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gru_ref.checkpoint import layout
from gru_ref.checkpoint.read import examine, printable
from gru_ref.errors import CheckpointError
from gru_ref.types import Array

_BLOCK = 1 << 20  # elements that are turned into float64 at a time
_MAX_PROBLEMS = 1000


@dataclass(frozen=True)
class Range:
    """What the values of one kind of tensor may be."""

    kind: str
    largest: float  # of |x|
    std: tuple[float, float]  # lowest and highest; equal elements never break a matrix's symmetry


# Initial weights have std 1 (embedding) or 1/√(3H), 6e-4 for H = 2²⁰; one GRU weight of 20 saturates a gate
# by itself, and an optimizer moves a weight by about lr a step.
_MATRIX = (1e-5, 10.0)
RANGES = {
    "embedding.weight": Range("embedding", 100, _MATRIX),
    "weight_ih": Range("input matrix", 100, _MATRIX),
    "weight_hh": Range("recurrent matrix", 100, _MATRIX),
    "classifier.weight": Range("classifier", 100, _MATRIX),
    "bias": Range("bias", 100, (0, 50)),  # any vector; all zero is fine
    "matrix": Range("matrix", 100, _MATRIX),  # any other
    "hidden": Range("hidden state", 1.01, (0, 1.01)),  # |h| ≤ 1, a mean of tanh values, up to rounding
}


@dataclass(frozen=True)
class TensorReport:
    """One tensor of the file; the statistics are over all its elements, in float64."""

    name: str  # its path in the file, such as /model/gru.0.weight_hh
    shape: tuple[int, ...]
    dtype: str
    md5_ok: bool
    nan: int
    inf: int
    min: float
    max: float
    mean: float
    std: float
    in_range: bool | None  # None: no range is defined, as for moments


@dataclass
class VerifyReport:
    """What `verify_checkpoint` found; `ok` means no problems. Unknown numbers are None."""

    path: str  # with control characters escaped
    problems: list[str] = field(default_factory=list)  # one line each, naming the dataset
    notes: list[str] = field(default_factory=list)
    format_version: int | None = None
    step: int | None = None
    n_parameters: int | None = None
    bytes: int | None = None
    tensors: list[TensorReport] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain values that are valid JSON: NaN and Inf are None."""
        report = {**dataclasses.asdict(self), "ok": self.ok}
        for tensor in report["tensors"]:
            tensor["shape"] = list(tensor["shape"])
            for key in ("min", "max", "mean", "std"):
                tensor[key] = tensor[key] if math.isfinite(tensor[key]) else None
        return report


def verify_checkpoint(path: str | Path) -> VerifyReport:
    """Check one checkpoint file and the `.md5` sidecar beside it, in the memory of its largest tensor.

    What is wrong with the file is in the report's problems; a path that does not exist raises UsageError.
    """
    path = Path(path)
    report = VerifyReport(printable(str(path)))

    def visit(name: str, array: Array, md5_ok: bool) -> None:
        tensor, problem = _judge(name, array, md5_ok)
        report.tensors.append(tensor)
        if problem:
            report.problems.append(problem)

    try:
        contents = examine(path, report.problems.append, visit)
    except CheckpointError as error:
        report.problems.append(str(error))
    else:
        report.format_version = contents.format_version
        report.step = int(contents.scalars["/trainer/step"]) if "/trainer/step" in contents.scalars else None
        weights = [tensor for tensor in report.tensors if tensor.name.startswith("/model/")]
        report.n_parameters = sum(math.prod(tensor.shape) for tensor in weights)
    if os.path.isfile(path):  # False where it may not be looked at
        report.bytes = path.stat().st_size
        _check_sidecar(path, report)
    more = len(report.problems) - _MAX_PROBLEMS
    if more > 0:
        report.problems[_MAX_PROBLEMS:] = [f"and {more:,} more"]
    return report


def _check_sidecar(path: Path, report: VerifyReport) -> None:
    sidecar = layout.sidecar_path(path)
    if not os.path.isfile(sidecar):
        report.notes.append("no .md5 sidecar beside it")
        return
    try:
        with sidecar.open("rb") as file:
            written = file.read(4096)
        with path.open("rb") as file:
            found = layout.file_md5(iter(lambda: file.read(1 << 22), b""))
    except OSError as error:
        report.problems.append(f"{printable(sidecar.name)}: cannot be compared: {error.strerror or error}")
    else:
        expected = written.lstrip(b"\\")[:32].decode("ascii", "replace")
        if found != expected:
            source = printable(sidecar.name)
            report.problems.append(f"file md5 {found}, expected {printable(expected)} as in {source}")


def _judge(name: str, array: Array, md5_ok: bool) -> tuple[TensorReport, str | None]:
    low, high, mean, std = statistics(array)
    nan, inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
    accepted = _range_of(name, array.ndim)
    problem, in_range = None, None
    if accepted:
        largest, (least, most) = max(abs(low), abs(high)), accepted.std
        in_range = largest <= accepted.largest and (least <= std <= most or array.size == 1)
        if not in_range and not nan + inf:  # those have a line of their own
            limits = f"at most {accepted.largest:g} and {least:g} to {most:g}"
            found = f"largest |x| {largest:.4g} and std {std:.4g}, expected {limits}"
            problem = f"{name}: out of range for a trained {accepted.kind}: {found}"
    dtype = array.dtype.name
    return TensorReport(name, array.shape, dtype, md5_ok, nan, inf, low, high, mean, std, in_range), problem


def _range_of(name: str, ndim: int) -> Range | None:
    if name == layout.HIDDEN:
        return RANGES["hidden"]
    if not name.startswith("/model/"):
        return None
    if ndim < 2:
        return RANGES["bias"]
    return next((known for suffix, known in RANGES.items() if name.endswith(suffix)), RANGES["matrix"])


def statistics(array: Array) -> tuple[float, float, float, float]:
    """Minimum, maximum, mean and standard deviation, summed in float64; NaN and Inf carry through."""
    flat = array.reshape(-1)
    blocks = [slice(i, i + _BLOCK) for i in range(0, flat.size, _BLOCK)]
    with np.errstate(invalid="ignore", over="ignore"):
        mean = sum(float(flat[b].sum(dtype=np.float64)) for b in blocks) / flat.size
        squares = sum(float(np.square(flat[b].astype(np.float64) - mean).sum()) for b in blocks)
        return float(flat.min()), float(flat.max()), mean, math.sqrt(squares / flat.size)
