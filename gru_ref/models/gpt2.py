"""GPT-2 (Radford et al. 2019): token and position embedding → L blocks, norm first → norm → classifier.

    x⁰   = dropout(W_e[ids] + W_p[positions])                              (T, B, C)
    h    = xˡ + dropout(proj(attention(q, k, v)))        q, k, v = qkv(norm₁(xˡ))
    xˡ⁺¹ = h + dropout(proj(gelu(fc(norm₂(h)))))         l = 0 … L−1       (T, B, C), 4C inside
    logits = norm(xᴸ) · W_cᵀ                                               (T, B, V)

C is `hidden`, in N heads of D = C/N. W_e and W_c have P rows, the vocabulary V padded to `vocab_padding`;
only the first V are used, so that padding changes no bit of a loss, where a product of another size might sum
in another order. Tied means W_c is W_e: one parameter, whose gradient is the sum over both uses.
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
from gru_ref.types import Array


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape; a tied classifier has no weight of its own.

    Their number is P·C + context·C + L·(12C² + 13C) + 2C + (P·C unless tied), and without biases
    L·11C + C less.
    """
    P, C = padded_vocab(config), config.hidden
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (P, C), "position.weight": (config.context, C)}

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"] = shape
        if config.bias:
            shapes[f"{name}.bias"] = shape[:1]

    for layer in range(config.layers):
        add(f"block.{layer}.ln_1", C)
        add(f"block.{layer}.attention.qkv", 3 * C, C)
        add(f"block.{layer}.attention.proj", C, C)
        add(f"block.{layer}.ln_2", C)
        add(f"block.{layer}.mlp.fc", 4 * C, C)
        add(f"block.{layer}.mlp.proj", C, 4 * C)
    add("ln_f", C)
    if not config.tied:
        shapes["classifier.weight"] = (P, C)
    return shapes


