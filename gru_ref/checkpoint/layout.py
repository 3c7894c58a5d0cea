"""What a checkpoint holds and where each part stands in its HDF5 file. Not here: any file.

    /                         attributes: format, format_version, manifest_md5, complete (written last)
    /config  /data            JSON text: the whole configuration; the facts of the corpus
    /tokenizer                JSON text: the vocabulary, with data.tokenizer bpe
    /model/<name>             weights, float32 (or float64, then every tensor is float64)
    /optimizer/m/<name>       running mean of the gradient, from the first step on
    /optimizer/v/<name>       running mean of its square, never negative, from the first step on
    /optimizer/step           updates made, equal to /trainer/step; Nadam adds mu_product, its Π μ_t
    /trainer/<scalar>         where the run stands, see SCALARS; in fp16 also the loss scale
    /trainer/hidden           (L, B·accumulation, H) carried GRU state, with train.carry_state from step 1 on
    /manifest                 JSON list of every dataset above: path, dtype, shape, md5 of its bytes

Every dataset is contiguous, little-endian and without filters; a text is a fixed-length UTF-8 string. The
config explains every tensor: a missing, extra or differently shaped one is an error, nothing is broadcast.
A new config key needs a new format version, and a rule here for what older files mean: ADDED_KEYS.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gru_ref.config import Config
from gru_ref.errors import CheckpointError
from gru_ref.models import parameter_shapes
from gru_ref.types import Array

FORMAT = "gru-ref checkpoint"
FORMAT_VERSION = 3
# Keys of the configuration by the version that added them; an older file means their defaults.
ADDED_KEYS = {
    2: (
        "data.vocab",
        "model.bias",
        "model.context",
        "model.heads",
        "train.loss_scale",
        "train.loss_scale_growth",
    ),
    3: ("train.segments",),
}
GROUPS = ("/", "/model", "/optimizer", "/optimizer/m", "/optimizer/v", "/trainer")  # parents first
TEXTS = ("/config", "/data", "/tokenizer", "/manifest")
HIDDEN = "/trainer/hidden"
SCALARS = {
    "/optimizer/step": "<i8",
    "/trainer/step": "<i8",  # optimizer updates made
    "/trainer/tokens": "<i8",  # targets counted so far
    "/trainer/epoch": "<i8",
    "/trainer/cursor": "<i8",  # position in the epoch
    "/trainer/micro_step": "<i8",
    "/trainer/seed": "<u8",
    "/trainer/skipped": "<i8",  # non-finite steps, in all
    "/trainer/skipped_in_a_row": "<i8",
}
NADAM_SCALARS = {"/optimizer/mu_product": "<f8"}
BEST_SCALARS = {
    "/trainer/best_loss": "<f8",
    "/trainer/best_step": "<i8",
}  # both, or neither before a validation
LOSS_SCALE_SCALARS = {
    "/trainer/loss_scale": "<f8",  # a power of two
    "/trainer/loss_scale_good_steps": "<i8",  # steps since it changed
}  # both with run.precision fp16
TYPES = {**SCALARS, **NADAM_SCALARS, **BEST_SCALARS, **LOSS_SCALE_SCALARS}

Scalar: TypeAlias = int | float
Facts: TypeAlias = tuple[str, tuple[int, ...]]
"""A dataset's type as NumPy writes it ('<f4') and its shape."""


@dataclass
class Checkpoint:
    """Everything that a run needs to go on as if it had never stopped."""

    config: Config
    model: dict[str, Array]  # parameter name: weights
    moments: dict[str, dict[str, Array]]  # {} at step 0, else 'm' and 'v', each parameter name: array
    optimizer: dict[str, Scalar]  # step; with Nadam mu_product
    trainer: dict[str, Scalar]  # the names of SCALARS, and of others as their comments say
    hidden: Array | None = None  # (L, B·accumulation, H) carried state
    data: dict[str, Any] = field(default_factory=dict)  # fingerprint, tokenizer, sources: any JSON object
    tokenizer: dict[str, Any] | None = None  # of bpe: Tokenizer.definition()


