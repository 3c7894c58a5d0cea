"""Clip and optimizer step of 75.9 M parameters, against PyTorch's and against the memory's rate.

A parameter costs 32 bytes at least: the norm reads g (4); the update reads p, g, m and v and writes p, m and
v (28). The limit takes reads of g at the rate of reading, and p, m and v at that of reading and writing back.
Gradients are clipped in every step, to 0.999 of their norm.
"""

from collections.abc import Callable

import numpy as np

from gru_ref.arena import Arena
from gru_ref.backend import Backend
from gru_ref.bench import _limits, _ours
from gru_ref.bench._peer import NO_TORCH, torch_peers
from gru_ref.bench._rows import Row, faster, missing, share
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import Spread, alternate
from gru_ref.config import ModelConfig, OptimizerConfig
from gru_ref.models import parameter_shapes
from gru_ref.training.optimizer import Optimizer

MODEL = ModelConfig(hidden=2048, layers=3, vocab_size=100)  # gru-l3-v3a
BAR_PERCENT = 80.0
KEPT = 0.999  # share of the norm that clipping leaves
CASES = (("nadam", "torch NAdam(foreach)", 2.0), ("adamw", "torch AdamW(fused)", 1.1))


def run(settings: Settings) -> list[Row]:
    """Two rows an optimizer."""
    return [row for name, peer, bar in CASES for row in _run(name, peer, bar, settings)]


def _run(name: str, peer: str, bar: float, settings: Settings) -> list[Row]:
    arena = Arena(parameter_shapes(MODEL))
    work = f"clip and {name}, {arena.size / 1e6:.1f} M parameters"
    np.random.default_rng(1).standard_normal(out=arena.grads, dtype=np.float32)
    peers = torch_peers()
    sides = {"ours": _updating(arena, _ours.NADAM if name == "nadam" else _ours.ADAMW, settings.kernels)}
    if peers:
        sides[peer] = peers.updating(name, list(arena.grad.values()), settings.threads, KEPT)
    sides |= {"reading": _limits.reading(settings.threads), "updating": _limits.updating(settings.threads)}
    times = alternate(sides, settings)
    read = [4 * _limits.STREAM / seconds for seconds in times["reading"]]
    update = [8 * _limits.STREAM / seconds for seconds in times["updating"]]
    limit = [arena.size * (8 / r + 24 / u) for r, u in zip(read, update, strict=True)]
    rates = [Spread.of(rate).median / 1e9 for rate in (read, update)]
    note = f"memory reads {rates[0]:.1f} GB/s, reads and writes back {rates[1]:.1f} GB/s"
    row = faster(work, times, peer, bar) if peers else missing(work, f"faster than {peer}", bar, NO_TORCH)
    return [row, share(work, times, limit, "memory bandwidth", BAR_PERCENT, note)]


def _updating(arena: Arena, config: OptimizerConfig, kernels: str) -> Callable[[], object]:
    """What gru_ref.training.step does after backward."""
    ops = Backend(kernels)
    optimizer = Optimizer(config, ops)

    def update() -> None:
        norm = ops.clip.global_norm([arena.grads])
        optimizer.step(arena, _ours.LR, grad_scale=ops.clip.factor(norm, KEPT * norm))

    return update
