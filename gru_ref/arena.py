"""One flat vector each for parameters, gradients and the two moments; names are views into them.

The optimizer then is one step over long vectors, and a norm or a copy needs no list of tensors. Parameters
that decay come first, so "decay only matrices" is a slice:

    params = [ matrices … | biases … ]        params[decayed], params[rest]
"""

from functools import cached_property
from typing import Any

import numpy as np

from gru_ref.models import is_decayed
from gru_ref.types import Array


class Arena:
    """Storage for parameters of the given names and shapes, all zero at first.

    `param[name]` and `grad[name]` are views of `params` and `grads`, flat vectors of `dtype`, in the order of
    `shapes`. `m` and `v`, the optimizer's moments, and `grads` take memory only once they are used.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32) -> None:
        self.shapes = dict(shapes)
        self.dtype = np.dtype(dtype)
        sizes = {name: int(np.prod(shape)) for name, shape in self.shapes.items()}
        self.size = sum(sizes.values())
        decayed = [name for name, shape in self.shapes.items() if is_decayed(shape)]
        rest = [name for name in self.shapes if name not in decayed]
        self._offsets = {}
        offset = 0
        for name in decayed + rest:
            self._offsets[name] = offset
            offset += sizes[name]
        n_decayed = sum(sizes[name] for name in decayed)
        self.decayed, self.rest = slice(0, n_decayed), slice(n_decayed, self.size)
        self.params = np.zeros(self.size, self.dtype)
        self.param = self.views(self.params)

    @cached_property
    def grads(self) -> Array:
        """dL/dparams, (size,)."""
        return np.zeros(self.size, self.dtype)

    @cached_property
    def grad(self) -> dict[str, Array]:
        """dL/dparam by name, views of `grads`."""
        return self.views(self.grads)

    @cached_property
    def m(self) -> Array:
        """The optimizer's first moment, (size,)."""
        return np.zeros(self.size, self.dtype)

    @cached_property
    def v(self) -> Array:
        """The optimizer's second moment, (size,)."""
        return np.zeros(self.size, self.dtype)

    def views(self, flat: Array) -> dict[str, Array]:
        """The tensors inside a flat (size,) vector, by name, without a copy."""
        return {
            name: flat[start : start + int(np.prod(self.shapes[name]))].reshape(self.shapes[name])
            for name, start in ((name, self._offsets[name]) for name in self.shapes)
        }
