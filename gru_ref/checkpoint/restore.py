"""The model and the tokenizer of a checkpoint."""

from typing import Any

import numpy as np

from gru_ref.backend import Backend
from gru_ref.checkpoint.layout import Checkpoint
from gru_ref.data.tokenizers import Tokenizer, get_tokenizer
from gru_ref.models import LanguageModel, family


def restore_model(
    checkpoint: Checkpoint, *, kernels: str = "numpy", precision: str | None = None, dtype: Any = np.float32
) -> LanguageModel:
    """The checkpoint's model with its weights, computed by `kernels` in `precision` (default: as trained)."""
    config = checkpoint.config
    model: LanguageModel = family(config.model.kind).Model(
        config.model,
        seed=config.train.seed,
        backend=Backend(kernels),
        precision=precision or config.run.precision,
        dtype=dtype,
    )
    for name, weights in checkpoint.model.items():
        model.arena.param[name][...] = weights
    return model


def restore_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that made the tokens the model was trained on."""
    config = checkpoint.config
    return get_tokenizer(config.data.tokenizer, config.model.vocab_size, checkpoint.tokenizer)
