"""Sampling a token at batch size 1, against PyTorch eager and against the rate at which memory is read.

Every token needs every weight once, except the tables of which it looks up a row.
"""

from collections.abc import Callable

import numpy as np

from gru_ref.bench import _limits, _ours
from gru_ref.bench._peer import NO_TORCH, torch_peers
from gru_ref.bench._rows import Row, faster, missing, share
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import WARM_UP_CALLS, Spread, alternate
from gru_ref.config import ModelConfig
from gru_ref.errors import RunError
from gru_ref.generate import generate
from gru_ref.models import LanguageModel
from gru_ref.types import Array

PEER = "torch, eager"
BAR, BAR_PERCENT = 1.5, 70.0
PROMPT = 16  # tokens before the first one that is timed
TOKENS = 8  # a turn
MODELS = {
    "GRU-L3 D 1024": ModelConfig(hidden=1024, layers=3, vocab_size=100),
    "GPT-2 124M with cache": ModelConfig(
        kind="gpt2",
        layers=12,
        hidden=768,
        heads=12,
        context=1024,
        vocab_size=50257,
        vocab_padding=128,
        tied=True,
    ),
}


def run(settings: Settings) -> list[Row]:
    """Two rows a model."""
    return [row for name, config in MODELS.items() for row in _run(name, config, settings)]


def _run(name: str, config: ModelConfig, settings: Settings) -> list[Row]:
    work = f"sample a token, {name}, B 1"
    model = _ours.language_model(config, settings.kernels)
    prompt = [i % config.vocab_size for i in range(PROMPT)]
    most = (config.context or 1024) - PROMPT  # tokens until a cache is full
    tokens = generate(model, prompt, most)
    sides: dict[str, Callable[[], object]] = {"ours": lambda: next(tokens)}
    peers = torch_peers()
    if peers:
        peer = peers.same_model(model, settings.threads)
        _check_same_logits(model, peers.first_logits(peer, prompt), prompt, work)
        sides[PEER] = peers.sampling(peer, prompt)
    sides["memory"] = _limits.reading(settings.threads)
    times = alternate(sides, settings, calls=TOKENS, most=(most - WARM_UP_CALLS) // TOKENS)
    read = weight_bytes(model)
    rate = [4 * _limits.STREAM / seconds for seconds in times["memory"]]
    limit = [read / r for r in rate]
    note = f"{read / 1e6:.0f} MB a token; memory reads {Spread.of(rate).median / 1e9:.1f} GB/s"
    row = faster(work, times, PEER, BAR) if peers else missing(work, f"faster than {PEER}", BAR, NO_TORCH)
    return [row, share(work, times, limit, "memory bandwidth", BAR_PERCENT, note)]


def weight_bytes(model: LanguageModel) -> int:
    """Bytes of the weights that a token needs: a table is read whole only where it is the classifier."""
    looked_up = {"position.weight"} if model.config.tied else {"position.weight", "embedding.weight"}
    return sum(value.nbytes for name, value in model.arena.param.items() if name not in looked_up)


def _check_same_logits(model: LanguageModel, theirs: Array, prompt: list[int], what: str) -> None:
    logits, _, _ = model.forward(np.array(prompt)[:, None])
    ours = logits[-1, 0, : model.config.vocab_size]
    if not np.allclose(ours, theirs, rtol=0, atol=_ours.SAME * np.abs(ours).max()):
        raise RunError(f"{what}: the logits differ from the peer's by {np.abs(ours - theirs).max():.2g}")
