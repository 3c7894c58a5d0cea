"""What a configuration will need, before anything is allocated: parameters and memory."""

from dataclasses import dataclass

import numpy as np

from gru_ref.config import Config
from gru_ref.models import family, is_decayed, parameter_shapes


@dataclass(frozen=True)
class Parameter:
    """A line of the table of parameters."""

    name: str
    shape: tuple[int, ...]
    count: int
    decayed: bool  # whether weight decay reaches it


def parameters(config: Config) -> list[Parameter]:
    """Every parameter in model order. The vocabulary size must be known."""
    return [
        Parameter(name, shape, int(np.prod(shape)), is_decayed(shape))
        for name, shape in parameter_shapes(config.model).items()
    ]


def memory(config: Config) -> dict[str, int]:
    """Bytes that a training step holds at once, by purpose; see `activation_floats` of the model.

    The optimizer needs four temporaries of the size of what it updates, the matrices and then the rest, but
    only after the activations are gone. Copies rounded to fp16 or bf16, and dropout's, are not counted.
    """
    rows = parameters(config)
    n = sum(row.count for row in rows)
    train = config.train
    floats = family(config.model.kind).activation_floats(
        config.model, train.seq_len, train.batch_size, train.segments
    )
    largest_update = max(
        sum(row.count for row in rows if row.decayed is decayed) for decayed in (True, False)
    )
    floats = max(floats, 4 * largest_update)
    return {
        "parameters": 4 * n,
        "gradients": 4 * n,
        "moments": 8 * n,
        "activations and workspace": 4 * floats,
    }
