"""A model from a checkpoint's weights."""

from typing import Any

import numpy as np

from gru_ref.backend import Backend
from gru_ref.checkpoint.layout import Checkpoint
from gru_ref.models import family
from gru_ref.models.gru_lm import GRULM


def restore_model(
    checkpoint: Checkpoint, *, kernels: str = "numpy", precision: str | None = None, dtype: Any = np.float32
) -> GRULM:
    """The checkpoint's model with its weights, computed by `kernels` in `precision` (default: as trained)."""
    config = checkpoint.config
    model: GRULM = family(config.model.kind).Model(
        config.model,
        seed=config.train.seed,
        backend=Backend(kernels),
        precision=precision or config.run.precision,
        dtype=dtype,
    )
    for name, weights in checkpoint.model.items():
        model.arena.param[name][...] = weights
    return model
