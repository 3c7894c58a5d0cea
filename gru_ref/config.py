"""The configuration of a run: five small tables, from a preset, a TOML file and options, the later wins.

Not here: what the settings do. Each field says its meaning in its comment; the resolved configuration is
written to the run directory as `config.toml` and into every checkpoint as JSON.
"""

import dataclasses
import difflib
import functools
import math
import tomllib
import typing
from collections.abc import Set
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from gru_ref.errors import ConfigError
from gru_ref.random import MAX_SEED


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. Nothing here may change on resume. Fields of other kinds keep their default."""

    kind: str = "gru-lm"  # which file of gru_ref/models builds it: gru-lm or gpt2
    layers: int = 2  # stacked GRU layers or transformer blocks, L
    hidden: int = 256  # width of a layer, H (in gpt2.py C)
    embedding: int = 0  # gru-lm: width of the embedding, E; 0 means the same as hidden
    vocab_size: int = 0  # true vocabulary V; 0 means as the tokenizer says
    vocab_padding: int = 1  # rows of the embedding and classifier are padded to a multiple of this
    tied: bool = False  # classifier weight is the embedding weight
    reset_after: bool = True  # gru-lm: reset gate after the recurrent product (PyTorch), or before it (2014)
    dropout: float = 0.0  # probability of zeroing a value, in the places that the model's file names
    heads: int = 4  # gpt2: attention heads in a block, N
    context: int = 0  # gpt2: most tokens it can look back on; 0 means the same as train.seq_len
    bias: bool = True  # gpt2: offsets in the affine maps and norms of the blocks


@dataclass(frozen=True)
class DataConfig:
    """What is trained on. `files` names where it was read; a checkpoint also holds its md5s.

    The tokenizer auto becomes that of an encoded corpus, ids for a .bin, bpe where `vocab` is given, ascii100
    for other text.
    """

    files: tuple[
        str, ...
    ] = ()  # text, .gz, folders, '-', encoded .h5, uint16 .bin; empty: the embedded corpus
    tokenizer: str = "auto"  # ascii100, bytes, bpe, ids (a .bin without text) or auto
    vocab: str = ""  # bpe: where its vocabulary lies (gru_ref/data/bpe.py); an encoded corpus has its own
    val_fraction: float = 0.05  # last share of the tokens kept for validation; 0 turns it off
    val_files: tuple[str, ...] = ()  # validate on these instead


@dataclass(frozen=True)
class TrainConfig:
    """Length, batches and how often things happen. Steps count optimizer updates."""

    steps: int = 0  # optimizer steps; 0 means as many as `epochs` need
    epochs: float = 0.0  # passes over the training tokens; 0 means as `steps` says (both 0: one epoch)
    batch_size: int = 32  # windows in a micro-batch, B
    seq_len: int = 128  # tokens in a window, T
    accumulation: int = 1  # micro-batches in a step
    segments: int = 1  # K: backward computes the activations of K−1 of K parts again (at most 8 in a gru-lm)
    carry_state: bool = (
        False  # truncated BPTT: consecutive windows, hidden state carried from one to the next
    )
    clip_norm: float = 1.0  # largest global gradient norm; 0 turns clipping off
    label_smoothing: float = 0.0  # ε in (1−ε)·NLL − (ε/V)·Σ log p
    seed: int = 1  # of every random stream
    max_skipped: int = 10  # stop after this many non-finite steps in a row, unless the loss scale was lowered
    loss_scale: float = 65536.0  # fp16: the loss scale to start from, a power of two
    loss_scale_growth: int = 2000  # fp16: good steps in a row after which the loss scale is doubled
    checkpoint_every: int = 500  # steps between checkpoints; 0: only at the start and the end
    keep_checkpoints: int = 0  # newest checkpoints kept beside the best; 0 keeps all
    eval_every: int = 100  # steps between validations; 0: only at the start and the end
    eval_tokens: int = 100_000  # validation tokens in each of them, evenly spread; 0: all
    sample_every: int = 0  # steps between samples; 0: only at the start and the end
    log_every: int = 10  # steps between lines on the screen (metrics.jsonl has every step)


@dataclass(frozen=True)
class OptimizerConfig:
    """Nadam or AdamW; the formulas stand in gru_ref/ops/nadam.py and adamw.py."""

    name: str = "nadam"
    variant: str = "torch"  # Nadam's momentum schedule: torch (ψ=0.004), keras (ψ=1), constant
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0  # of matrices only
    decoupled: bool = True  # decoupled decay, or L2 added to the gradient


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate; the formulas stand in gru_ref/schedules.py.

    `warmup` and `decay` below 1 are shares of the length, from 1 on they are steps.
    """

    name: str = "wsd"  # wsd (warmup, stable, decay), cosine, linear, constant
    lr: float = 2e-3  # peak learning rate
    min_lr: float = 2e-4  # learning rate of the last step
    warmup: float = 0.05
    decay: float = 0.2  # of wsd only
    shape: str = "cosine"  # of wsd's decay: linear, cosine, 1-sqrt
    steps: int = 0  # length of the schedule; 0 means train.steps


