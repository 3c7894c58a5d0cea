"""A training step of the GRU language model, against PyTorch's nn.GRU with NAdam and against the CPU's limit.

A token costs 36·D²·L + 6·D·V operations: each of L layers has two products of D by 3D, the classifier one of
D by V, a multiplication and an addition each, once in forward and twice in backward. The rest is not counted.
"""

from dataclasses import dataclass

from gru_ref.bench import _limits, _ours
from gru_ref.bench._peer import NO_TORCH, torch_peers
from gru_ref.bench._rows import Row, faster, missing, share
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread, alternate
from gru_ref.config import ModelConfig

PEER = "torch nn.GRU"
V = 100


@dataclass(frozen=True)
class Shape:
    """A size of the work, and its bars."""

    D: int
    B: int
    T: int
    L: int
    times: float  # faster than the peer
    percent: float  # of the rate of a large product


SHAPES = (Shape(256, 32, 64, 2, 2.0, 55), Shape(512, 32, 128, 3, 2.0, 65), Shape(1024, 64, 32, 3, 2.0, 75))


def run(settings: Settings) -> list[Row]:
    """Two rows a shape."""
    return [row for shape in SHAPES for row in _run(shape, settings)]


def _run(s: Shape, settings: Settings) -> list[Row]:
    work = f"GRU step, D {s.D}, B {s.B}, T {s.T}, L {s.L}"
    model = _ours.language_model(ModelConfig(hidden=s.D, layers=s.L, vocab_size=V), settings.kernels)
    batch = _ours.random_batch(model.config, s.T, s.B)
    peers = torch_peers()
    theirs = peers and peers.training(peers.same_model(model, settings.threads), batch)
    sides = {"ours": _ours.training(model, _ours.NADAM, batch)}
    if theirs:
        _ours.check_same_losses(sides["ours"], theirs, work)
        sides[PEER] = theirs
    times = alternate(sides | {"sgemm": _limits.sgemm()}, settings)
    operations = s.T * s.B * (36 * s.D**2 * s.L + 6 * s.D * V)
    limit = [seconds * operations / _limits.sgemm_flops() for seconds in times["sgemm"]]
    rates = [
        work_done / Spread.of(times[name]).median / 1e9
        for name, work_done in (("ours", operations), ("sgemm", _limits.sgemm_flops()))
    ]
    note = f"{rates[0]:.0f} of {rates[1]:.0f} GF/s"
    row = (
        faster(work, times, PEER, s.times)
        if theirs
        else missing(work, f"faster than {PEER}", s.times, NO_TORCH)
    )
    return [row, share(work, times, limit, "large sgemm", s.percent, note)]
