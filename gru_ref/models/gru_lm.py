"""A GRU language model: embedding → L stacked GRU layers → classifier.

    x⁰   = W_e[ids]                                         (T, B, E)
    xˡ⁺¹ = dropout(GRUˡ(xˡ))            l = 0 … L−1         (T, B, H)
    logits = xᴸ · W_cᵀ + b_c                                (T, B, P)

P is the vocabulary V padded to `vocab_padding`; the loss and the sampler look at the first V columns only.
Tied means W_c is W_e: one parameter, whose gradient is the sum over both uses.
"""

import math
from typing import Any

import numpy as np

from gru_ref import random
from gru_ref.arena import Arena
from gru_ref.backend import Backend
from gru_ref.config import ModelConfig, check_model
from gru_ref.errors import ConfigError
from gru_ref.models import padded_vocab
from gru_ref.types import Array


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


def activation_floats(config: ModelConfig, T: int, B: int) -> int:
    """How many floats a forward and backward over a (T, B) batch hold at their peak, weights aside.

    Forward keeps the embedding (E) and h, r, z, n, q of each layer (5H) for every token. The peak is either
    at the loss, with logits, log p and their difference or gradient (3P), or in the last layer's backward,
    with dlogits (P), dy (H), dgates_x and dgates_h (3H each) and dx.
    """
    P, H = padded_vocab(config), config.hidden
    E = config.embedding or H
    kept = E + 5 * H * config.layers
    return T * B * (kept + max(3 * P, P + 7 * H + (E if config.layers == 1 else H)))


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
            if name == "embedding.weight":
                std = 1 / math.sqrt(w.shape[1]) if self.config.tied else 1.0
                w[...] = std * random.normal(w.size, **coordinates).reshape(w.shape)
            else:
                w[...] = bound * (2 * random.uniform(w.size, **coordinates) - 1).reshape(w.shape)
            if name in ("embedding.weight", "classifier.weight", "classifier.bias"):
                w[self.config.vocab_size :] = 0

    def initial_state(self, batch_size: int) -> Array:
        """The state before any token: zeros (L, B, H)."""
        return np.zeros((self.config.layers, batch_size, self.config.hidden), self.arena.dtype)

    def forward(
        self, ids: Array, state: Array | None = None, *, dropout_step: int | None = None
    ) -> tuple[Array, Array, tuple[Any, ...]]:
        """ids (T, B), state (L, B, H) or None for zeros -> logits (T, B, P), state after it, cache.

        dropout_step: the number of this micro-batch while training; None leaves dropout out.
        """
        ops, p = self.ops, self.arena.param
        rate = 0.0 if dropout_step is None else self.config.dropout
        x, embedding_cache = ops.embedding.forward(ids, p["embedding.weight"])
        layer_caches, states = [], []
        for layer in range(self.config.layers):
            x, gru_cache = ops.gru.forward(
                x,
                None if state is None else state[layer],
                *self._gru_parameters(p, layer),
                reset_after=self.config.reset_after,
                precision=self.precision,
            )
            states.append(x[-1])
            dropout_cache = None
            if rate:
                x, dropout_cache = ops.dropout.forward(
                    x, rate, seed=self.seed, step=dropout_step, layer=layer
                )
            layer_caches.append((gru_cache, dropout_cache))
        logits, classifier_cache = ops.linear.forward(
            x, p[self._classifier_weight], p["classifier.bias"], self.precision
        )
        return logits, np.stack(states), (embedding_cache, layer_caches, classifier_cache)

    def backward(self, dlogits: Array, cache: tuple[Any, ...]) -> None:
        """dlogits (T, B, P): adds every parameter's gradient to `arena.grad`."""
        ops, g = self.ops, self.arena.grad
        embedding_cache, layer_caches, classifier_cache = cache
        # logits = xᴸ · W_cᵀ + b_c
        dx, dweight, dbias = ops.linear.backward(dlogits, classifier_cache)
        g[self._classifier_weight] += dweight
        g["classifier.bias"] += dbias
        for layer in reversed(range(self.config.layers)):
            gru_cache, dropout_cache = layer_caches[layer]
            if dropout_cache is not None:
                (dx,) = ops.dropout.backward(dx, dropout_cache)
            dx, _, *dparameters = ops.gru.backward(dx, gru_cache)
            for total, gradient in zip(self._gru_parameters(g, layer), dparameters, strict=True):
                total += gradient
        # x⁰ = W_e[ids]
        _, dweight = ops.embedding.backward(dx, embedding_cache)
        g["embedding.weight"] += dweight

    @property
    def _classifier_weight(self) -> str:
        return "embedding.weight" if self.config.tied else "classifier.weight"

    @staticmethod
    def _gru_parameters(tensors: dict[str, Array], layer: int) -> list[Array]:
        """Weights and biases of a layer in the order of gru.forward, from parameters or from gradients."""
        return [tensors[f"gru.{layer}.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


Model = GRULM