@dataclass(frozen=True)
class RunConfig:
    """How it is computed. May change on resume; other threads or kernels may change the last bits."""

    device: str = "auto"  # auto or cpu
    kernels: str = "numpy"  # the definitions (numpy) or their compiled twins (numba)
    precision: str = "fp32"  # of matrix products: fp32, or inputs rounded to fp16 or bf16
    threads: int = (
        0  # of BLAS or of the twins' pool (gru_ref/threads.py); 0 means the cores this process may use
    )


@dataclass(frozen=True)
class Config:
    """The whole configuration, one table a field."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain values: tables of strings, numbers, booleans and lists."""
        return {
            name: {key: list(value) if isinstance(value, tuple) else value for key, value in table.items()}
            for name, table in dataclasses.asdict(self).items()
        }

    def replace(self, table: str, **values: Any) -> "Config":
        """A copy with some values of one table changed."""
        return dataclasses.replace(self, **{table: dataclasses.replace(getattr(self, table), **values)})


CHOICES = {
    "model.kind": ("gru-lm", "gpt2"),
    "data.tokenizer": ("auto", "ascii100", "bytes", "bpe", "ids"),
    "optimizer.name": ("nadam", "adamw"),
    "optimizer.variant": ("torch", "keras", "constant"),
    "schedule.name": ("wsd", "cosine", "linear", "constant"),
    "schedule.shape": ("linear", "cosine", "1-sqrt"),
    "run.device": ("auto", "cpu"),
    "run.kernels": ("numpy", "numba"),
    "run.precision": ("fp32", "fp16", "bf16"),
}

# key: (smallest, largest, whether the largest itself is allowed)
RANGES: dict[str, tuple[float, float, bool]] = {
    "model.layers": (1, 10_000, True),
    "model.hidden": (1, 2**20, True),
    "model.embedding": (0, 2**20, True),
    "model.vocab_size": (0, 2**16, True),
    "model.vocab_padding": (1, 2**16, True),
    "model.dropout": (0, 1, False),
    "model.heads": (1, 2**16, True),
    "model.context": (0, 2**24, True),
    "data.val_fraction": (0, 1, False),
    "train.steps": (0, 2**31, True),
    "train.epochs": (0, 1e9, True),
    "train.batch_size": (1, 2**24, True),
    "train.seq_len": (1, 2**24, True),
    "train.accumulation": (1, 2**24, True),
    "train.segments": (1, 2**16, True),
    "train.clip_norm": (0, math.inf, False),
    "train.label_smoothing": (0, 1, False),
    "train.seed": (0, MAX_SEED, True),
    "train.max_skipped": (1, 2**31, True),
    "train.loss_scale": (1, 2**24, True),
    "train.loss_scale_growth": (1, 2**31, True),
    "train.checkpoint_every": (0, 2**31, True),
    "train.keep_checkpoints": (0, 2**31, True),
    "train.eval_every": (0, 2**31, True),
    "train.eval_tokens": (0, 2**62, True),
    "train.sample_every": (0, 2**31, True),
    "train.log_every": (1, 2**31, True),
    "optimizer.beta1": (0, 1, False),
    "optimizer.beta2": (0, 1, False),
    "optimizer.eps": (0, 1, True),
    "optimizer.weight_decay": (0, math.inf, False),
    "schedule.lr": (0, math.inf, False),
    "schedule.min_lr": (0, math.inf, False),
    "schedule.warmup": (0, 2**31, True),
    "schedule.decay": (0, 2**31, True),
    "schedule.steps": (0, 2**31, True),
    "run.threads": (0, 4096, True),
}

