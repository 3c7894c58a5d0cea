"""Seconds of an optimizer step: measured here on a shortened step, or on a GPU from its peak and bandwidth.

On a GPU, a plain sum of work and traffic:

    seconds = FLOPs / (peak · share) + bytes / bandwidth
    FLOPs   = those of flops.py, and the forward third of them again for K − 1 of K segments
    bytes   = 2 · (activations + workspace) for each micro-batch    written once, read once
            + 32 a parameter                                        g twice; θ, m, v read and written

The share of the peak is that of a public run of the same kind of model and not a property of the card: say
another where you know better. Here no peak is known, so the step itself is timed, at a size that takes a
few seconds, and continued in proportion to the length and to the number of layers.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from gru_ref.config import Config
from gru_ref.models import family
from gru_ref.models.gru_lm import time_slices
from gru_ref.plan.devices import Device
from gru_ref.plan.flops import flops_per_token
from gru_ref.plan.memory import memory, parameters, segments_used

# gru-lm: 17,666 tokens/s of the write-up's GRU on an L40S, in fp32. gpt2: the lesson's 12 layers in bf16; its
# 4 layers, too small for that card, reached 3.5 %.
SHARE_OF_PEAK = {"gru-lm": (0.088, "fp32"), "gpt2": (0.13, "bf16")}

BUDGET = 1.6  # seconds that timing here may take, about
SMALL = 6e10  # FLOPs of one window, or of one time step of a batch, up to which all layers are timed
NARROW = 100  # tokens


@dataclass(frozen=True)
class Speed:
    """A predicted optimizer step. `parts` are its seconds by purpose; `how` says where they come from."""

    parts: dict[str, float]
    tokens: int  # of the step, A·B·T
    how: str

    @property
    def seconds_per_step(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds_per_step


def tokens_per_step(config: Config) -> int:
    """A·B·T."""
    return config.train.accumulation * config.train.batch_size * config.train.seq_len


def predict_on(config: Config, gpu: Device, precision: str, share: float | None = None) -> Speed:
    """The step on a GPU. share: of its peak in `precision` that products reach; None: SHARE_OF_PEAK."""
    default, measured_in = SHARE_OF_PEAK[config.model.kind]
    used = default if share is None else share
    tokens, sizes = tokens_per_step(config), memory(config)
    flops = tokens * sum(flops_per_token(config).values()) * _with_recomputation(config)
    n_bytes = 2 * config.train.accumulation * (sizes["activations"] + sizes["workspace"])
    n_bytes += 8 * sizes["parameters"]
    how = f"products at {100 * used:.3g} % of the {precision} peak"
    if share is None:
        how += f", as a public run did in {measured_in}"
        how += "" if precision == measured_in else ": here a guess"
    parts = {
        "products": flops / (used * gpu.flops_per_second(precision)),
        "memory traffic": n_bytes / (1e9 * gpu.bandwidth),
    }
    return Speed(parts, tokens, how)


def _with_recomputation(config: Config) -> float:
    """How much more work the segments make: forward, a third of the products, again for all but the last."""
    return 1 + (1 - 1 / segments_used(config, config.train.segments)) / 3


def measure_here(config: Config, budget: float = BUDGET) -> Speed:
    """The step here, with the kernels, precision and threads of `config`; takes `budget` seconds, about.

    A large model of many layers is timed with one of them; what each other one adds is timed with one and
    with three at a vocabulary of NARROW, beside whose classifier a layer is not lost. A recurrent model is
    timed over fewer time steps of the whole batch, another one over fewer windows of the whole length.
    Recomputation in segments is not timed but counted.
    """
    from gru_ref import threads

    layers, accumulation = config.model.layers, config.train.accumulation
    n = sum(row.count for row in parameters(config))
    least = config.train.batch_size if config.model.kind == "gru-lm" else config.train.seq_len
    small = least * sum(flops_per_token(config).values()) <= SMALL
    narrow = config.replace("model", vocab_size=min(config.model.vocab_size, NARROW))
    shapes = [config]
    if layers > 3 and not small:
        shapes = [c.replace("model", layers=depth) for c, depth in ((config, 1), (narrow, 1), (narrow, 3))]
    with threads.limited(config.run.threads, pool=config.run.kernels == "numba"):
        _time_micro_batch(_tiny(config), 0.0)  # imports and compiles
        timed = [_time_micro_batch(shape, budget / len(shapes)) for shape in shapes]
        update, counted = _time_update(shapes[0])
    micro_batch = timed[0][0]
    if len(timed) > 1:
        micro_batch += (layers - 1) * max(0.0, timed[2][0] - timed[1][0]) / 2
    parts = {
        "forward and backward": accumulation * micro_batch * _with_recomputation(config),
        "update": update * n / counted,
    }
    how = f"{shapes[0].model.layers} of {layers} layers over {timed[0][1]}"
    if len(timed) > 1:
        how += f"; without most of the vocabulary 1 over {timed[1][1]}, 3 over {timed[2][1]}"
    return Speed(parts, tokens_per_step(config), f"timed: {how}")


def _time_micro_batch(config: Config, budget: float) -> tuple[float, str]:
    """Seconds of forward and backward of one micro-batch, and the size that was timed for it.

    The timed part is doubled while the budget lasts. What it costs is in proportion to its size but for the
    passes over the weights and their gradients: one, or one for each slice of a recurrent model's window.
    """
    from gru_ref.training.step import accumulate

    model = _model(config)
    T, B = config.train.seq_len, config.train.batch_size
    recurrent = model.context is None
    full, unit = (T, "time steps") if recurrent else (B, "windows")
    rng = np.random.default_rng(0)

    def seconds(T: int, B: int) -> float:
        ids = rng.integers(0, config.model.vocab_size, (T, B))
        started = time.perf_counter()
        model.arena.forget_grads()  # as a step does
        accumulate(model, [(ids, ids)])
        return time.perf_counter() - started

    def passes(size: int) -> int:
        return time_slices(size, B) if recurrent else 1

    end = time.perf_counter() + budget
    size = 1
    first = seconds(*((size, B) if recurrent else (T, size)))
    a_pass = min(seconds(1, 1), first / 2)
    while size < full and time.perf_counter() + 2 * first < end:
        size = min(2 * size, full)
        first = seconds(*((size, B) if recurrent else (T, size)))
    taken: list[float] = []  # without the first, which takes memory from the system
    while not taken or time.perf_counter() + first < end:
        taken.append(seconds(*((size, B) if recurrent else (T, size))))
    products = max(0.0, statistics.median(taken) - passes(size) * a_pass)  # a busy machine can make it less
    return passes(full) * a_pass + products * full / size, f"{size} of {full} {unit}"


def _time_update(config: Config) -> tuple[float, int]:
    """Seconds of norm, clipping, optimizer and finite checks, and the number of parameters they are for."""
    from gru_ref.training.optimizer import Optimizer
    from gru_ref.training.step import train_step

    model = _model(config)
    optimizer = Optimizer(config.optimizer, model.ops)
    for _ in range(2):  # the first one also takes the memory of gradients and moments
        started = time.perf_counter()
        train_step(model, optimizer, [], lr=0.0, clip_norm=config.train.clip_norm)
        seconds = time.perf_counter() - started
    return seconds, model.arena.size


def _model(config: Config) -> Any:
    """A model with weights that are made faster than the true initial ones, and cost as much to use."""
    from gru_ref.backend import Backend

    kind, run = config.model.kind, config.run
    model = family(kind).Model(config.model, backend=Backend(run.kernels), precision=run.precision)
    few = np.random.default_rng(0).standard_normal(4093, dtype=np.float32)
    model.arena.params[...] = 0.02 * np.resize(few, model.arena.size)
    model.arena.grads[...] = 0  # takes their memory now, not while it is timed
    return model


def _tiny(config: Config) -> Config:
    """The same kind of model, as small as it gets."""
    model = config.model
    config = config.replace("model", layers=1, hidden=model.heads, embedding=0)
    return config.replace("train", batch_size=16, seq_len=2)
