"""The optimizer's scalars, and one step over an arena. The formulas: gru_ref/ops/nadam.py and adamw.py."""

from typing import Any

from gru_ref.arena import Arena
from gru_ref.backend import Backend
from gru_ref.config import OptimizerConfig


class Optimizer:
    """Nadam or AdamW over an arena. `t`, the number of updates, advances once a step, not once a tensor."""

    def __init__(self, config: OptimizerConfig, ops: Backend) -> None:
        self.config = config
        self.ops = ops
        self.t = 0
        self.mu_product = 1.0  # Nadam's Π_t; state, so it is in the checkpoint

    def step(self, arena: Arena, lr: float, *, grad_scale: float = 1.0) -> bool:
        """Update all parameters from grad_scale · `arena.grads`; weight decay reaches `arena.decayed` only.

        Returns whether parameters and second moments are finite afterwards.
        """
        c = self.config
        self.t += 1
        options: dict[str, Any] = {
            "t": self.t,
            "lr": float(lr),
            "beta1": c.beta1,
            "beta2": c.beta2,
            "eps": c.eps,
        }
        if c.name == "nadam":
            update = self.ops.nadam.step
            self.mu_product *= self.ops.nadam.momentum(self.t, c.beta1, c.variant)
            options |= {"mu_product": self.mu_product, "variant": c.variant}
        else:
            update = self.ops.adamw.step
        finite = True
        for part, weight_decay in ((arena.decayed, c.weight_decay), (arena.rest, 0.0)):
            finite &= update(
                arena.params[part],
                arena.grads[part],
                arena.m[part],
                arena.v[part],
                weight_decay=weight_decay,
                decoupled=c.decoupled,
                grad_scale=grad_scale,
                **options,
            )
        return finite

    def scalars(self) -> dict[str, int | float]:
        """What a checkpoint must hold beside the moments."""
        if self.config.name == "nadam":
            return {"step": self.t, "mu_product": self.mu_product}
        return {"step": self.t}

    def restore(self, scalars: dict[str, int | float]) -> None:
        """The inverse of `scalars`."""
        self.t = int(scalars["step"])
        self.mu_product = float(scalars.get("mu_product", 1.0))
