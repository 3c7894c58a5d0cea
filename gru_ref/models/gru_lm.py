"""A GRU language model: embedding → L stacked GRU layers → classifier.

    x⁰   = W_e[ids]                                         (T, B, E)
    xˡ⁺¹ = dropout(GRUˡ(xˡ))            l = 0 … L−1         (T, B, H)
    logits = xᴸ · W_cᵀ + b_c                                (T, B, P)

P is the vocabulary V padded to `vocab_padding`; the loss and the sampler look at the first V columns only.
Tied means W_c is W_e: one parameter, whose gradient is the sum over both uses.

The layers run over slices of the window, one after the other, and backward hands the gradient of
the state from each slice to the one before it: nothing is truncated inside a window. Slices in K segments are
the checkpointing of activations (Chen et al. 2016): all but the last keep the state before them alone.
"""

import math
from typing import Any

import numpy as np

from gru_ref import random
from gru_ref.arena import Arena
from gru_ref.backend import Backend
from gru_ref.config import ModelConfig, check_model
from gru_ref.errors import ConfigError
from gru_ref.models import padded_vocab, split_evenly
from gru_ref.ops.matmul import round_to
from gru_ref.types import Array

TIME_SLICES, SLICE_TOKENS = 8, 2048
"""A window of T steps and B sequences is cut into T·B/SLICE_TOKENS slices, at most TIME_SLICES, at least 1.

A product over the rows of a whole window and the sum of products over its slices differ in their last bits.
So that the segments change no bit, the products must be the same ones for all K, 1 included; more segments
than slices are as many. Slices of fewer tokens would cost time, and a small window needs no segments.
"""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape; a tied classifier has no weight of its own.

    Their number is P·E + Σ_l 3H·(I_l + H + 2) + (P·H unless tied) + P, with I_0 = E and I_l = H after it.
    """
    P, H = padded_vocab(config), config.hidden
    E = config.embedding or H
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (P, E)}
    for layer in range(config.layers):
        shapes[f"gru.{layer}.weight_ih"] = (3 * H, E if layer == 0 else H)
        shapes[f"gru.{layer}.weight_hh"] = (3 * H, H)
        shapes[f"gru.{layer}.bias_ih"] = (3 * H,)
        shapes[f"gru.{layer}.bias_hh"] = (3 * H,)
    if not config.tied:
        shapes["classifier.weight"] = (P, H)
    shapes["classifier.bias"] = (P,)
    return shapes


def kept_floats(config: ModelConfig, T: int, B: int, segments: int = 1, *, rounds: bool = False) -> int:
    """How many floats forward keeps for backward over a (T, B) batch.

    xᴸ (H) of every token, the state before every segment, and of the last segment what `_slice_floats` says.
    rounds: where products round their inputs, rounded copies of xᴸ and of all matrices but the embedding too.
    """
    grouped = segments_of(T, B, segments)
    H, L = config.hidden, config.layers
    copies = T * B * H + _product_weights(config) if rounds else 0
    return B * (T * H + len(grouped) * L * H) + _slice_floats(config, B, grouped[-1], rounds) + copies


def activation_floats(
    config: ModelConfig,
    T: int,
    B: int,
    segments: int = 1,
    pooled: bool = False,
    *,
    rounds: bool = False,
    accumulates: bool = False,
) -> int:
    """How many floats a forward and backward over a (T, B) batch hold at their peak, weights aside.

    Beside xᴸ, the states and the rounded copies that forward keeps, and what a segment keeps, the peak is

    - at the loss, with logits, log p and their difference or gradient (3P),
    - or in a slice's backward, with dlogits (P) and dxᴸ (H) of every token, and of the
      slice's own dgates_x and dgates_h (3H each; rounded, with h, 4H more), dy (H) unless it is dxᴸ, the
      layer's dx, and below them x⁰ too, and the gradients of a layer.

    pooled: where memory only serves again for an array of the same size, logits and log p are there in all,
    and U in panels of whole vectors, forward's and backward's, which are of one size where H is a multiple of
    16; where the vocabulary is small (ops/embedded_gru.py), the first layer's gates and gradients by id are
    there in place of x⁰ and dx⁰. accumulates: a second micro-batch's gradient of the classifier (P·H) is not
    written in place.
    """
    P, H, L = padded_vocab(config), config.hidden, config.layers
    E = config.embedding or H
    grouped = segments_of(T, B, segments)
    in_segment = [_slice_floats(config, B, slices, rounds) for slices in grouped]
    longest = B * max(steps.stop - steps.start for slices in grouped for steps in slices)
    gates = (6 + 4 * rounds) * H * longest
    by_id = pooled and not rounds and longest >= 2 * P
    first = gates + longest * (H * (L > 1) + (0 if by_id else 2 * E)) + 3 * H * (E + H + 2)
    if by_id:
        first += P * (6 * H + E)
    above = gates + longest * (H * (L > 2) + H) + 3 * H * (2 * H + 2) if L > 1 else 0
    passing = T * B * ((3 if pooled else 1) * P + H)
    if pooled:
        passing += (0 if rounds else 3 * H * H * (2 if H % 16 else 1)) + (P * H if accumulates else 0)
    return (
        kept_floats(config, T, B, segments, rounds=rounds)
        - in_segment[-1]
        + max(in_segment[-1] + T * B * 3 * P, max(in_segment) + passing + max(first, above))
    )


def _slice_floats(config: ModelConfig, B: int, slices: list[slice], rounds: bool) -> int:
    """What slices keep: h, r, z, n, q of each layer (5H) of a token, and the states.

    Where h is rounded or dropped out on its way to the next layer, that copy (H) too.
    """
    H, L = config.hidden, config.layers
    tokens = B * sum(steps.stop - steps.start for steps in slices)
    copies = H * (L - 1) if rounds or config.dropout else 0
    return tokens * (5 * H * L + copies) + B * len(slices) * L * H


def _product_weights(config: ModelConfig) -> int:
    """The numbers of all matrices that are multiplied with, the classifier's P·H among them."""
    H, E = config.hidden, config.embedding or config.hidden
    return 3 * H * (E + H + (config.layers - 1) * 2 * H) + padded_vocab(config) * H


