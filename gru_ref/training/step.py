"""One optimizer step: accumulate → unscale → check finite → clip by the one global norm → update → count.

Not here: where the batches come from, what is logged, when it stops. The loss of a step is the sum of the
losses of all counted targets of all its micro-batches, divided by their number, never a mean of means; so
accumulation over A micro-batches of B windows is the batch of A·B windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gru_ref.errors import RunError
from gru_ref.models import LanguageModel
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.training.loss_scale import LossScale
from gru_ref.training.optimizer import Optimizer
from gru_ref.types import Array

MicroBatch = tuple[Array, Array]
"""Inputs (T, B) and targets (T, B), where IGNORE marks a target that is not counted."""


@dataclass(frozen=True)
class StepResult:
    """What one step did. `nonfinite` names what was not finite; the weights then are as before the step."""

    loss: float  # nats a counted target
    tokens: int  # counted targets
    grad_norm: float  # before clipping
    state: Array | None  # carried state (L, A·B, H) after the step
    nonfinite: str | None = None
    loss_scale_lowered: bool = False  # the gradients overflowed in fp16, and the next step has half the scale


def train_step(
    model: LanguageModel,
    optimizer: Optimizer,
    micro_batches: Sequence[MicroBatch],
    *,
    lr: float,
    clip_norm: float = 0.0,
    label_smoothing: float = 0.0,
    micro_step: int = 0,
    state: Array | None = None,
    loss_scale: LossScale | None = None,
    segments: int = 1,
) -> StepResult:
    """Forward and backward over the micro-batches, then one update.

    micro_step: the number of the first micro-batch since the start of training; dropout masks depend on it.
    state: (L, A·B, H) to start from, micro-batch i using columns iB…(i+1)B, or None for zeros.
    loss_scale: of the backward pass; it is updated. segments: as in `LanguageModel.forward`.
    Without a counted target loss and gradients are 0 and the state stays; momentum and weight decay act.
    Raises RunError where the update itself overflows, because then the weights are lost.
    """
    arena = model.arena
    arena.forget_grads()
    # A step that overflows is no surprise to be warned about: the check below finds it and names it.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        loss, tokens, new_state = accumulate(
            model,
            micro_batches,
            label_smoothing=label_smoothing,
            micro_step=micro_step,
            state=state,
            scale=1.0 if loss_scale is None else loss_scale.value,
            segments=segments,
        )
        if loss_scale is not None:
            arena.grads[...] *= 1 / loss_scale.value
        norm = model.ops.clip.global_norm([arena.grads])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            culprit = _not_finite({"parameter": arena.param, "gradient of": arena.grad})
            culprit = culprit or ("gradient norm" if math.isfinite(loss) else "loss")
            lowered = loss_scale is not None and math.isfinite(loss) and loss_scale.overflow()
            return StepResult(loss, tokens, norm, state, nonfinite=culprit, loss_scale_lowered=lowered)
        finite = optimizer.step(arena, lr, grad_scale=model.ops.clip.factor(norm, clip_norm))
    if not finite:
        lost = _not_finite({"parameter": arena.param, "second moment of": arena.views(arena.v)})
        raise RunError(f"the update at learning rate {lr:g} and gradient norm {norm:.3g} overflowed {lost}")
    if loss_scale is not None:
        loss_scale.good_step()
    return StepResult(loss, tokens, norm, new_state)


def accumulate(
    model: LanguageModel,
    micro_batches: Sequence[MicroBatch],
    *,
    label_smoothing: float = 0.0,
    micro_step: int = 0,
    state: Array | None = None,
    scale: float = 1.0,
    segments: int = 1,
) -> tuple[float, int, Array | None]:
    """Add `scale` · the gradient of the mean loss to `arena.grads`; the loss, its tokens, the new state."""
    tokens = sum(int(np.count_nonzero(targets != IGNORE)) for _, targets in micro_batches)
    if tokens == 0:
        return 0.0, 0, state
    lanes = sum(inputs.shape[1] for inputs, _ in micro_batches)
    if state is not None and state.shape[1] != lanes:
        raise ValueError(f"the state is of {state.shape[1]} sequences, the micro-batches have {lanes}")
    nats, lane = 0.0, 0
    states: list[Any] = []
    for i, (inputs, targets) in enumerate(micro_batches):
        B = inputs.shape[1]
        h0 = None if state is None else state[:, lane : lane + B]
        lane += B
        logits, h_T, cache = model.forward(inputs, h0, dropout_step=micro_step + i, segments=segments)
        part, dlogits = _loss(model, logits, targets, scale / tokens, label_smoothing)
        nats += part
        del logits  # as large as everything else where the vocabulary is: not needed any more
        model.backward(dlogits, cache)
        del dlogits, cache  # nor these beside the next micro-batch's
        states.append(h_T)
    return nats / tokens, tokens, None if state is None else np.concatenate(states, axis=1)


def _loss(
    model: LanguageModel, logits: Array, targets: Array, dloss: float, label_smoothing: float
) -> tuple[float, Array]:
    """The sum of the losses of a micro-batch, and the gradient of that sum times `dloss`."""
    cross_entropy = model.ops.cross_entropy
    losses, cache = cross_entropy.forward(
        logits.reshape(-1, logits.shape[-1]),
        targets.reshape(-1),
        vocab_size=model.config.vocab_size,
        label_smoothing=label_smoothing,
    )
    dlogits, _ = cross_entropy.backward(np.full_like(losses, dloss), cache)
    return float(losses.sum(dtype=np.float64)), dlogits.reshape(logits.shape)


def _not_finite(tensors_of_kind: dict[str, dict[str, Array]]) -> str | None:
    """Kind and name of the first tensor with a value that is not finite."""
    for kind, tensors in tensors_of_kind.items():
        for name, tensor in tensors.items():
            if not np.isfinite(tensor).all():
                return f"{kind} {name}"
    return None
