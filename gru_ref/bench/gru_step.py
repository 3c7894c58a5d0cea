"""A training step of the GRU language model, against PyTorch's nn.GRU with NAdam and against the CPU's limit.

The share of the CPU's limit counts the products that are really made, once in forward and twice in backward,
a multiplication and an addition for each number: D by 3D for a row that meets W or U, in each of L layers, D
by V for a token's logits. Twins make fewer than PyTorch for the same gradients: W of the first layer meets
the V rows of the embedding and not those of all tokens (ops/embedded_gru.py), and U no first state of zeros.
"""

from dataclasses import dataclass

from gru_ref.bench import _limits, _ours
from gru_ref.bench._peer import NO_TORCH, torch_peers
from gru_ref.bench._rows import Row, faster, missing, share
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread, alternate
from gru_ref.config import ModelConfig
from gru_ref.models.gru_lm import time_slices

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


def _operations(s: Shape, *, twins: bool) -> int:
    """Multiplications and additions in the products of a step."""
    tokens = s.T * s.B
    rows_of_W = tokens * (s.L - 1) + (V * time_slices(s.T, s.B) if twins else tokens)
    rows_of_U = (tokens - s.B if twins else tokens) * s.L
    return 18 * s.D**2 * (rows_of_W + rows_of_U) + 6 * s.D * V * tokens


def _run(s: Shape, settings: Settings) -> list[Row]:
    work = f"GRU step, D {s.D}, B {s.B}, T {s.T}, L {s.L}"
    model = _ours.language_model(ModelConfig(hidden=s.D, layers=s.L, vocab_size=V), settings.kernels)
    batch = _ours.random_batch(model.config, s.T, s.B)
    peers = torch_peers()
    theirs = peers and peers.training(peers.same_model(model, settings.threads), batch)
    sides = {"ours": _ours.Training(model, _ours.NADAM, batch)}
    if theirs:
        _ours.check_same_losses(sides["ours"], theirs, work)
        sides[PEER] = theirs
    times = alternate(sides | {"sgemm": _limits.sgemm()}, settings)
    operations = _operations(s, twins=settings.kernels != "numpy")
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
