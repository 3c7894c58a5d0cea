"""All figures of a plan in one dictionary of plain values, which `gru-ref plan` prints or writes as JSON."""

import dataclasses
from typing import Any

from gru_ref.config import Config
from gru_ref.plan.devices import Device
from gru_ref.plan.flops import FORMULA, flops_per_token
from gru_ref.plan.memory import Fit, checkpoint_bytes, fits, memory, parameters
from gru_ref.plan.speed import Speed, measure_here, predict_on, tokens_per_step

SHARE_OF_MEMORY = 0.9  # the rest is the driver's, the error correction's, the interpreter's


def summary(
    config: Config,
    steps: int,
    *,
    gpu: Device | None = None,
    precision: str | None = None,
    share: float | None = None,
    price_per_hour: float | None = None,
    measured_tokens_per_second: float | None = None,
    measured_memory: float | None = None,
) -> dict[str, Any]:
    """The plan of `steps` optimizer steps on a GPU, or here where there is none; bytes, seconds and FLOPs.

    precision: of the products on the GPU; None: run.precision. share: of the peak, see speed.py. What was
    measured elsewhere (measured_memory in bytes) is set beside it. Here, the step is timed, unless it is too
    large for the memory: `speed` and `run` then are None. Raises ConfigError for a precision that the GPU
    has no peak for.
    """
    precision = precision or config.run.precision
    sizes, flops = memory(config), flops_per_token(config)
    memory_bytes = gpu.memory * 2**30 if gpu else _available_memory()
    capacity = SHARE_OF_MEMORY * memory_bytes
    speed: Speed | None = None
    if gpu is not None:
        speed = predict_on(config, gpu, precision, share)
    elif sum(memory(_least(config)).values()) <= capacity:
        speed = measure_here(config)
    at_step_0, later = checkpoint_bytes(config)
    peak = None if gpu is None else gpu.flops_per_second(precision)
    rows = fits(config, capacity)
    return {
        "model": _values(config.model, "kind", "layers", "hidden", "vocab_size"),
        "parameters": sum(row.count for row in parameters(config)),
        "step": {
            **_values(config.train, "accumulation", "batch_size", "seq_len", "segments"),
            "tokens": tokens_per_step(config),
        },
        "bytes": sizes,
        "total_bytes": sum(sizes.values()),
        "array_bytes": _array_bytes(config),
        "checkpoint_bytes": {"at_step_0": at_step_0, "later": later},
        "flops_per_token": flops,
        "total_flops_per_token": sum(flops.values()),
        "formula": FORMULA[config.model.kind],
        "device": {
            **(dataclasses.asdict(gpu) if gpu else {"name": "here", "memory": memory_bytes / 2**30}),
            "precision": precision,
            "peak_flops_per_second": peak,
        },
        "speed": None if speed is None else _speed(speed, flops, peak),
        "run": None if speed is None else _run(speed, steps, price_per_hour),
        "capacity_bytes": int(capacity),
        "fits": [dataclasses.asdict(row) for row in rows],
        "verdict": _verdict(config, rows),
        "measured": _measured(config, speed, peak, measured_tokens_per_second, measured_memory),
    }


def _values(table: Any, *keys: str) -> dict[str, Any]:
    return {key: getattr(table, key) for key in keys}


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _least(config: Config) -> Config:
    """The smallest step that speed.py times with all layers."""
    train = {"seq_len": 1} if config.model.kind == "gru-lm" else {"batch_size": 1}
    return config.replace("train", segments=1, **train)


def _array_bytes(config: Config) -> int:
    """Of one (T, B, H) array in fp32, the unit in which activations are counted."""
    return 4 * config.train.seq_len * config.train.batch_size * config.model.hidden


def _speed(speed: Speed, flops: dict[str, int], peak: float | None) -> dict[str, Any]:
    per_second = speed.tokens_per_second * sum(flops.values())
    return {
        "parts": speed.parts,
        "how": speed.how,
        "seconds_per_step": speed.seconds_per_step,
        "tokens_per_second": speed.tokens_per_second,
        "flops_per_second": per_second,
        "share_of_peak": None if peak is None else per_second / peak,
    }


def _run(speed: Speed, steps: int, price_per_hour: float | None) -> dict[str, Any]:
    seconds = steps * speed.seconds_per_step
    return {
        "steps": steps,
        "tokens": steps * speed.tokens,
        "seconds": seconds,
        "price_per_hour": price_per_hour,
        "cost": None if price_per_hour is None else seconds / 3600 * price_per_hour,
    }


def _verdict(config: Config, rows: list[Fit]) -> str:
    """Whether the configured batch and K fit, and otherwise what would."""
    now = [row for row in rows if row.segments <= config.train.segments][-1]  # K may be more than can be used
    if now.fits:
        return "fits"
    more = [row for row in rows if row.fits and row.segments > now.segments]
    would = [f"K={more[0].segments}"] if more else []
    if now.largest_batch:
        would.append(f"batch {now.largest_batch}")
    if not would and rows[-1].largest_batch:
        would.append(f"K={rows[-1].segments} with batch {rows[-1].largest_batch}")
    return f"does not fit: {' or '.join(would) or 'no K and no batch'} would"


def _measured(
    config: Config,
    speed: Speed | None,
    peak: float | None,
    tokens_per_second: float | None,
    n_bytes: float | None,
) -> dict[str, Any]:
    """What another run reached, as a share of the peak and of the prediction, and in (T, B, H) arrays."""
    found: dict[str, Any] = {}
    if tokens_per_second is not None:
        per_second = tokens_per_second * sum(flops_per_token(config).values())
        found |= {
            "tokens_per_second": tokens_per_second,
            "flops_per_second": per_second,
            "share_of_peak": None if peak is None else per_second / peak,
            "share_of_prediction": None if speed is None else tokens_per_second / speed.tokens_per_second,
        }
    if n_bytes is not None:
        sizes = memory(config)
        resident = sizes["parameters"] + sizes["gradients"] + sizes["moments"]
        found |= {
            "bytes": n_bytes,
            "bytes_beyond_ours": n_bytes - sum(sizes.values()),
            "arrays": (n_bytes - resident) / _array_bytes(config),
            "our_arrays": (sizes["activations"] + sizes["workspace"]) / _array_bytes(config),
        }
    return found
