"""Export of a checkpoint's weights to other programs' files, and import of theirs as a checkpoint.

    export   checkpoint → parameters without the rows beyond the vocabulary → a layout → safetensors or npz
    import   file → names → float32 → configuration from metadata, shapes, settings → parameters → checkpoint

Only weights travel: no moments, no step. A file that `export_checkpoint` wrote also carries the
configuration, so that it comes back with the same tokenizer and settings. No number is changed in silence.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gru_ref import config as configuration
from gru_ref.checkpoint.find import newest_checkpoint
from gru_ref.checkpoint.layout import SCALARS, Checkpoint, sidecar_path, tensor_problems
from gru_ref.checkpoint.read import load_checkpoint
from gru_ref.checkpoint.restore import restore_tokenizer
from gru_ref.checkpoint.write import save_checkpoint
from gru_ref.config import Config, ModelConfig
from gru_ref.data import bpe
from gru_ref.data.tokenizers import Tokenizer, get_tokenizer
from gru_ref.errors import ConfigError, DataError, UsageError
from gru_ref.interop.rules import Rule, crop, pack, pad, unpack
from gru_ref.interop.tensor_files import (
    TensorFile,
    check_free,
    read_shards,
    read_tensors,
    replacing,
    write_tensors,
)
from gru_ref.interop.vocabulary import tokenizer_json
from gru_ref.models import padded_vocab
from gru_ref.temporaries import remove_stale_of
from gru_ref.types import Array
from gru_ref.version import __version__

TARGETS = {
    "torch": ("torch", ".safetensors"),
    "keras": ("keras", ".npz"),
    "hf-gpt2": ("hf-gpt2", ".safetensors"),
    "safetensors": ("own", ".safetensors"),
    "npz": ("own", ".npz"),
}
"""What a checkpoint can be exported to: the layout and the suffix of the file."""

KINDS = ("gru-lm", "gpt2")
HF_WEIGHTS, HF_CONFIG, HF_TOKENIZER = "model.safetensors", "config.json", "tokenizer.json"
HF_INDEX = "model.safetensors.index.json"


def family(kind: str) -> ModuleType:
    """The module of this package that knows the layouts of a kind of model."""
    return import_module(f"{__package__}.{kind.replace('-', '_')}")


def _rules(known: ModuleType, layout: str, model: ModelConfig) -> list[Rule]:
    """The tensors of a file; only our own layout has rows beyond the vocabulary."""
    if layout != "own":
        model = dataclasses.replace(model, vocab_padding=1)
    rules: list[Rule] = known.rules(layout, model)
    return rules


# Export ----------------------------------------------------------------------------------------------------


def export_checkpoint(
    source: str | Path, to: str, output: str | Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the weights of a checkpoint, or of a run's newest, as one of TARGETS; returns the facts.

    hf-gpt2 also takes a folder, and writes what `from_pretrained` reads: model.safetensors and config.json.
    Beside other programs' layouts goes the vocabulary of tokenizer bpe: tokenizer.json, NAME.tokenizer.json.
    Raises UsageError where the layout has no place for the model or the output cannot be used.
    """
    if to not in TARGETS:
        raise UsageError(f"unknown format {to!r}; known: {', '.join(TARGETS)}")
    layout, suffix = TARGETS[to]
    path = Path(output)
    if to == "hf-gpt2" and path.suffix != suffix:
        path /= HF_WEIGHTS
    if path.suffix != suffix:
        raise UsageError(f"{path}: {to} is written as {suffix}; name the file so")
    check_free(path, overwrite=overwrite)
    newest = newest_checkpoint(source)
    checkpoint = load_checkpoint(newest, weights_only=True)
    model = checkpoint.config.model
    known = family(model.kind)
    parameters: Mapping[str, Array] = checkpoint.model
    if layout != "own":
        parameters = crop(parameters, known.VOCABULARY, model)
    try:
        tensors = pack(_rules(known, layout, model), parameters)
    except UsageError as error:
        raise UsageError(f"{newest}: {error}") from None
    metadata: dict[str, Any] = {}
    beside: dict[Path, dict[str, Any]] = {}
    if to == "hf-gpt2":
        beside[path.with_name(HF_CONFIG)] = known.hf_config(model)
    else:
        metadata = {"config": checkpoint.config.to_dict(), "data": checkpoint.data, "version": __version__}
        if checkpoint.tokenizer is not None:
            metadata["tokenizer"] = checkpoint.tokenizer
    if checkpoint.tokenizer is not None and layout != "own":
        name = HF_TOKENIZER if to == "hf-gpt2" else f"{path.name}.{HF_TOKENIZER}"
        beside[path.with_name(name)] = tokenizer_json(restore_tokenizer(checkpoint))
    if to == "hf-gpt2":
        _make_folder(path.parent)
    _write(path, tensors, metadata, beside, overwrite=overwrite)
    return {
        "checkpoint": str(newest),
        "to": to,
        "files": [str(file) for file in (path, *beside)],
        "tensors": len(tensors),
        "numbers": sum(tensor.size for tensor in tensors.values()),
    }


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made: {error.strerror}") from None