# Fields of ModelConfig that only one kind has.
FIELDS_OF_KIND = {"gru-lm": ("embedding", "reset_after"), "gpt2": ("heads", "context", "bias")}

# What a resumed run may change. Whatever is in neither set needs `override`.
FREE_ON_RESUME = frozenset(
    {
        "data.files",
        "data.val_files",
        "run.threads",
        "run.kernels",
        "run.device",
        "train.steps",
        "train.max_skipped",
        "train.segments",
    }
    | {"train.log_every", "train.checkpoint_every", "train.keep_checkpoints", "train.eval_every"}
    | {"train.sample_every"}
)
FIXED_ON_RESUME = frozenset(
    {
        "data.tokenizer",
        "data.vocab",
        "data.val_fraction",
        "train.seq_len",
        "train.carry_state",
        "train.seed",
        "optimizer.name",
    }
    | {f"model.{field.name}" for field in dataclasses.fields(ModelConfig)}
)


@functools.cache
def keys() -> dict[str, Any]:
    """Every key as `table.name`, with its default value."""
    return {f"{t}.{k}": v for t, table in Config().to_dict().items() for k, v in table.items()}


@functools.cache
def _type_of(key: str) -> Any:
    table, name = key.split(".")
    return typing.get_type_hints(type(getattr(Config(), table)))[name]


def _unknown(name: str, known: list[str], what: str, where: str) -> ConfigError:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else "known: " + ", ".join(known)
    return ConfigError(f"{where}: unknown {what} {name!r}; {hint}")


def _check_known(key: str, where: str) -> None:
    known = list(keys())
    if key in known:
        return
    table, _, name = key.rpartition(".")
    in_table = [k for k in known if k.startswith(f"{table}.")]
    near = difflib.get_close_matches(name, [k.partition(".")[2] for k in in_table], n=1, cutoff=0.5)
    if near:
        raise ConfigError(f"{where}: unknown key {key!r}; did you mean '{table}.{near[0]}'?")
    elsewhere = [k for k in known if k.partition(".")[2] == name]
    if elsewhere:
        raise ConfigError(f"{where}: unknown key {key!r}; did you mean '{elsewhere[0]}'?")
    raise _unknown(key, known, "key", where)


