"""How the cost of a training step grows as T, B, L or the width doubles."""

import dataclasses
from collections.abc import Callable

from gru_ref.bench import _ours
from gru_ref.bench._rows import Row
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread, alternate, ratios
from gru_ref.config import ModelConfig

BAR, BAR_WIDTH = 2.2, 4.4


@dataclasses.dataclass(frozen=True)
class Shape:
    """A size of the work; heads are of the same width in all."""

    kind: str
    T: int
    B: int
    L: int
    D: int

    def __str__(self) -> str:
        return f"{self.kind} step, D {self.D}, B {self.B}, T {self.T}, L {self.L}"


SHAPES = (Shape("gru-lm", T=32, B=32, L=2, D=256), Shape("gpt2", T=64, B=8, L=4, D=128))
V = 100


def run(settings: Settings) -> list[Row]:
    """A row a family and a size that is doubled."""
    return [row for shape in SHAPES for row in _run(shape, settings)]


def _run(shape: Shape, settings: Settings) -> list[Row]:
    doubled = {key: dataclasses.replace(shape, **{key: 2 * getattr(shape, key)}) for key in "TBLD"}
    sides = {key: _step(s, settings) for key, s in {"base": shape, **doubled}.items()}
    times = alternate(sides, settings)
    return [
        Row(
            str(shape),
            f"cost as {key} doubles",
            ratios(times[key], times["base"]),
            bar=BAR_WIDTH if key == "D" else BAR,
            at_most=True,
            sides={"base": Spread.of(times["base"]), "doubled": Spread.of(times[key])},
        )
        for key in doubled
    ]


def _step(s: Shape, settings: Settings) -> Callable[[], object]:
    config = ModelConfig(kind=s.kind, layers=s.L, hidden=s.D, vocab_size=V)
    optimizer = _ours.NADAM
    if s.kind == "gpt2":
        config = dataclasses.replace(config, heads=s.D // 32, context=s.T)
        optimizer = _ours.ADAMW
    model = _ours.language_model(config, settings.kernels)
    return _ours.Training(model, optimizer, _ours.random_batch(config, s.T, s.B))
