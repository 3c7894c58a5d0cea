"""Compiling the kernels that a run needs before it begins, so that no step of it waits for a compiler."""

from collections.abc import Callable

import numpy as np

from gru_ref.backend import Backend
from gru_ref.config import Config
from gru_ref.models import family
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import train_step


def warm_up(config: Config, before_compiling: Callable[[], None]) -> int:
    """Take one step of a model of the same kind that is as small as it gets; the number of kernels compiled.

    Kernels that were compiled before are read from disk. before_compiling: called if there is a first one to
    compile. The definitions (run.kernels numpy) need nothing of this.
    """
    if config.run.kernels != "numba":
        return 0
    from gru_ref.kernels.numba_cpu import _compile

    names: list[str] = []

    def watch(name: str) -> None:
        if not names:
            before_compiling()
        names.append(name)

    shape = {"layers": 1, "hidden": 2 * config.model.heads, "vocab_size": 16, "vocab_padding": 1}
    if config.model.kind == "gpt2":
        shape["context"] = 4
    else:
        shape["embedding"] = 0
    tiny = config.replace("model", **shape).model
    _compile.watchers.append(watch)
    try:
        backend = Backend(config.run.kernels)
        model = family(tiny.kind).Model(tiny, backend=backend, precision=config.run.precision)
        model.initialise()
        ids = np.zeros((4, 16), np.int64)  # as few rows as twins take themselves
        train_step(model, Optimizer(config.optimizer, backend), [(ids, ids)], lr=0.0)
    finally:
        _compile.watchers.remove(watch)
    return len(names)