def convert(key: str, value: Any, where: str) -> Any:
    """`value` (from TOML, JSON or as a string from the command line) in the type and range of `key`."""
    _check_known(key, where)
    kind = _type_of(key)
    expected = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}.get(
        kind, "a list of strings"
    )
    wrong = ConfigError(f"{where}: {key} must be {expected}, not {value!r}")
    if kind not in (int, float, bool, str):
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise wrong
        return tuple(value)
    if isinstance(value, str) and kind is not str:
        text = value.strip().lower()
        try:
            value = {"true": True, "false": False}[text] if kind is bool else kind(text)
        except (KeyError, ValueError):
            if kind is not int:
                raise wrong from None
            try:  # '1e4' is a whole number to a person
                value = float(text)
            except ValueError:
                raise wrong from None
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise wrong from None
    if type(value) is not kind:
        raise wrong
    if key in CHOICES and value not in CHOICES[key]:
        near = difflib.get_close_matches(str(value), CHOICES[key], n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ConfigError(f"{where}: {key} must be one of {', '.join(CHOICES[key])}, not {value!r}{hint}")
    if key in RANGES:
        low, high, inclusive = RANGES[key]
        if not (low <= value <= high if inclusive else low <= value < high):
            bound = "at most" if inclusive else "below"
            raise ConfigError(f"{where}: {key} must be at least {low:g} and {bound} {high:g}, not {value}")
    return value


def merge(config: Config, values: dict[str, Any], where: str) -> Config:
    """`config` with the dotted keys of `values` laid over it; raises ConfigError that starts with `where`."""
    for key, value in values.items():
        value = convert(key, value, where)
        table, name = key.split(".")
        config = config.replace(table, **{name: value})
    return config


def flatten(tables: dict[str, Any], where: str) -> dict[str, Any]:
    """{'train': {'steps': 5}} as {'train.steps': 5}; unknown tables are errors."""
    known = [f.name for f in dataclasses.fields(Config)]
    flat = {}
    for table, values in tables.items():
        if table not in known:
            homes = [key for key in keys() if key.endswith(f".{table}")]
            if homes:
                raise ConfigError(f"{where}: '{table}' belongs in a table; write {homes[0]}")
            raise _unknown(table, known, "table", where)
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: '{table}' must be a table, write [{table}]")
        flat.update({f"{table}.{key}": value for key, value in values.items()})
    return flat


def from_dict(tables: dict[str, Any], where: str) -> Config:
    """A configuration from nested tables; what they leave out has its default."""
    return merge(Config(), flatten(tables, where), where)


def preset_names() -> list[str]:
    """The presets that ship with the package."""
    folder = resources.files("gru_ref.models") / "presets"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(text), where)
    except (ValueError, RecursionError) as error:  # also numbers or nesting beyond Python's limits
        raise ConfigError(f"{where}: not valid TOML: {error}") from None


def load(
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    options: dict[str, Any] | None = None,
    init: Config | None = None,
) -> Config:
    """Defaults, then the preset (`default` where none is named), then the TOML file, then the options.

    `options` maps dotted keys such as 'train.steps' to values. Where the file or the options change the
    preset's `model.kind`, what only the preset's kind has falls back to its default. `init`: the
    configuration of a checkpoint that the run starts with, as in `started_from`. Raises ConfigError.
    """
    name = preset or "default"
    if name not in preset_names():
        raise _unknown(name, preset_names(), "preset", "--preset")
    text = (resources.files("gru_ref.models") / "presets" / f"{name}.toml").read_text("utf-8")
    base = _read_toml(text, f"preset {name}")
    asked = options or {}
    config = merge(Config(), base, f"preset {name}")
    if file is not None:
        try:
            # a file name in it need not be UTF-8; such a byte stays a surrogate, as in Python's paths
            text = Path(file).read_text("utf-8", errors="surrogateescape").removeprefix("\ufeff")
        except OSError as error:
            raise ConfigError(f"{file}: cannot read the configuration: {error.strerror}") from None
        values = _read_toml(text, str(file))
        config = merge(config, values, str(file))
        asked = values | asked
    config = merge(config, options or {}, "options")
    if init is None:
        config = _without_other_kinds(config, base.keys() - asked.keys())
    else:
        config = started_from(config, init, asked.keys())
    config = with_context(config)
    check(config)
    return config


def _without_other_kinds(config: Config, given: Set[str]) -> Config:
    """`config` where the keys `given` by a preset alone have their default, if its kind does not have them.

    So another `model.kind` over a preset needs no word about what the preset says of the first kind.
    """
    other = [name for kind, names in FIELDS_OF_KIND.items() if kind != config.model.kind for name in names]
    defaults = {name: getattr(ModelConfig, name) for name in other if f"model.{name}" in given}
    return config.replace("model", **defaults)


def started_from(config: Config, init: Config, asked: Set[str] = frozenset()) -> Config:
    """`config` with the model and the tokenizer of `init`, whose weights the run starts with.

    All that only matters in training stays as `config` has it, `model.dropout` too. asked: the keys that the
    user set; raises ConfigError where one of them says something else than `init`.
    """
    model = dataclasses.replace(init.model, dropout=config.model.dropout)
    started = dataclasses.replace(config, model=model)
    # Its vocabulary comes with the checkpoint, not from a file.
    started = started.replace("data", tokenizer=init.data.tokenizer, vocab="")
    open_ones = {"model.vocab_size": 0, "data.tokenizer": "auto"}  # say nothing
    for key, (value, own) in differences(config, started).items():
        if key in asked and open_ones.get(key) != value:
            own = f"'{init.data.tokenizer}', which comes with it" if key == "data.vocab" else str(own)
            raise ConfigError(f"{key} {value} is not the checkpoint's: {own}; leave it out")
    return started


