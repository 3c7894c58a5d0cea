"""Parameters and bytes of a configuration, before anything is allocated, and what fits into a memory."""

from dataclasses import dataclass

import numpy as np

from gru_ref.config import RANGES, Config
from gru_ref.models import family, is_decayed, parameter_shapes
from gru_ref.models.gru_lm import time_slices


@dataclass(frozen=True)
class Parameter:
    """A line of the table of parameters."""

    name: str
    shape: tuple[int, ...]
    count: int
    decayed: bool  # whether weight decay reaches it


def parameters(config: Config) -> list[Parameter]:
    """Every parameter in model order. The vocabulary size must be known."""
    return [
        Parameter(name, shape, int(np.prod(shape)), is_decayed(shape))
        for name, shape in parameter_shapes(config.model).items()
    ]


def memory(config: Config) -> dict[str, int]:
    """Bytes that a training step holds at once, by purpose; see `activation_floats` of the model.

    Activations are what forward keeps for backward, workspace is what the peak needs beside them. The
    optimizer's definition needs temporaries of the size of what it updates, the matrices and then the rest,
    but only after the activations are gone: Nadam four, AdamW three, and another for gradients that clipping
    or a decay that is not decoupled changes; its twin needs none.
    """
    rows = parameters(config)
    n = sum(row.count for row in rows)
    train, model = config.train, family(config.model.kind)
    shape = (config.model, train.seq_len, train.batch_size, train.segments)
    pooled = config.run.kernels == "numba"
    rounds = config.run.precision != "fp32"
    kept = model.kept_floats(*shape, rounds=rounds)
    peak = model.activation_floats(*shape, pooled, rounds=rounds, accumulates=train.accumulation > 1)
    largest_update = max(
        sum(row.count for row in rows if row.decayed is decayed) for decayed in (True, False)
    )
    optimizer = config.optimizer
    changed = train.clip_norm > 0 or (optimizer.weight_decay > 0 and not optimizer.decoupled)
    temporaries = 0 if pooled else ({"nadam": 4, "adamw": 3}[optimizer.name] + changed) * largest_update
    return {
        "parameters": 4 * n,
        "gradients": 4 * n,
        "moments": 8 * n,
        "activations": 4 * kept,
        "workspace": 4 * (max(peak, temporaries) - kept),
    }


def checkpoint_bytes(config: Config) -> tuple[int, int]:
    """Bytes of the numbers in a checkpoint at step 0 and in a later one, which has the moments too.

    With `carry_state` a later one also holds the state, (L, A·B, H).
    """
    n = sum(row.count for row in parameters(config))
    train, model = config.train, config.model
    state = model.layers * train.accumulation * train.batch_size * model.hidden * train.carry_state
    return 4 * n, 12 * n + 4 * state


def segments_used(config: Config, segments: int) -> int:
    """How many segments there really are: GPT-2 is cut between blocks, the GRU between slices of a window."""
    if config.model.kind == "gpt2":
        return min(segments, config.model.layers)
    return min(segments, time_slices(config.train.seq_len, config.train.batch_size))


@dataclass(frozen=True)
class Fit:
    """What K = `segments` needs at the configured batch, and the largest batch that fits; 0: none does."""

    segments: int
    bytes: int
    fits: bool
    largest_batch: int


def fits(config: Config, capacity: float) -> list[Fit]:
    """What fits into `capacity` bytes, with the configured K and with 1, 2, 4, … up to the most possible."""
    most = segments_used(config, 2**16)
    choices = {segments_used(config, config.train.segments), most, *(2**i for i in range(17) if 2**i < most)}
    rows = []
    for segments in sorted(choices):
        needed = _total(config, segments, config.train.batch_size)
        largest = _largest_batch(config, segments, capacity)
        rows.append(Fit(segments, needed, needed <= capacity, largest))
    return rows


def _total(config: Config, segments: int, batch_size: int) -> int:
    return sum(memory(config.replace("train", segments=segments, batch_size=batch_size)).values())


def _largest_batch(config: Config, segments: int, capacity: float) -> int:
    """By bisection; more windows never need less."""
    low, high = 0, RANGES["train.batch_size"][1] + 1
    while high - low > 1:
        middle = int(low + high) // 2
        if _total(config, segments, middle) <= capacity:
            low = middle
        else:
            high = middle
    return int(low)
