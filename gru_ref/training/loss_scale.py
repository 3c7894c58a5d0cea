"""The loss scale of fp16 training: gradients too small for fp16 are kept by multiplying the loss.

    backward of scale · loss → divide by the scale → check finite → clip → update → new scale

The scale is a power of two, so multiplying and dividing are exact and the update does not depend on it, but
where fp16 runs out of range. There a gradient becomes infinite while the loss is finite: the step is
skipped and the scale halved. After `growth_steps` good steps in a row it is doubled. A loss that is not
finite is not the scale's doing and leaves it as it is, and so does an overflow at scale 1.
"""

MAX_SCALE = 2.0**24


class LossScale:
    """`value` is the scale of the next step, `good_steps` the steps since it changed; both are state."""

    def __init__(self, value: float, growth_steps: int) -> None:
        self.value = value
        self.growth_steps = growth_steps
        self.good_steps = 0

    def good_step(self) -> None:
        """Count a step that was done; double the scale after every `growth_steps` of them."""
        self.good_steps += 1
        if self.good_steps >= self.growth_steps:
            self.value, self.good_steps = min(2 * self.value, MAX_SCALE), 0

    def overflow(self) -> bool:
        """Halve the scale after a step whose gradients overflowed; False where it is at 1 already."""
        if self.value <= 1:
            return False
        self.value, self.good_steps = self.value / 2, 0
        return True

    def scalars(self) -> dict[str, int | float]:
        """What a checkpoint after a step holds, and the row of that step: the scale of the next one."""
        return {"loss_scale": self.value, "loss_scale_good_steps": self.good_steps}

    def restore(self, scalars: dict[str, int | float]) -> None:
        """The inverse of `scalars`; without a scale among them, the run was not in fp16 so far."""
        self.value = float(scalars.get("loss_scale", self.value))
        self.good_steps = int(scalars.get("loss_scale_good_steps", self.good_steps))