def with_context(config: Config) -> Config:
    """The configuration with the context of a gpt2 filled in from the window, where it is 0."""
    if config.model.kind == "gpt2" and config.model.context == 0:
        return config.replace("model", context=config.train.seq_len)
    return config


def check(config: Config) -> None:
    """Raise ConfigError for settings that are fine alone and contradict each other."""
    model, train, schedule = config.model, config.train, config.schedule
    check_model(model)
    if "" in (*config.data.files, *config.data.val_files):
        raise ConfigError("data.files and data.val_files: an empty name is no file")
    if model.kind == "gpt2" and train.seq_len > model.context:
        raise ConfigError(
            f"train.seq_len {train.seq_len} is longer than model.context {model.context}; lower the one, "
            "or raise the other"
        )
    if model.kind == "gpt2" and train.carry_state:
        raise ConfigError(
            "train.carry_state is for recurrent models; a gpt2 has no state that outlives its context"
        )
    if config.data.vocab and config.data.tokenizer not in ("auto", "bpe"):
        raise ConfigError(
            f"data.vocab goes with tokenizer bpe, not with {config.data.tokenizer}; leave one of them out"
        )
    if math.frexp(train.loss_scale)[0] != 0.5:
        raise ConfigError(f"train.loss_scale must be a power of two, as 65536 is, not {train.loss_scale:g}")
    if train.steps and train.epochs:
        raise ConfigError("train.steps and train.epochs contradict each other; give one, set the other to 0")
    if schedule.lr <= 0:
        raise ConfigError("schedule.lr must be above 0: nothing would be learned")
    if schedule.min_lr > schedule.lr and schedule.name != "constant":
        raise ConfigError(
            f"schedule.min_lr {schedule.min_lr:g} is above schedule.lr {schedule.lr:g}; lower it too, "
            f"as in --set schedule.min_lr={schedule.lr / 10:g}"
        )


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError for a shape that no model can have, and for a field that this kind does not have."""
    for kind, names in FIELDS_OF_KIND.items():
        for name in names if kind != model.kind else ():
            if getattr(model, name) != getattr(ModelConfig, name):
                raise ConfigError(
                    f"model.{name} is of {kind} and not of {model.kind}; set it to "
                    f"{str(getattr(ModelConfig, name)).lower()}, or leave it out"
                )
    if model.tied and model.embedding not in (0, model.hidden):
        raise ConfigError(
            f"model.tied needs model.embedding = model.hidden: {model.embedding} is not {model.hidden}"
        )
    if model.kind == "gpt2" and model.hidden % model.heads:
        raise ConfigError(f"model.heads {model.heads} must divide model.hidden {model.hidden}")
    if model.kind == "gpt2" and model.context == 0:
        raise ConfigError("model.context must be at least 1: the most tokens that the model looks back on")


def validated(config: Config) -> Config:
    """A configuration that was built by hand, with every value checked; raises ConfigError."""
    if not isinstance(config, Config):
        raise ConfigError(
            f"config must be a gru_ref.Config, not {type(config).__name__}; see gru_ref.load_config"
        )
    config = with_context(from_dict(config.to_dict(), "config"))
    check(config)
    return config


def to_toml(config: Config) -> str:
    """The configuration as TOML text; `load(file=…)` of it gives the same configuration again.

    Write it as UTF-8 with `errors="surrogateescape"`, because a name in `data.files` need not be UTF-8.
    """
    import tomli_w

    return tomli_w.dumps(config.to_dict())


def differences(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, each with its old and its new value."""
    a, b = flatten(old.to_dict(), "old"), flatten(new.to_dict(), "new")
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}
