"""One flat vector each for parameters, gradients and the two moments; names are views into them.

The optimizer then is one step over long vectors, and a norm or a copy needs no list of tensors. Parameters
that decay come first, so "decay only matrices" is a slice:

    params = [ matrices … | biases … ]        params[decayed], params[rest]
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from gru_ref.models import is_decayed
from gru_ref.types import Array


class Arena:
    """Storage for parameters of the given names and shapes, all zero at first.

    `param[name]` and `grad[name]` are views of `params` and `grads`, flat vectors of `dtype`, in the order of
    `shapes`. `m` and `v`, the optimizer's moments, and `grads` take memory only once they are used.

    Clearing all gradients before every step and then adding to them is slow where they are large. So
    `forget_grads` clears none: the first gradient of a parameter takes its place (`add_grad`), written there
    by the matrix product itself where it can be (`grad_memory`). Whoever asks for `grads` or `grad` in
    between gets zeros; a view that was kept from before shows what lies there, and what is written through it
    is lost. An arena can be copied and pickled.
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
        self._forgotten: set[str] = set()
        self.params = np.zeros(self.size, self.dtype)
        self.param = self.views(self.params)

    def __getstate__(self) -> dict[str, Any]:
        """The flat vectors alone: a copy's `param` and `grad` must be views of its own."""
        arrays: dict[str, Array] = {
            name: vars(self)[name] for name in ("params", "m", "v") if name in vars(self)
        }
        if "_grads" in vars(self):
            arrays["_grads"] = self.grads
        return {"shapes": self.shapes, "dtype": self.dtype, "arrays": arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Arena.__init__(self, state["shapes"], state["dtype"])
        vars(self).update(state["arrays"])
        self.param = self.views(self.params)

    @property
    def grads(self) -> Array:
        """dL/dparams, (size,)."""
        while self._forgotten:
            self._grad[self._forgotten.pop()][...] = 0
        return self._grads

    @property
    def grad(self) -> dict[str, Array]:
        """dL/dparam by name, views of `grads`."""
        _ = self.grads  # zeros where they were forgotten
        return self._grad

    @cached_property
    def _grads(self) -> Array:
        return np.zeros(self.size, self.dtype)

    @cached_property
    def _grad(self) -> dict[str, Array]:
        return self.views(self._grads)

    def forget_grads(self) -> None:
        """All gradients are zero from here on."""
        self._forgotten = set(self.shapes)

    def grad_memory(self, name: str) -> Array | None:
        """Where the first gradient since `forget_grads` can be written; None for a later one."""
        return self._grad[name] if name in self._forgotten else None

    def grad_total(self, name: str) -> Array:
        """`grad[name]`, to add to; unlike `grad` it leaves other forgotten gradients forgotten."""
        if name in self._forgotten:
            self._forgotten.remove(name)
            self._grad[name][...] = 0
        return self._grad[name]

    def add_grad(self, name: str, gradient: Array, add: Callable[[Array, Array], None]) -> None:
        """Adds to a parameter's gradient, or to its first rows, by `add`, that of ops/accumulate.py.

        A `gradient` in `grad_memory(name)` is there already.
        """
        total = self._grad[name]
        if name not in self._forgotten:
            add(total[: len(gradient)], gradient)
            return
        self._forgotten.remove(name)
        if not np.may_share_memory(total, gradient):
            total[: len(gradient)] = gradient
        total[len(gradient) :] = 0

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
