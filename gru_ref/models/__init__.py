"""The model families. `config.kind` names the file: 'gru-lm' is gru_ref/models/gru_lm.py.

A family's file defines `parameter_shapes(config)`, which explains every tensor of a checkpoint, and `Model`.
"""

import importlib
from types import ModuleType

from gru_ref.config import ModelConfig


def family(kind: str) -> ModuleType:
    """The module that defines the models of this kind."""
    return importlib.import_module(f"gru_ref.models.{kind.replace('-', '_')}")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the order in which the model uses them."""
    shapes: dict[str, tuple[int, ...]] = family(config.kind).parameter_shapes(config)
    return shapes


def is_decayed(shape: tuple[int, ...]) -> bool:
    """Weight decay reaches matrices only: no bias, gain or offset. A tied matrix is one parameter."""
    return len(shape) >= 2


def padded_vocab(config: ModelConfig) -> int:
    """Rows of the embedding and the classifier: the true vocabulary, rounded up to `vocab_padding`."""
    return -(-config.vocab_size // config.vocab_padding) * config.vocab_padding