def _write(
    path: Path,
    tensors: Mapping[str, Array],
    metadata: dict[str, Any],
    beside: Mapping[Path, dict[str, Any]],
    *,
    overwrite: bool,
) -> None:
    """The tensors, and JSON files beside them."""
    for file in beside:
        check_free(file, overwrite=overwrite)
    write_tensors(path, tensors, metadata, overwrite=overwrite)
    for file, value in beside.items():
        with replacing(file, overwrite=overwrite) as stream:
            stream.write((json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


# Import ----------------------------------------------------------------------------------------------------


def import_file(
    file: str | Path,
    kind: str,
    output: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the weights of a file as a checkpoint at step 0; returns the facts, with `notices`.

    kind: of the model, one of KINDS. settings: configuration keys and values that the file does not tell, or
    tells wrongly. rename: beginnings of tensor names, and what stands there instead. Raises UsageError, one
    line naming the file and what is wrong with it.
    """
    output = Path(output)
    if kind not in KINDS:
        raise UsageError(f"unknown kind of model {kind!r}; known: {', '.join(KINDS)}")
    if output.suffix != ".h5":
        raise UsageError(f"{output}: a checkpoint is written as .h5; name the file so")
    check_free(output, overwrite=overwrite)
    content = rename_tensors(read_weights(file), rename or {})
    layout, content = recognise(content, kind)
    content, notices = as_float32(content)
    weights = interpret(content, kind, layout, settings or {})
    config, parameters = weights.config, weights.parameters
    if weights.untold:
        raise UsageError(f"{weights.told_by}: does not tell {weights.untold[0]}; give it with --set")
    if layout != "own":
        parameters = pad(parameters, family(kind).VOCABULARY, config.model)
    try:
        configuration.check(config)
    except ConfigError as error:
        raise ConfigError(f"{weights.told_by}: {error}") from None
    checkpoint = _untrained(config, parameters)
    checkpoint.tokenizer = _tokenizer(config, content, settings or {}).definition()
    checkpoint.data = content.metadata.get("data", {})
    if not isinstance(checkpoint.data, dict):
        raise UsageError(f"{content.path}: the data in its metadata is not a JSON object")
    for path in (output, sidecar_path(output)):
        remove_stale_of(path)
    save_checkpoint(output, checkpoint)
    return {
        "file": str(content.path),
        "layout": layout,
        "checkpoint": str(output),
        "parameters": sum(array.size for array in parameters.values()),
        "model": config.to_dict()["model"],
        "tokenizer": config.data.tokenizer,
        "notices": notices + weights.notices,
    }


def _tokenizer(config: Config, content: TensorFile, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer, which must fit the model: with a vocabulary from the settings or from the metadata."""
    name, rows = config.data.tokenizer, config.model.vocab_size
    tokenizer: Tokenizer
    if settings.get("data.vocab"):
        tokenizer = bpe.load(config.data.vocab)
    else:
        try:
            tokenizer = get_tokenizer(name, rows if name == "ids" else 0, content.metadata.get("tokenizer"))
        except DataError as error:
            raise DataError(f"{content.path}: {error}") from None
    if tokenizer.vocab_size != rows:
        problem = f"has {rows:,} rows for the {tokenizer.vocab_size:,} tokens of tokenizer '{tokenizer.name}'"
        raise UsageError(f"{content.path}: {problem}; {_way_out(tokenizer.vocab_size, rows)}")
    return tokenizer


def _way_out(vocab_size: int, rows: int) -> str:
    """What to do about a file with another number of rows than the vocabulary has."""
    if rows < vocab_size:
        return "they do not belong together"
    powers = (2**k for k in range(17))
    padding = next((p for p in powers if rows % p == 0 and p > rows - vocab_size), rows)
    settings = f"--set model.vocab_size={vocab_size} --set model.vocab_padding={padding}"
    return f"where the others only pad the vocabulary, say {settings}"


def _untrained(config: Config, parameters: dict[str, Array]) -> Checkpoint:
    """A checkpoint at step 0: no moments, and nothing counted."""
    optimizer: dict[str, int | float] = {"step": 0}
    if config.optimizer.name == "nadam":
        optimizer["mu_product"] = 1.0
    trainer: dict[str, int | float] = {
        path.removeprefix("/trainer/"): 0 for path in SCALARS if path.startswith("/trainer/")
    }
    trainer["seed"] = config.train.seed
    if config.run.precision == "fp16":
        from gru_ref.training.loss_scale import LossScale

        trainer |= LossScale(config.train.loss_scale, config.train.loss_scale_growth).scalars()
    return Checkpoint(config, parameters, {}, optimizer, trainer)


@dataclass(frozen=True)
class Weights:
    """What a file means: a configuration, and parameters under our names.

    No number is changed. From another layout than our own there are no rows beyond the vocabulary.
    """

    config: Config
    parameters: dict[str, Array]
    told_by: str  # the files that the configuration comes from
    untold: list[str]  # configuration keys that neither the file nor the settings tell
    notices: list[str]


def is_hf_folder(path: Path) -> bool:
    """Whether it is a folder with weights as Hugging Face's libraries write them."""
    return any((path / name).is_file() for name in (HF_WEIGHTS, HF_INDEX))


def read_weights(file: str | Path) -> TensorFile:
    """Every tensor of a file, or of a folder of Hugging Face's, whose weights may lie in several files."""
    path = Path(file)
    if not path.is_dir():
        return read_tensors(path)
    if not is_hf_folder(path):
        raise UsageError(
            f"{path}: holds no {HF_WEIGHTS}, and no {HF_INDEX}; name a .safetensors or .npz file"
        )
    return read_tensors(path / HF_WEIGHTS) if (path / HF_WEIGHTS).is_file() else read_shards(path / HF_INDEX)


def rename_tensors(content: TensorFile, rename: Mapping[str, str]) -> TensorFile:
    """The file with other beginnings of names; each name is changed once at most."""
    names = {}
    for name in content.tensors:
        old = next((old for old in rename if name.startswith(old)), None)
        names[name] = name if old is None else rename[old] + name.removeprefix(old)
    unused = [old for old in rename if not any(name.startswith(old) for name in names)]
    if unused:
        raise UsageError(f"{content.path}: no tensor's name begins with {unused[0]!r} (--rename)")
    if len(set(names.values())) < len(names):
        raise UsageError(f"{content.path}: two tensors would have one name (--rename)")
    return content.select(names)


def recognise(content: TensorFile, kind: str) -> tuple[str, TensorFile]:
    """The layout of a file, and the file under the names that the layout's rules have."""
    known = family(kind)
    layout = known.detect(content.tensors)
    if layout is None:
        some = ", ".join(sorted(content.tensors)[:5]) or "nothing"
        raise UsageError(
            f"{content.path}: not a {kind} in a known layout; it holds {some}; docs/exchange.md lists the "
            "names, and --rename OLD=NEW changes their beginnings"
        )
    names = {name: known.tidy(layout, name) for name in content.tensors}
    return layout, content.select({old: new for old, new in names.items() if new is not None})


def as_float32(content: TensorFile) -> tuple[TensorFile, list[str]]:
    """The tensors in float32, and a line for each other dtype that says what became of its values.

    Raises UsageError for a tensor that is not of floating-point numbers, or not finite in float32.
    """
    tensors: dict[str, Array] = {}
    casts: dict[str, list[float]] = {}  # the largest relative change of each tensor of a dtype
    for name, array in content.tensors.items():
        if array.dtype.kind != "f":
            raise UsageError(f"{content.path}: {name}: dtype {content.dtypes[name]}, expected float32")
        with np.errstate(over="ignore"):
            tensors[name] = array.astype(np.float32, copy=False)
        if problems := tensor_problems(name, array):
            raise UsageError(f"{content.path}: {problems[0]}")
        if beyond := np.argwhere(~np.isfinite(tensors[name])).tolist():
            raise UsageError(
                f"{content.path}: {name}: {len(beyond):,} values are too large for float32, which "
                f"ends at 3.4e38, the first at {beyond[0]}"
            )
        if content.dtypes[name] != "float32":
            casts.setdefault(content.dtypes[name], []).append(_change(array, tensors[name]))
    notices = []
    for dtype, changes in casts.items():
        rounded = sum(change > 0 for change in changes)
        how = f"{rounded} of them rounded, by at most {max(changes):.1e} of a value" if rounded else "exactly"
        some = "1 tensor" if len(changes) == 1 else f"{len(changes)} tensors"
        notices.append(f"{some} of {dtype} became float32, {how}")
    return dataclasses.replace(content, tensors=tensors), notices


def _change(before: Array, after: Array) -> float:
    """max |after − before| / |before| in float64."""
    a, b = before.astype(np.float64), after.astype(np.float64)
    return float((np.abs(b - a) / np.where(a == 0, 1, np.abs(a))).max(initial=0))


def interpret(content: TensorFile, kind: str, layout: str, settings: Mapping[str, Any]) -> Weights:
    """The configuration and the parameters of a file whose layout is known.

    The configuration is that of the metadata where gru-ref wrote the file; otherwise it is told by the shapes
    and by the config.json beside a model of Hugging Face's, with tokenizer `ids`, or `bpe` where the settings
    have a vocabulary. `settings` come last.
    """
    known, where = family(kind), str(content.path)
    untold: list[str] = []
    notices: list[str] = []
    settings = {key: configuration.convert(key, value, "--set") for key, value in settings.items()}
    if settings.get("model.vocab_size") == 0:  # as the file says
        del settings["model.vocab_size"]
    if "config" in content.metadata:
        if not isinstance(content.metadata["config"], dict):
            raise UsageError(f"{where}: the configuration in its metadata is not a JSON object")
        config = configuration.from_dict(content.metadata["config"], where)
        if config.model.kind != kind:
            raise UsageError(f"{where}: it is a {config.model.kind}; import it --as {config.model.kind}")
    else:
        if layout == "hf-gpt2" and content.path.with_name(HF_CONFIG).exists():
            where += f" and {HF_CONFIG}"
        base = {"model.kind": kind, "data.tokenizer": "bpe" if settings.get("data.vocab") else "ids"}
        inferred, notices = known.infer(layout, content)
        told = {key: value for key, value in inferred.items() if key not in settings}
        untold = [key for key, value in told.items() if value is None]
        _check_vocabulary(told.get("model.vocab_size"), where)
        base |= {key: value for key, value in told.items() if value is not None}
        config = configuration.merge(Config(), base, where)
    config = configuration.merge(config, settings, "--set")
    parameters, more = _unpack(content, known, layout, config.model)
    return Weights(config, parameters, where, untold, notices + more)


def _check_vocabulary(size: Any, where: str) -> None:
    if isinstance(size, int) and size > bpe.MAX_VOCABULARY:
        raise UsageError(
            f"{where}: a vocabulary of {size:,} cannot be imported: token ids are uint16 here, so at most "
            f"{bpe.MAX_VOCABULARY:,} fit"
        )


def _unpack(
    content: TensorFile, known: ModuleType, layout: str, model: ModelConfig
) -> tuple[dict[str, Array], list[str]]:
    """The parameters, and a notice where rows that pad the vocabulary were left out.

    Such rows are expected in our own layout. In another they are known by the settings alone: a vocabulary
    that is smaller than the file's, and a padding that gives the file's number of rows.
    """
    where, V = str(content.path), model.vocab_size
    rules = _rules(known, layout, model)
    embedding = content.tensors.get(rules[0].name)  # the first in every layout, with a row a token
    rows = embedding.shape[0] if embedding is not None and embedding.ndim else 0
    if layout == "own" or rows <= V:
        return unpack(rules, content.tensors, where), []
    if rows != padded_vocab(model):
        raise UsageError(f"{where}: {rules[0].name} has {rows:,} rows for {V:,} tokens; {_way_out(V, rows)}")
    parameters = unpack(known.rules(layout, model), content.tensors, where)
    notice = f"rows {V} to {rows - 1} only pad the vocabulary: zeros took their place"
    return crop(parameters, known.VOCABULARY, model), [notice]
