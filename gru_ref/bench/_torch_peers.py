"""The same models in PyTorch, as its users would write them. Imported only where torch is installed.

Names of the GPT's parameters are ours, those of the GRU's are PyTorch's (gru_ref/interop/gru_lm.py).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from gru_ref.bench._ours import ADAMW, CLIP_NORM, LR, NADAM
from gru_ref.config import ModelConfig
from gru_ref.interop import gru_lm, rules
from gru_ref.models import LanguageModel, is_decayed
from gru_ref.training.step import MicroBatch
from gru_ref.types import Array


class GRULanguageModel(nn.Module):
    """Embedding → stacked nn.GRU → classifier; ids (T, B) -> logits (T, B, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.gru = nn.GRU(config.hidden, config.hidden, config.layers)
        self.classifier = nn.Linear(config.hidden, config.vocab_size)

    def forward(self, ids: Any) -> Any:
        y, _ = self.gru(self.embedding(ids))
        return self.classifier(y)

    def next_logits(self, ids: Any, state: Any) -> tuple[Any, Any]:
        """ids (T,), state or None -> logits (V,) of the token after them, state."""
        y, state = self.gru(self.embedding(ids), state)
        return self.classifier(y[-1]), state


class Attention(nn.Module):
    """Causal self-attention in N heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        C = config.hidden
        self.heads = config.heads
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)

    def forward(self, x: Any, past: Any = None, start: int = 0) -> Any:
        """x (B, T, C); past (2, B, N, S, D), into which keys and values are written from `start` on."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            past[0, :, :, start : start + T], past[1, :, :, start : start + T] = k, v
            k, v = past[:, :, :, : start + T]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two affine maps with a GELU between them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.hidden, 4 * config.hidden)
        self.proj = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Any) -> Any:
        return self.proj(F.gelu(self.fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, norm first."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Any, past: Any = None, start: int = 0) -> Any:
        x = x + self.attention(self.ln_1(x), past, start)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 with a tied classifier; ids (B, T) -> logits (B, T, V)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.block = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)

    def forward(self, ids: Any) -> Any:
        return F.linear(self.hidden(ids), self.embedding.weight)

    def hidden(self, ids: Any, past: Any = None, start: int = 0) -> Any:
        """What the classifier sees, (B, T, C)."""
        x = self.embedding(ids) + self.position(torch.arange(start, start + ids.shape[1]))
        for layer, block in enumerate(self.block):
            x = block(x, None if past is None else past[layer], start)
        return self.ln_f(x)

    def next_logits(self, ids: Any, state: Any) -> tuple[Any, Any]:
        """ids (T,), state (cache, tokens in it) or None -> logits (V,) of the token after them, state."""
        c = self.config
        cache, start = state or (torch.empty(c.layers, 2, 1, c.heads, c.context, c.hidden // c.heads), 0)
        x = self.hidden(ids[None], cache, start)
        return F.linear(x[0, -1], self.embedding.weight), (cache, start + len(ids))


def same_model(model: LanguageModel, threads: int) -> Any:
    """A PyTorch model with the weights of ours; padded rows of a vocabulary are left out."""
    torch.set_num_threads(threads)
    config, parameters = model.config, model.arena.param
    if config.kind == "gru-lm":
        peer: Any = GRULanguageModel(config)
        parameters = rules.pack(gru_lm.rules("torch", config), parameters)
    else:
        peer = GPT(config)
        parameters = rules.crop(parameters, ["embedding.weight"], config)
    peer.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in parameters.items()})
    return peer


def training(peer: Any, batch: MicroBatch, *, compiled: bool = False) -> Callable[[], float]:
    """A whole step: forward, backward, clip, optimizer; a call returns its loss."""
    batch_first = isinstance(peer, GPT)
    inputs, targets = (torch.from_numpy((a.T if batch_first else a).copy()) for a in batch)
    optimizer = adamw(peer.parameters()) if batch_first else nadam(peer.parameters())

    def loss_of(inputs: Any, targets: Any) -> Any:
        return F.cross_entropy(peer(inputs).flatten(0, 1), targets.flatten())

    forward: Any = torch.compile(loss_of) if compiled else loss_of

    def step() -> float:
        optimizer.zero_grad()
        loss = forward(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(peer.parameters(), CLIP_NORM)
        optimizer.step()
        return float(loss.item())

    return step


def nadam(parameters: Any) -> Any:
    """With the settings of ours."""
    return torch.optim.NAdam(parameters, LR, betas=(NADAM.beta1, NADAM.beta2), eps=NADAM.eps, foreach=True)


def adamw(parameters: Any) -> Any:
    """With the settings of ours: only matrices decay."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if is_decayed(p.shape)], "weight_decay": ADAMW.weight_decay},
        {"params": [p for p in parameters if not is_decayed(p.shape)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, LR, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps, fused=True)


def updating(name: str, gradients: list[Array], threads: int, kept: float) -> Callable[[], object]:
    """Clip to `kept` of the norm, and the optimizer's step, of parameters with these gradients."""
    torch.set_num_threads(threads)
    parameters = [nn.Parameter(torch.zeros(g.shape)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
    optimizer = nadam(parameters) if name == "nadam" else adamw(parameters)
    norm = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients))

    def update() -> None:
        nonlocal norm
        norm *= kept
        nn.utils.clip_grad_norm_(parameters, norm)
        optimizer.step()

    return update


def first_logits(peer: Any, ids: list[int]) -> Array:
    """Of the token after a prompt, (V,)."""
    with torch.inference_mode():
        logits, _ = peer.next_logits(torch.tensor(ids), None)
        return np.asarray(logits)


def sampling(peer: Any, ids: list[int]) -> Callable[[], int]:
    """A call draws one more token after the prompt, the state or the cache of keys and values carried."""
    pending, state = torch.tensor(ids), None

    @torch.inference_mode()
    def draw() -> int:
        nonlocal pending, state
        logits, state = peer.next_logits(pending, state)
        pending = torch.multinomial(torch.softmax(logits, 0), 1)
        return int(pending.item())

    return draw