def to_datasets(checkpoint: Checkpoint) -> dict[str, Array]:
    """Path: array of every dataset but the manifest, sorted; raises CheckpointError if not savable."""
    tensors = {f"/model/{name}": array for name, array in checkpoint.model.items()}
    for moment, arrays in checkpoint.moments.items():
        tensors.update({f"/optimizer/{moment}/{name}": array for name, array in arrays.items()})
    if checkpoint.hidden is not None:
        tensors[HIDDEN] = checkpoint.hidden
    scalars = {f"/optimizer/{key}": value for key, value in checkpoint.optimizer.items()}
    scalars |= {f"/trainer/{key}": value for key, value in checkpoint.trainer.items()}
    datasets = {path: np.asarray(array, order="C") for path, array in tensors.items()}
    datasets |= {path: _scalar(path, value, TYPES.get(path, "<f8")) for path, value in scalars.items()}
    found = {path: facts(array) for path, array in datasets.items()}
    problems = layout_problems(found, checkpoint.config, int(checkpoint.trainer.get("step", 0)))
    problems = problems or vocabulary_problems(checkpoint.tokenizer is not None, checkpoint.config)
    problems = problems or scalar_problems(scalars, checkpoint.config)
    for path, array in tensors.items():
        problems = problems or tensor_problems(path, array)
    if problems:
        raise CheckpointError(problems[0])
    datasets["/config"] = text_dataset("/config", checkpoint.config.to_dict())
    datasets["/data"] = text_dataset("/data", checkpoint.data)
    if checkpoint.tokenizer is not None:
        datasets["/tokenizer"] = text_dataset("/tokenizer", checkpoint.tokenizer)
    return dict(sorted(datasets.items()))


def from_datasets(
    config: Config,
    data: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    scalars: Mapping[str, Scalar],
    tensors: Mapping[str, Array],
) -> Checkpoint:
    """The inverse of `to_datasets`; moments and hidden state are those that `tensors` holds."""
    names = list(parameter_shapes(config.model))
    moments = {
        moment: {name: tensors[f"/optimizer/{moment}/{name}"] for name in names}
        for moment in ("m", "v")
        if f"/optimizer/{moment}/{names[0]}" in tensors
    }

    def under(group: str) -> dict[str, Scalar]:
        return {path.removeprefix(group): value for path, value in scalars.items() if path.startswith(group)}

    model = {name: tensors[f"/model/{name}"] for name in names}
    return Checkpoint(
        config, model, moments, under("/optimizer/"), under("/trainer/"), tensors.get(HIDDEN), data, tokenizer
    )


def tensor_shapes(config: Config, step: int) -> dict[str, tuple[int, ...]]:
    """Path: shape of every tensor that a checkpoint of this configuration holds after `step` updates."""
    if config.model.vocab_size == 0:
        raise CheckpointError("/config: model.vocab_size is 0, expected that of the tokenizer")
    shapes = parameter_shapes(config.model)
    groups = ["/model"] + (["/optimizer/m", "/optimizer/v"] if step > 0 else [])
    expected = {f"{group}/{name}": shape for group in groups for name, shape in shapes.items()}
    if config.train.carry_state and step > 0:
        columns = config.train.batch_size * config.train.accumulation
        expected[HIDDEN] = (config.model.layers, columns, config.model.hidden)
    return expected


def layout_problems(found: Mapping[str, Facts], config: Config, step: int) -> list[str]:
    """One line for each tensor or scalar that is missing, extra, or of another type or shape."""
    weights = [dtype for path, (dtype, _) in found.items() if path.startswith("/model/")]
    number = "<f8" if weights and set(weights) == {"<f8"} else "<f4"
    scalars = dict(SCALARS)
    if config.optimizer.name == "nadam":
        scalars |= NADAM_SCALARS
    if any(path in found for path in BEST_SCALARS):
        scalars |= BEST_SCALARS
    if config.run.precision == "fp16":
        scalars |= LOSS_SCALE_SCALARS
    expected: dict[str, Facts] = {
        path: (number, shape) for path, shape in tensor_shapes(config, step).items()
    }
    expected |= {path: (dtype, ()) for path, dtype in scalars.items()}
    problems = [f"{path}: missing, expected {show(expected[path])}" for path in expected if path not in found]
    problems += [
        f"{path}: {show(found[path])}, not explained by the config at step {step}"
        for path in found
        if path not in expected
    ]
    problems += [
        f"{path}: found {show(found[path])}, expected {show(expected[path])}"
        for path in expected
        if path in found and found[path] != expected[path]
    ]
    return problems


def vocabulary_problems(is_there: bool, config: Config) -> list[str]:
    """One line if /tokenizer is there without need, or missing."""
    name = config.data.tokenizer
    if is_there == (name == "bpe"):
        return []
    return [f"/tokenizer: {'not explained by' if is_there else 'missing, expected for'} tokenizer '{name}'"]