def time_slices(T: int, B: int) -> int:
    """The number of slices of a window, and so the largest number of segments."""
    return max(1, min(T, TIME_SLICES, T * B // SLICE_TOKENS))


def segments_of(T: int, B: int, segments: int) -> list[list[slice]]:
    """The slices of a window of T steps and B sequences, grouped into segments."""
    slices = [slice(steps.start, steps.stop) for steps in split_evenly(T, time_slices(T, B))]
    return [[slices[i] for i in part] for part in split_evenly(len(slices), segments)]


class GRULM:
    """Parameters in an arena, and the model's forward and backward.

    backend: which functions compute the operations. precision: of matrix products (gru_ref/ops/matmul.py).
    seed: of the initial weights and of the dropout masks. The weights are zero until `initialise` or a load.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        seed: int = 1,
        backend: Backend | None = None,
        precision: str = "fp32",
        dtype: Any = np.float32,
    ) -> None:
        check_model(config)
        if config.vocab_size < 1:
            raise ConfigError(
                "model.vocab_size must be at least 1: the tokenizer's, such as 100 for ascii100"
            )
        self.config = config
        self.seed = seed
        self.ops = backend or Backend("numpy")
        self.precision = precision
        self.arena = Arena(parameter_shapes(config), dtype)

    @property
    def context(self) -> None:
        """No limit: the state carries over any length."""

    def initialise(self) -> None:
        """Draw the initial weights from the stream INITIALISATION, one layer coordinate a parameter.

        Embedding N(0, 1), or N(0, 1/E) where it is also the classifier, so that the first logits stay near 0;
        everything else uniform in ±1/√H, PyTorch's choice for a GRU; 0 in the rows that pad the vocabulary.
        """
        bound = 1 / math.sqrt(self.config.hidden)
        for index, (name, w) in enumerate(self.arena.param.items()):
            coordinates = {"seed": self.seed, "stream": random.INITIALISATION, "layer": index}
            std = 1 / math.sqrt(w.shape[-1]) if self.config.tied else 1.0
            for start, piece in random.pieces(w):
                if name == "embedding.weight":
                    piece[...] = std * random.normal(len(piece), start=start, **coordinates)
                else:
                    piece[...] = bound * (2 * random.uniform(len(piece), start=start, **coordinates) - 1)
            if name in ("embedding.weight", "classifier.weight", "classifier.bias"):
                w[self.config.vocab_size :] = 0

    def initial_state(self, batch_size: int) -> Array:
        """The state before any token: zeros (L, B, H)."""
        return np.zeros((self.config.layers, batch_size, self.config.hidden), self.arena.dtype)

    def forward(
        self,
        ids: Array,
        state: Array | None = None,
        *,
        dropout_step: int | None = None,
        segments: int = 1,
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        """ids (T, B), state (L, B, H) or None for zeros -> logits (T, B, P), state after it, cache.

        dropout_step: the number of this micro-batch while training; None leaves dropout out. segments:
        backward computes all but the last of so many parts of the window again, to the same bits.
        """
        grouped = segments_of(ids.shape[0], ids.shape[1], segments)
        weights = self._rounded_weights()
        x = np.empty((*ids.shape, self.config.hidden), self.arena.dtype)
        h, kept = state, []
        for slices in grouped:
            before, caches = h, []
            for steps in slices:
                x[steps], h, layer_caches = self._layers(weights, ids, h, dropout_step, steps)
                if slices is grouped[-1]:
                    caches.append(layer_caches)
                del layer_caches  # or they would last through the next slice
            kept.append((slices, before, caches))
        p = self.arena.param
        logits, classifier_cache = self.ops.linear.forward(
            x, p[self._classifier_weight], p["classifier.bias"], self.precision
        )
        assert h is not None  # a window has a slice
        return logits, h, (weights, ids, dropout_step, kept, classifier_cache)

    def backward(self, dlogits: Array, cache: tuple[Any, ...]) -> None:
        """dlogits (T, B, P): adds every parameter's gradient to `arena.grad`. A cache serves once."""
        weights, ids, dropout_step, kept, classifier_cache = cache
        if not kept:
            raise ValueError("this cache has served already; backward needs a forward of its own")
        # logits = xᴸ · W_cᵀ + b_c
        classifier = (self._classifier_weight, "classifier.bias")
        out = self.arena.grad_memory(self._classifier_weight)
        dx = self._accumulate(classifier, *self.ops.linear.backward(dlogits, classifier_cache, out))
        dstate = None
        while kept:
            slices, h, caches = kept.pop()
            for steps in slices if not caches else ():
                _, h, layer_caches = self._layers(weights, ids, h, dropout_step, steps)
                caches.append(layer_caches)
                del layer_caches
            for steps in reversed(slices):
                dstate = self._layers_backward(dx[steps], dstate, caches.pop())

    def _layers(
        self,
        weights: list[list[Array]],
        ids: Array,
        state: Array | None,
        dropout_step: int | None,
        steps: slice,
    ) -> tuple[Array, Array, list[tuple[Any, ...]]]:
        """x⁰ … xᴸ of some steps of the window, from the state before them -> xᴸ, state after it, caches."""
        ops, config = self.ops, self.config
        rate = 0.0 if dropout_step is None else config.dropout
        options = {"reset_after": config.reset_after, "precision": self.precision}
        caches, states = [], []
        for layer in range(config.layers):
            from_state = (None if state is None else state[layer], *weights[layer])
            if layer == 0:
                table = self.arena.param["embedding.weight"]
                x, gru_cache = ops.embedded_gru.forward(ids[steps], table, *from_state, **options)
            else:
                x, gru_cache = ops.gru.forward(x, *from_state, **options)
            # rounded copies of the weights are alike, so every slice's cache gets the same ones
            gru_cache = (*gru_cache[:6], *weights[layer][:2], *gru_cache[8:])
            states.append(x[-1])
            dropout_cache = None
            if rate:
                start = steps.start * x[0].size  # the mask is the whole window's
                x, dropout_cache = ops.dropout.forward(
                    x, rate, seed=self.seed, step=dropout_step, layer=layer, start=start
                )
            caches.append((gru_cache, dropout_cache))
        return x, np.stack(states), caches

    def _layers_backward(
        self, dx: Array, dstate: list[Array] | None, caches: list[tuple[Any, ...]]
    ) -> list[Array]:
        """dxᴸ and, from the slice after it, the gradient of the state after it -> that of the one before."""
        dstate_before: list[Array] = []
        for layer in reversed(range(self.config.layers)):
            gru_cache, dropout_cache = caches[layer]
            if dropout_cache is not None:
                (dx,) = self.ops.dropout.backward(dx, dropout_cache)
            dh_T = None if dstate is None else dstate[layer]
            if layer:
                dx, dh0, *dparameters = self.ops.gru.backward(dx, gru_cache, dh_T)
            else:  # adds to the table's gradient itself
                table = self.arena.grad_total("embedding.weight")
                _, _, dh0, *dparameters = self.ops.embedded_gru.backward(dx, gru_cache, dh_T, table)
            self._accumulate(_gru_parameters(layer), dx, *dparameters)
            del dparameters  # as large as the weights: not beside the next layer's
            dstate_before.insert(0, dh0)
        return dstate_before

    def _rounded_weights(self) -> list[list[Array]]:
        """Weights and biases of every layer, the weights rounded to the precision of products."""
        layers = [
            [self.arena.param[name] for name in _gru_parameters(layer)] for layer in range(self.config.layers)
        ]
        return [[*(round_to(w, self.precision) for w in p[:2]), *p[2:]] for p in layers]

    def _accumulate(self, names: tuple[str, ...], dx: Array, *gradients: Array) -> Array:
        """Add the gradients of these parameters; dx passes through."""
        for name, gradient in zip(names, gradients, strict=True):
            self.arena.add_grad(name, gradient, self.ops.accumulate.add)
        return dx

    @property
    def _classifier_weight(self) -> str:
        return "embedding.weight" if self.config.tied else "classifier.weight"


def _gru_parameters(layer: int) -> tuple[str, ...]:
    """Names of a layer's weights and biases in the order of gru.forward."""
    return tuple(f"gru.{layer}.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))


Model = GRULM
