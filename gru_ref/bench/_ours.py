"""Our side: a model with weights, a batch, a training step."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from gru_ref import threads
from gru_ref.backend import Backend
from gru_ref.config import ModelConfig, OptimizerConfig
from gru_ref.errors import RunError
from gru_ref.models import LanguageModel, family
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import MicroBatch, train_step

LR = 1e-4
CLIP_NORM = 1.0
NADAM = OptimizerConfig(name="nadam")
ADAMW = OptimizerConfig(name="adamw", weight_decay=0.1)
SAME = 1e-3  # relative difference of two losses, or gradients, that count as the same


def language_model(config: ModelConfig, kernels: str) -> LanguageModel:
    """A model with random weights of a usual size.

    Not `initialise`: its counter-based draws would take a quarter of a minute for GPT-2 124M.
    """
    model: LanguageModel = family(config.kind).Model(config, backend=Backend(kernels))
    arena = model.arena
    std = 0.02 if config.kind == "gpt2" else config.hidden**-0.5 / 2
    np.random.default_rng(1).standard_normal(out=arena.params, dtype=np.float32)
    arena.params *= np.float32(std)
    for name, value in arena.param.items():
        if ".ln_" in f".{name}" and name.endswith("weight"):
            value[...] = 1
    return model


def random_batch(config: ModelConfig, T: int, B: int) -> MicroBatch:
    """Inputs and targets (T, B), each id equally likely."""
    inputs, targets = np.random.default_rng(2).integers(0, config.vocab_size, (2, T, B))
    return inputs, targets


class Training:
    """A whole step: forward, backward, clip, optimizer; a call returns its loss."""

    def __init__(self, model: LanguageModel, optimizer: OptimizerConfig, batch: MicroBatch) -> None:
        self._model, self._batch = model, batch
        self._optimizer = Optimizer(optimizer, model.ops)

    def __call__(self) -> float:
        return train_step(self._model, self._optimizer, [self._batch], lr=LR, clip_norm=CLIP_NORM).loss

    def turn(self) -> AbstractContextManager[None]:
        """The threads of a training run: with twins, BLAS has one throughout."""
        return threads.limited(threads.count(), pool=self._model.ops.name != "numpy")


def check_same_losses(ours: Callable[[], float], theirs: Callable[[], float], what: str) -> None:
    """Raise RunError unless the first steps have the same losses: the later ones depend on gradients too."""
    for step in range(1, 4):
        a, b = ours(), theirs()
        if not abs(a - b) <= SAME * abs(b):
            raise RunError(
                f"{what}: the loss of step {step} is {a:.6f} here and {b:.6f} there, so it is no peer"
            )
