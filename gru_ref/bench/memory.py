"""Peak memory of a training step against what `gru_ref.plan.memory` predicts, each in a process of its own.

Allocated: what NumPy asked for, by tracemalloc. Resident: by how much the process's peak grew, after a step
of a tiny model has imported, compiled and started threads; what the BLAS packs its operands into is in it.
"""

import dataclasses
import tracemalloc

from gru_ref import plan
from gru_ref.bench import _ours
from gru_ref.bench._child import in_child, peak_resident_bytes
from gru_ref.bench._rows import Row
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread
from gru_ref.config import Config, ModelConfig, OptimizerConfig

BAR = 5.0


@dataclasses.dataclass(frozen=True)
class Work:
    """A model and a batch."""

    model: ModelConfig
    optimizer: OptimizerConfig
    T: int
    B: int

    def __str__(self) -> str:
        m = self.model
        return f"{m.kind} step, D {m.hidden}, B {self.B}, T {self.T}, L {m.layers}, V {m.vocab_size}"


WORKS = (
    Work(ModelConfig(layers=3, hidden=512, vocab_size=100), _ours.NADAM, T=128, B=32),
    Work(ModelConfig(layers=3, hidden=1024, vocab_size=100), _ours.NADAM, T=32, B=64),
    Work(
        ModelConfig(kind="gpt2", layers=6, hidden=384, heads=6, context=256, vocab_size=65, tied=True),
        _ours.ADAMW,
        T=256,
        B=4,
    ),
    Work(
        ModelConfig(kind="gpt2", layers=12, hidden=768, heads=12, context=256, vocab_size=50304, tied=True),
        _ours.ADAMW,
        T=256,
        B=2,
    ),
)


def run(settings: Settings) -> list[Row]:
    """Two rows a work: the deviation of the peak from the prediction, in percent of that."""
    return [row for work in WORKS for row in _run(work, settings)]


def _run(work: Work, settings: Settings) -> list[Row]:
    config = Config(model=work.model, optimizer=work.optimizer)
    config = config.replace("train", seq_len=work.T, batch_size=work.B)
    config = config.replace("run", kernels=settings.kernels, threads=settings.threads)
    predicted = sum(plan.memory(config).values())
    peaks = {
        "allocated": in_child(allocated_bytes, work, settings),
        "resident": in_child(resident_bytes, work, settings),
    }
    return [
        Row(
            str(work),
            f"{kind} peak off plan's",
            Spread.of([100 * abs(peak - predicted) / predicted]),
            "%",
            BAR,
            at_most=True,
            note=f"{peak / 1e6:.0f} MB, predicted {predicted / 1e6:.0f} MB",
        )
        for kind, peak in peaks.items()
    ]


def allocated_bytes(work: Work, settings: Settings) -> int:
    """The most bytes of arrays at once, from the model's making to its third step."""
    _three_steps(_tiny(work), settings)
    tracemalloc.start()
    _three_steps(work, settings)
    return tracemalloc.get_traced_memory()[1]


def resident_bytes(work: Work, settings: Settings) -> int:
    """By how much the peak of this process grows."""
    _three_steps(_tiny(work), settings)
    before = peak_resident_bytes()
    _three_steps(work, settings)
    return peak_resident_bytes() - before


def _tiny(work: Work) -> Work:
    """The same on a scale that takes no memory."""
    return Work(dataclasses.replace(work.model, layers=1, hidden=24, vocab_size=8), work.optimizer, T=4, B=2)


def _three_steps(work: Work, settings: Settings) -> None:
    from gru_ref import threads

    with threads.limited(settings.threads, pool=settings.kernels == "numba"):
        model = _ours.language_model(work.model, settings.kernels)
        step = _ours.Training(model, work.optimizer, _ours.random_batch(work.model, work.T, work.B))
        for _ in range(3):
            step()
