"""What the commands that take a configuration share: its options, and its length in steps."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gru_ref.config import Config
    from gru_ref.data.tokenizers import Tokenizer

# Options that are short names of configuration keys.
NAMED = {
    "steps": ("train.steps", int, "Optimizer steps."),
    "epochs": ("train.epochs", float, "Passes over the training text, instead of --steps."),
    "batch_size": ("train.batch_size", int, "Windows in a micro-batch."),
    "seq_len": ("train.seq_len", int, "Tokens in a window."),
    "accumulation": ("train.accumulation", int, "Micro-batches in a step."),
    "segments": ("train.segments", int, "K: recompute the activations of all but one of K parts."),
    "seed": ("train.seed", int, "Seed of weights, data order, dropout and samples."),
    "tokenizer": ("data.tokenizer", str, "ascii100, bytes, bpe or ids; default: the corpus's, or ascii100."),
    "vocab": ("data.vocab", str, "For bpe: a folder with vocab.json and merges.txt, or a tokenizer.json."),
    "val_fraction": ("data.val_fraction", float, "Last share of the text kept for validation."),
    "lr": ("schedule.lr", float, "Peak learning rate."),
    "warmup": ("schedule.warmup", float, "Warm-up: steps, or a share below 1."),
    "device": ("run.device", str, "auto or cpu."),
    "kernels": ("run.kernels", str, "numpy (the definitions) or numba (their compiled twins)."),
    "precision": ("run.precision", str, "Of matrix products: fp32, fp16 or bf16."),
    "threads": ("run.threads", int, "Threads; 0 takes the cores this process may use."),
    "checkpoint_every": ("train.checkpoint_every", int, "Steps between checkpoints; 0: only the last."),
    "eval_every": ("train.eval_every", int, "Steps between validations; 0: only first and last."),
    "sample_every": ("train.sample_every", int, "Steps between samples of text; 0: only first and last."),
    "log_every": ("train.log_every", int, "Steps between lines on the screen."),
}


class Positive(click.ParamType):
    """A finite number above 0, at most `most`."""

    name = "number"

    def __init__(self, most: float = math.inf) -> None:
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number", param, ctx)
        if not (0 < number <= self.most and math.isfinite(number)):
            bound = " and finite" if self.most == math.inf else f" and at most {self.most:g}"
            self.fail(f"{value} must be above 0{bound}", param, ctx)
        return number


def named_options(*names: str) -> Callable[[Any], Any]:
    """The options of NAMED with these names, in its order; all where none is given."""

    def decorate(function: Any) -> Any:
        for name, (_, kind, text) in reversed(NAMED.items()):
            if not names or name in names:
                function = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(function)
        return function

    return decorate


def set_option(function: Any) -> Any:
    """--set KEY.SUB=VALUE, as `assignments`."""
    return click.option(
        "--set", "assignments", multiple=True, metavar="KEY.SUB=VALUE", help="Any configuration key."
    )(function)


def check_file_name(config_file: str | None) -> None:
    """A configuration ends in .toml: anything else was meant as text."""
    if config_file is not None and not config_file.endswith(".toml"):
        raise click.UsageError(f"{config_file}: a configuration ends in .toml; text goes with --data")


def dotted(named: dict[str, Any], others: dict[str, Any], assignments: tuple[str, ...]) -> dict[str, Any]:
    """Dotted keys and values from the command line; --set comes last.

    named: of NAMED; others: of dotted keys. None and () mean that nothing was said.
    """
    options = {NAMED[name][0]: value for name, value in named.items() if value is not None}
    if options.get("train.epochs") and "train.steps" not in options:
        options["train.steps"] = 0
    options |= {key: value for key, value in others.items() if value is not None and value != ()}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise click.UsageError(f"--set {assignment}: write it as key.sub=value, as in train.steps=500")
        options[key.strip()] = value.strip()
    return options


def with_length(config: "Config", tokenizer: "Tokenizer | None" = None) -> tuple["Config", int]:
    """The configuration with its vocabulary, and its steps; reads the text where they depend on it.

    tokenizer: of the checkpoint that the run begins with, None for the configuration's.
    """
    from gru_ref.training.trainer import Data, resolve_tokenizer, total_steps

    if not config.data.files and config.train.steps and config.model.vocab_size:
        return config, config.train.steps
    data = Data(config, tokenizer)
    return resolve_tokenizer(config, data.tokenizer), total_steps(config, data.train)
