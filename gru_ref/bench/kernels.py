"""A training step by the compiled twins against the definitions, one small model of each family."""

from gru_ref.bench import _ours
from gru_ref.bench._rows import Row, faster
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import alternate
from gru_ref.config import ModelConfig

T, B, V = 64, 12, 100
MODELS = (
    ModelConfig(kind="gru-lm", layers=2, hidden=256, vocab_size=V),
    ModelConfig(kind="gpt2", layers=4, hidden=128, heads=4, context=T, vocab_size=V),
)
PEER = "the definitions"


def run(settings: Settings) -> list[Row]:
    """A row a family; whatever kernels the settings say."""
    return [_run(config, settings) for config in MODELS]


def _run(config: ModelConfig, settings: Settings) -> Row:
    work = f"{config.kind} step, D {config.hidden}, B {B}, T {T}, L {config.layers}"
    optimizer = _ours.ADAMW if config.kind == "gpt2" else _ours.NADAM
    batch = _ours.random_batch(config, T, B)
    twins, definitions = (
        _ours.Training(_ours.language_model(config, kernels), optimizer, batch)
        for kernels in ("numba", "numpy")
    )
    _ours.check_same_losses(twins, definitions, work)
    return faster(work, alternate({"ours": twins, PEER: definitions}, settings), PEER)