def kept_floats(config: ModelConfig, T: int, B: int, segments: int = 1, *, rounds: bool = False) -> int:
    """How many floats forward keeps for backward over a (T, B) batch.

    Kept are the blocks of one segment, and x (C) at the start of every other. Of each token a block keeps x̂
    and the results of both norms (4C), q, k, v and y (4C), the GELU's input and result (8C), λ and rstd; the
    last norm keeps 2C. rounds: where products round their inputs, also y as it was (C), and rounded copies of
    these blocks' matrices (12C²) and of the classifier (V·C); other rounded inputs take an input's place.
    """
    C = config.hidden
    parts = split_evenly(config.layers, segments)  # the last is the longest
    blocks = len(parts[-1])
    copies = blocks * (T * B * C + 12 * C * C) + config.vocab_size * C if rounds else 0
    return T * B * (blocks * (16 * C + config.heads + 2) + (len(parts) - 1) * C + 2 * C + 1) + copies


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

    Beside `kept_floats`, the peak is either at the loss, with logits, log p and their difference or gradient
    (3V), or in the backward of a GELU, with dlogits (V), what passes by (2C) and five times 4C. pooled: where
    memory only serves again for an array of the same size, it is both. accumulates: a second micro-batch's
    gradients of weights are not written in place; pooled, one of each shape is held (V·C + 8C²).
    """
    V, C = config.vocab_size, config.hidden
    kept = kept_floats(config, T, B, segments, rounds=rounds)
    if pooled:
        return kept + T * B * (3 * V + 22 * C) + (V * C + 8 * C * C if accumulates else 0)
    return kept + T * B * max(3 * V, V + 22 * C)


class _KeysValues(np.ndarray[Any, Any]):
    """Memory of states, each of which is its first so many keys and values of every block."""

    used = 0  # of the longest


class GPT2:
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
    def context(self) -> int:
        """How many tokens it can look back on, and no sequence may be longer: the rows of W_p."""
        return self.config.context

    def initialise(self) -> None:
        """Draw the initial weights from the stream INITIALISATION, one layer coordinate a parameter.

        Matrices N(0, 0.02²), those that add to the residual stream N(0, 0.02²/2L), so that its variance does
        not grow with depth; gains 1, biases 0, and 0 in the rows that pad the vocabulary.
        """
        residual = 1 / math.sqrt(2 * self.config.layers)
        for index, (name, w) in enumerate(self.arena.param.items()):
            if w.ndim == 1:
                w[...] = 1 if name.endswith("weight") else 0
                continue
            std = 0.02 * residual if name.endswith("proj.weight") else 0.02
            coordinates = {"seed": self.seed, "stream": random.INITIALISATION, "layer": index}
            for start, piece in random.pieces(w):
                piece[...] = std * random.normal(len(piece), start=start, **coordinates)
            if name in ("embedding.weight", "classifier.weight"):
                w[self.config.vocab_size :] = 0

    def initial_state(self, batch_size: int) -> Array:
        """The state before any token: no keys and values, (L, 2, 0, B, N, D)."""
        L, N, D = self.config.layers, self.config.heads, self.config.hidden // self.config.heads
        return np.zeros((L, 2, 0, batch_size, N, D), self.arena.dtype)

    def forward(
        self,
        ids: Array,
        state: Array | None = None,
        *,
        dropout_step: int | None = None,
        segments: int = 1,
    ) -> tuple[Array, Array | None, tuple[Any, ...]]:
        """ids (T, B), state (L, 2, S, B, N, D) or None for none -> logits (T, B, V), state after it, cache.

        The state is the keys and values of the S tokens before. dropout_step: the number of this micro-batch
        while training; None leaves dropout out. The state after a training step is None: nothing goes on
        from it. segments: backward computes all but the last of so many groups of blocks again.
        Raises ValueError where S + T is more than the context.
        """
        ops, p = self.ops, self.arena.param
        T, past = len(ids), 0 if state is None else state.shape[2]
        if past + T > self.context:
            raise ValueError(f"{past} + {T} tokens are more than the model's context, {self.context}")
        x, embedding_cache = ops.embedding.forward(ids, p["embedding.weight"])
        positions = np.arange(past, past + T)[:, None]
        x_position, position_cache = ops.embedding.forward(positions, p["position.weight"])
        x, dropout_cache = self._dropout(x + x_position, dropout_step, 0)
        training = dropout_step is not None
        state_after = None if training and state is None else self._longer(state, T, ids.shape[1])
        parts = split_evenly(self.config.layers, segments)
        kept = []
        for layers in parts:
            start, caches = x, []
            for layer in layers:
                x, cache = self._block(x, state_after, dropout_step, layer)
                if layers is parts[-1]:
                    caches.append(cache)
                del cache  # or it would last through the next block
            kept.append((layers, None if caches else start, caches))
        del start
        x, ln_f_cache = self._norm(x, "ln_f")
        logits, classifier_cache = ops.linear.forward(
            x, self._true_rows(p[self._classifier_weight]), None, self.precision
        )
        blocks = (state_after, dropout_step, kept)
        cache = (embedding_cache, position_cache, dropout_cache, blocks, ln_f_cache, classifier_cache)
        return logits, None if training else state_after, cache

    def backward(self, dlogits: Array, cache: tuple[Any, ...]) -> None:
        """dlogits (T, B, V): adds every parameter's gradient to `arena.grad`. A cache serves once."""
        ops = self.ops
        embedding_cache, position_cache, dropout_cache, blocks, ln_f_cache, classifier_cache = cache
        state_after, dropout_step, kept = blocks
        if not kept:
            raise ValueError("this cache has served already; backward needs a forward of its own")
        # logits = norm(xᴸ) · W_cᵀ
        memory = self.arena.grad_memory(self._classifier_weight)
        out = None if memory is None else self._true_rows(memory)
        dx, dweight, _ = ops.linear.backward(dlogits, classifier_cache, out)
        self.arena.add_grad(self._classifier_weight, dweight, ops.accumulate.add)
        dx = self._norm_backward(dx, "ln_f", ln_f_cache)
        while kept:
            layers, x, caches = kept.pop()
            for layer in layers if not caches else ():
                x, block_cache = self._block(x, state_after, dropout_step, layer)
                caches.append(block_cache)
            del x
            for layer in reversed(layers):
                dx = self._block_backward(dx, caches.pop(), layer)
        # x⁰ = dropout(W_e[ids] + W_p[positions])
        dx = self._dropout_backward(dx, dropout_cache)
        grad = self.arena.grad
        ops.embedding.backward(dx.sum(axis=1, keepdims=True), position_cache, grad["position.weight"])
        ops.embedding.backward(dx, embedding_cache, grad["embedding.weight"])

    def _longer(self, state: Array | None, T: int, B: int) -> Array:
        """(L, 2, S + T, B, N, D), the first S the state's, for `_block` to fill in the rest.

        In the state's own memory where it has room behind, and no other state has gone on from there: a token
        more copies no keys and values then, and no state ever changes.
        """
        if state is None:
            state = self.initial_state(B)
        L, _, S, _, N, D = state.shape
        memory: Any = state.base
        if not (isinstance(memory, _KeysValues) and memory.used == S and memory.shape[2] >= S + T):
            room = S + T if S == 0 else min(2 * (S + T), self.context)
            memory = _KeysValues((L, 2, room, B, N, D), state.dtype)
            memory[:, :, :S] = state
        memory.used = S + T
        # not a slice, whose base might be another view of the memory
        return np.ndarray((L, 2, S + T, B, N, D), state.dtype, memory, strides=memory.strides)

    def _block(
        self, x: Array, states: Array | None, dropout_step: int | None, layer: int
    ) -> tuple[Array, tuple[Any, ...]]:
        """x (T, B, C), keys and values whose last T are to be set, or None -> x, cache."""
        (T, B, C), N, name = x.shape, self.config.heads, f"block.{layer}"
        h, ln_1_cache = self._norm(x, f"{name}.ln_1")
        qkv, qkv_cache = self._linear(h, f"{name}.attention.qkv")
        q, k, v = np.moveaxis(qkv.reshape(T, B, 3, N, C // N), 2, 0)
        if states is not None:
            states[layer, 0, -T:], states[layer, 1, -T:] = k, v
            k, v = states[layer]
        y, attention_cache = self.ops.attention_blocked.forward(
            q,
            k,
            v,
            offset=len(k) - T,
            precision=self.precision,
            dropout=self._dropout_rate(dropout_step),
            seed=self.seed,
            step=dropout_step or 0,
            layer=3 * layer + 1,
        )
        h, proj_cache = self._linear(y.reshape(T, B, C), f"{name}.attention.proj")
        h, attention_dropout_cache = self._dropout(h, dropout_step, 3 * layer + 2)
        x = x + h

        h, ln_2_cache = self._norm(x, f"{name}.ln_2")
        h, fc_cache = self._linear(h, f"{name}.mlp.fc")
        h, gelu_cache = self.ops.gelu.forward(h)
        h, mlp_proj_cache = self._linear(h, f"{name}.mlp.proj")
        h, mlp_dropout_cache = self._dropout(h, dropout_step, 3 * layer + 3)
        attention_caches = (ln_1_cache, qkv_cache, attention_cache, proj_cache, attention_dropout_cache)
        mlp_caches = (ln_2_cache, fc_cache, gelu_cache, mlp_proj_cache, mlp_dropout_cache)
        return x + h, (attention_caches, mlp_caches)

    def _block_backward(self, dx: Array, cache: tuple[Any, ...], layer: int) -> Array:
        """dx (T, B, C) of the block's output -> dx of its input. Past keys and values are constants."""
        (T, B, C), name = dx.shape, f"block.{layer}"
        attention_caches, mlp_caches = cache
        ln_1_cache, qkv_cache, attention_cache, proj_cache, attention_dropout_cache = attention_caches
        ln_2_cache, fc_cache, gelu_cache, mlp_proj_cache, mlp_dropout_cache = mlp_caches
        # xˡ⁺¹ = h + dropout(proj(gelu(fc(norm₂(h)))))
        dh = self._dropout_backward(dx, mlp_dropout_cache)
        dh = self._linear_backward(dh, f"{name}.mlp.proj", mlp_proj_cache)
        (dh,) = self.ops.gelu.backward(dh, gelu_cache)
        dh = self._linear_backward(dh, f"{name}.mlp.fc", fc_cache)
        dx = dx + self._norm_backward(dh, f"{name}.ln_2", ln_2_cache)
        # h = xˡ + dropout(proj(attention(q, k, v)))
        dh = self._dropout_backward(dx, attention_dropout_cache)
        dh = self._linear_backward(dh, f"{name}.attention.proj", proj_cache)
        dq, dk, dv = self.ops.attention_blocked.backward(
            dh.reshape(T, B, self.config.heads, -1), attention_cache
        )
        dqkv = np.stack([dq, dk[-T:], dv[-T:]], axis=2).reshape(T, B, 3 * C)
        dh = self._linear_backward(dqkv, f"{name}.attention.qkv", qkv_cache)
        return dx + self._norm_backward(dh, f"{name}.ln_1", ln_1_cache)

    def _norm(self, x: Array, name: str) -> tuple[Array, tuple[Any, ...]]:
        p = self.arena.param
        y, cache = self.ops.layer_norm.forward(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
        return y, cache

    def _norm_backward(self, dy: Array, name: str, cache: tuple[Any, ...]) -> Array:
        dx, *dparameters = self.ops.layer_norm.backward(dy, cache)
        return self._accumulate(name, dx, *dparameters)

    def _linear(self, x: Array, name: str) -> tuple[Array, tuple[Any, ...]]:
        p = self.arena.param
        y, cache = self.ops.linear.forward(x, p[f"{name}.weight"], p.get(f"{name}.bias"), self.precision)
        return y, cache

    def _linear_backward(self, dy: Array, name: str, cache: tuple[Any, ...]) -> Array:
        out = self.arena.grad_memory(f"{name}.weight")
        dx, *dparameters = self.ops.linear.backward(dy, cache, out)
        return self._accumulate(name, dx, *dparameters)

    def _accumulate(self, name: str, dx: Array, dweight: Array, dbias: Array | None) -> Array:
        """Add a weight's and a bias's gradient; dx passes through."""
        self.arena.add_grad(f"{name}.weight", dweight, self.ops.accumulate.add)
        if dbias is not None:
            self.arena.add_grad(f"{name}.bias", dbias, self.ops.accumulate.add)
        return dx

    def _dropout_rate(self, dropout_step: int | None) -> float:
        return 0.0 if dropout_step is None else self.config.dropout

    def _dropout(
        self, x: Array, dropout_step: int | None, layer: int
    ) -> tuple[Array, tuple[Any, ...] | None]:
        rate = self._dropout_rate(dropout_step)
        if not rate:
            return x, None
        y, cache = self.ops.dropout.forward(x, rate, seed=self.seed, step=dropout_step, layer=layer)
        return y, cache

    def _dropout_backward(self, dy: Array, cache: tuple[Any, ...] | None) -> Array:
        if cache is None:
            return dy
        (dx,) = self.ops.dropout.backward(dy, cache)
        return dx

    @property
    def _classifier_weight(self) -> str:
        return "embedding.weight" if self.config.tied else "classifier.weight"

    def _true_rows(self, weight: Array) -> Array:
        """Those of the vocabulary, without its padding."""
        return weight[: self.config.vocab_size]


Model = GPT2
