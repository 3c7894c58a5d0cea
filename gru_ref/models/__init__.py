"""The model families. `config.kind` names the file: 'gru-lm' is gru_ref/models/gru_lm.py.

A family's file defines `parameter_shapes(config)`, which explains every tensor of a checkpoint,
`kept_floats` and `activation_floats(config, T, B, segments)`, and `Model`, a `LanguageModel`; the package
knows no more of it.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from gru_ref.config import ModelConfig
from gru_ref.types import Array

if TYPE_CHECKING:
    from gru_ref.arena import Arena
    from gru_ref.backend import Backend


class LanguageModel(Protocol):
    """Parameters in an arena, and a forward and backward over token ids; gru_lm.py and gpt2.py are two."""

    config: ModelConfig
    seed: int
    ops: "Backend"
    precision: str
    arena: "Arena"

    @property
    def context(self) -> int | None:
        """The longest sequence, counted from the empty state, that `forward` takes; None: any length."""

    def initialise(self) -> None:
        """Draw the initial weights."""

    def initial_state(self, batch_size: int) -> Array:
        """The state before any token; the batch is one of its axes."""

    def forward(
        self,
        ids: Array,
        state: Array | None = None,
        *,
        dropout_step: int | None = None,
        segments: int = 1,
    ) -> tuple[Array, Array | None, tuple[Any, ...]]:
        """ids (T, B), the state of earlier tokens or None -> logits (T, B, ≥ V), state after it, cache.

        Columns of the logits from V on are padding. dropout_step: the number of this micro-batch while
        training; None leaves dropout out. segments: backward computes the activations of all but the last
        of so many parts again, to the same bits, and the cache is so much smaller.
        """

    def backward(self, dlogits: Array, cache: tuple[Any, ...]) -> None:
        """dlogits, shaped as the logits: adds every parameter's gradient to `arena.grad`.

        It frees the cache as it goes. Raises ValueError for a cache that has served already.
        """


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


def split_evenly(n: int, parts: int) -> list[range]:
    """0 … n−1 in min(n, parts) ranges, whose lengths differ by one at most; none is longer than the last."""
    if parts < 1:
        raise ValueError(f"the number of segments must be at least 1, not {parts}")
    parts = min(n, parts)
    return [range(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
