"""How well a model predicts held-out text: loss, bits per byte, top-1 and top-5.

    loss = Σ nats / counted targets            BPB = Σ nats / (ln 2 · bytes of the counted targets)

Every window starts from the empty state, without dropout; sums are in fp64, so how the windows are cut into
batches matters only as far as products of other sizes round differently.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gru_ref.data.windows import Windows
from gru_ref.models import LanguageModel
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.types import Array


@dataclass(frozen=True)
class Evaluation:
    """Figures over all counted targets. bpb is None where the bytes of a token are unknown."""

    loss: float  # nats a token
    bpb: float | None  # bits a byte
    top1: float  # share of targets that were the most likely token
    top5: float  # share of targets among the five most likely
    tokens: int
    bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


_MANY = 2**16
"""Segments: more than any model is cut into."""


def bits_per_byte(nats: float, n_bytes: int | None) -> float | None:
    """Σ nats / (ln 2 · bytes), or None where there are no bytes to divide by."""
    return nats / (math.log(2) * n_bytes) if n_bytes else None


def evaluate(
    model: LanguageModel,
    windows: Windows,
    *,
    batch_size: int,
    token_bytes: Array | None = None,
    max_tokens: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Run over all windows, or over evenly spaced ones of about `max_tokens` tokens where that is above 0.

    token_bytes (V,): bytes of text that each token stands for (a tokenizer's `token_bytes()`), or None.
    progress: called with the windows done and in all.
    """
    chosen = np.arange(len(windows))
    limit = -(-max_tokens // windows.seq_len)
    if 0 < limit < len(windows):
        chosen = np.linspace(0, len(windows) - 1, limit).astype(np.int64)
    nats, tokens, n_bytes, top1, top5 = 0.0, 0, 0, 0, 0
    for start in range(0, len(chosen), batch_size):
        inputs, targets = windows.batch(chosen[start : start + batch_size])
        with np.errstate(over="ignore", invalid="ignore"):  # the figures say what came of it
            # nothing goes backward: of many segments forward keeps one, and only the logits stay
            logits = model.forward(inputs, segments=_MANY)[0]
            logits, targets = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
            losses, _ = model.ops.cross_entropy.forward(logits, targets, vocab_size=model.config.vocab_size)
        nats += float(losses.sum(dtype=np.float64))
        counted = targets != IGNORE
        ranks = target_ranks(logits[counted, : model.config.vocab_size], targets[counted])
        tokens += ranks.size
        top1 += int(np.count_nonzero(ranks < 1))
        top5 += int(np.count_nonzero(ranks < 5))
        if token_bytes is not None:
            n_bytes += int(token_bytes[targets[counted]].sum())
        if progress:
            progress(start + inputs.shape[1], len(chosen))
    return Evaluation(
        loss=nats / tokens,
        bpb=bits_per_byte(nats, n_bytes),
        top1=top1 / tokens,
        top5=top5 / tokens,
        tokens=tokens,
        bytes=None if token_bytes is None else n_bytes,
    )


def target_ranks(logits: Array, targets: Array) -> Array:
    """How many tokens each target's logit is behind, (N,); of equal logits the lower id is ahead.

    logits (N, V), targets (N,). Rank 0 is the most likely token; nothing is behind a NaN.
    """
    own = logits[np.arange(len(targets)), targets][:, None]
    behind = (logits < own) | ((logits == own) & (np.arange(logits.shape[1]) >= targets[:, None]))
    return np.count_nonzero(~behind, axis=1)
