"""How each tensor of a file is made of a model's parameters, and back: pure renaming and reordering.

A layout (PyTorch's, Keras's, …) is a list of rules for a configuration. Both directions come from the same
list, so what one writes the other reads, bit by bit.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from gru_ref.config import ModelConfig
from gru_ref.errors import UsageError
from gru_ref.models import padded_vocab
from gru_ref.types import Array


@dataclass(frozen=True)
class Rule:
    """One tensor of a file."""

    name: str  # in the file
    shape: tuple[int, ...]  # in the file
    pack: Callable[[Mapping[str, Array]], Array]  # from the parameters
    unpack: Callable[[Array], dict[str, Array]]  # to the parameters it is made of
    required: bool = True  # whether a reader needs it
    written: bool = True

    def optional(self, *, written: bool = True) -> "Rule":
        """The same for a tensor that repeats another one's parameter: a reader can do without it."""
        return dataclasses.replace(self, required=False, written=written)


def renamed(name: str, parameter: str, shape: tuple[int, ...]) -> Rule:
    """The parameter itself, under the name of the file."""
    return Rule(name, shape, lambda p: p[parameter], lambda a: {parameter: a})


def transposed(name: str, parameter: str, shape: tuple[int, ...]) -> Rule:
    """A matrix that the file holds as its transpose; `shape` is that in the file."""
    return Rule(name, shape, lambda p: p[parameter].T, lambda a: {parameter: a.T})


def zeros(name: str, shape: tuple[int, ...]) -> Rule:
    """A tensor of zeros in the place of a bias that the model lacks."""

    def unpack(a: Array) -> dict[str, Array]:
        if np.any(a):
            raise UsageError(f"{name} is not zero, and model.bias is false")
        return {}

    return Rule(name, shape, lambda p: np.zeros(shape, np.float32), unpack)


def pack(rules: Iterable[Rule], parameters: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of a file from a model's parameters."""
    return {rule.name: rule.pack(parameters) for rule in rules if rule.written}


def unpack(rules: Iterable[Rule], tensors: Mapping[str, Array], where: str) -> dict[str, Array]:
    """A model's parameters from the tensors of a file, each checked for its presence and shape.

    Raises UsageError, one line that starts with `where` and names every missing or unexpected tensor, or the
    first one of a wrong shape. Nothing is broadcast.
    """
    rules = list(rules)
    missing = [rule.name for rule in rules if rule.name not in tensors and rule.required]
    extra = sorted(tensors.keys() - {rule.name for rule in rules})
    if missing or extra:
        parts = {"missing": missing, "not expected": extra}
        problem = "; ".join(f"{word} {_some(names)}" for word, names in parts.items() if names)
        if any("bias" in name for name in missing):
            problem += "; where the model has no such bias, write zeros (docs/exchange.md)"
        raise UsageError(f"{where}: {problem}")
    parameters: dict[str, Array] = {}
    for rule in rules:
        if rule.name not in tensors:
            continue
        array = tensors[rule.name]
        if array.shape != rule.shape:
            raise UsageError(f"{where}: {rule.name}: shape {array.shape}, expected {rule.shape}")
        for name, value in _unpack(rule, array, where).items():
            if name in parameters and not np.array_equal(parameters[name], value):
                raise UsageError(f"{where}: {rule.name} differs from the {name} that it is tied to")
            parameters.setdefault(name, value)
    return parameters


def _unpack(rule: Rule, array: Array, where: str) -> dict[str, Array]:
    try:
        return rule.unpack(array)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def crop(parameters: Mapping[str, Array], names: Iterable[str], config: ModelConfig) -> dict[str, Array]:
    """The parameters without the rows beyond the vocabulary: no other program knows to leave them out."""
    return {name: a[: config.vocab_size] if name in names else a for name, a in parameters.items()}


def pad(parameters: Mapping[str, Array], names: Iterable[str], config: ModelConfig) -> dict[str, Array]:
    """The inverse of `crop`, with rows of zeros, which the model never looks at."""
    more = padded_vocab(config) - config.vocab_size
    return {
        name: np.pad(a, ((0, more),) + ((0, 0),) * (a.ndim - 1)) if name in names and more else a
        for name, a in parameters.items()
    }


def _some(names: list[str], limit: int = 8) -> str:
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