def scalar_problems(scalars: Mapping[str, Scalar], config: Config) -> list[str]:
    """One line for each scalar with a value that no run of this config produces."""
    problems = [
        f"{path}: {value}, expected a finite number"
        for path, value in scalars.items()
        if TYPES.get(path) == "<f8" and not np.isfinite(value)
    ]
    problems += [
        f"{path}: {value}, expected at least 0"
        for path, value in scalars.items()
        if TYPES.get(path) != "<f8" and value < 0
    ]
    step = scalars["/trainer/step"]
    if scalars["/optimizer/step"] != step:
        problems.append(f"/optimizer/step: {scalars['/optimizer/step']}, expected {step} as in /trainer/step")
    if scalars["/trainer/seed"] != config.train.seed:
        problems.append(
            f"/trainer/seed: {scalars['/trainer/seed']}, expected the config's {config.train.seed}"
        )
    if scalars["/trainer/micro_step"] < step:
        problems.append(f"/trainer/micro_step: {scalars['/trainer/micro_step']}, expected at least {step}")
    lanes = config.train.batch_size * config.train.accumulation if config.train.carry_state else 1
    if scalars["/trainer/cursor"] % lanes:
        problems.append(
            f"/trainer/cursor: {scalars['/trainer/cursor']}, expected a multiple of {lanes} lanes"
        )
    product = scalars.get("/optimizer/mu_product", 1.0)
    if np.isfinite(product) and not 0 <= product <= 1:
        problems.append(f"/optimizer/mu_product: {product}, expected 0 to 1")
    if not 0 <= scalars.get("/trainer/best_step", 0) <= step:
        problems.append(f"/trainer/best_step: {scalars['/trainer/best_step']}, expected 0 to {step}")
    if scalars["/trainer/skipped_in_a_row"] > scalars["/trainer/skipped"]:
        problems.append("/trainer/skipped_in_a_row: more than /trainer/skipped")
    scale = scalars.get("/trainer/loss_scale", 1.0)
    if np.isfinite(scale) and not (scale >= 1 and math.frexp(scale)[0] == 0.5):
        problems.append(f"/trainer/loss_scale: {scale}, expected a power of two from 1 on")
    return problems


def tensor_problems(path: str, array: Array) -> list[str]:
    """One line if a tensor holds NaN or Inf, one if a second moment is negative."""
    problems = []
    finite = np.isfinite(array)
    if not finite.all():
        nan, inf = int(np.isnan(array).sum()), int(np.isinf(array).sum())
        problems.append(f"{path}: {nan:,} NaN and {inf:,} Inf, the first at {_first(~finite)}")
    if path.startswith("/optimizer/v/") and (negative := array < 0).any():
        count = int(negative.sum())
        problems.append(f"{path}: {count:,} negative second moments, the first at {_first(negative)}")
    return problems


def _first(mask: Array) -> list[int]:
    return [int(i) for i in np.unravel_index(mask.argmax(), mask.shape)]


def _scalar(path: str, value: Scalar, dtype: str) -> Array:
    kinds = (int, float, np.integer, np.floating) if dtype == "<f8" else (int, np.integer)
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {value!r}, expected {np.dtype(dtype)}")
    try:
        return np.array(value, dtype)
    except OverflowError:
        raise CheckpointError(f"{path}: {value} does not fit into {np.dtype(dtype)}") from None


def to_json(value: Any) -> str:
    """Valid JSON with sorted keys, ASCII only: lone surrogates of odd file names survive as escapes."""
    return json.dumps(value, sort_keys=True, allow_nan=False)


def text_dataset(path: str, value: dict[str, Any]) -> Array:
    """A JSON object as a () array of bytes; raises CheckpointError where reading would give another value."""
    try:
        text = to_json(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict) or json.loads(text) != value:
        raise CheckpointError(f"{path}: not a JSON object of plain strings, numbers, lists and string keys")
    return np.array(text.encode("ascii"))


def manifest_dataset(datasets: Mapping[str, Array]) -> Array:
    """The manifest of these datasets as a () array of bytes."""
    entries = [
        {"path": path, "dtype": array.dtype.str, "shape": list(array.shape), "md5": md5(array)}
        for path, array in datasets.items()
    ]
    return np.array(to_json(entries).encode("ascii"))


def facts(array: Array) -> Facts:
    """Type and shape of an array in memory."""
    return array.dtype.str, array.shape


def show(item: Facts) -> str:
    """('<f4', (3, 2)) as 'float32 (3, 2)'."""
    dtype, shape = item
    if dtype.startswith("<"):
        dtype = np.dtype(dtype).name
    elif dtype.startswith(">"):
        dtype = f"big-endian {np.dtype(dtype).name}"
    return f"{dtype} {shape}" if shape else f"{dtype} scalar"


def md5(array: Array) -> str:
    """md5 of a contiguous array's bytes, as 32 hexadecimal digits. It finds damage, not tampering."""
    return hashlib.md5(array.reshape(-1).view(np.uint8).data, usedforsecurity=False).hexdigest()


def file_md5(chunks: Iterable[bytes]) -> str:
    """md5 of a file given in pieces."""
    digest = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def sidecar_path(path: Path) -> Path:
    """Where the md5 of the checkpoint file stands: `<name>.md5` beside it."""
    return path.with_name(path.name + ".md5")
