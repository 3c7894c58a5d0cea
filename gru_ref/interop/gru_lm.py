"""The GRU language model in PyTorch's, Keras's and its own names and layouts.

    ours: gates r, z, n             PyTorch: r, z, n       Keras: z, r, h
    embedding.weight    (V, E)      the same               embedding.embeddings    (V, E)
    gru.0.weight_ih     (3H, I)     gru.weight_ih_l0       gru.0.kernel            (I, 3H)
    gru.0.weight_hh     (3H, H)     gru.weight_hh_l0       gru.0.recurrent_kernel  (H, 3H)
    gru.0.bias_ih       (3H,)       gru.bias_ih_l0         gru.0.bias              (2, 3H) or (3H,)
    gru.0.bias_hh       (3H,)       gru.bias_hh_l0         in gru.0.bias
    classifier.weight   (V, H)      the same               classifier.kernel       (H, V)
    classifier.bias     (V,)        the same               classifier.bias         (V,)

Keras's bias is (2, 3H) with reset_after=True: that of the input, then that of the recurrent product. With
reset_after=False it is one vector (3H,), because both biases are only ever added up: reading it gives
bias_ih, and a bias_hh of zeros; writing adds ours up where the sum is exact, and refuses where it is not.
PyTorch has no reset_after=False.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gru_ref.config import ModelConfig
from gru_ref.errors import UsageError
from gru_ref.interop.rules import Rule, renamed, transposed
from gru_ref.interop.tensor_files import TensorFile
from gru_ref.models import parameter_shapes
from gru_ref.types import Array

VOCABULARY = ("embedding.weight", "classifier.weight", "classifier.bias")
"""The parameters with one row a token."""

_MARKS = {
    "own": re.compile(r"gru\.([0-9]{1,5})\.weight_hh"),
    "torch": re.compile(r"gru\.weight_hh_l([0-9]{1,5})"),
    "keras": re.compile(r"gru\.([0-9]{1,5})\.recurrent_kernel"),
}
"""The tensor that every layer has in a layout, with the number of the layer."""


def detect(names: Iterable[str]) -> str | None:
    """Which layout these names are of."""
    names = list(names)
    return next((layout for layout, mark in _MARKS.items() if any(map(mark.fullmatch, names))), None)


def tidy(layout: str, name: str) -> str | None:
    """A tensor's name as the rules have it: any name as it is."""
    return name


def infer(layout: str, content: TensorFile) -> tuple[dict[str, Any], list[str]]:
    """The settings of the model that the shapes tell, None for what they do not; notices.

    Odd shapes are for `unpack` to name.
    """
    tensors = content.tensors
    layers = [int(match[1]) for name in tensors if (match := _MARKS[layout].fullmatch(name))]
    embedding = tensors.get("embedding.embeddings" if layout == "keras" else "embedding.weight")
    vocab_size, width = (*(() if embedding is None else embedding.shape), 0, 0)[:2]
    first = next(name for name in tensors if _MARKS[layout].fullmatch(name))
    settings: dict[str, Any] = {
        "model.layers": max(layers) + 1,
        "model.hidden": min(tensors[first].shape, default=0),
        "model.embedding": width,
        "model.vocab_size": vocab_size,
        "model.tied": _is_tied(layout, tensors),
    }
    notices = []
    if settings["model.tied"]:
        notices.append("the classifier is the embedding in every bit, so the model is tied")
    if layout == "keras":
        bias = tensors.get("gru.0.bias")
        settings["model.reset_after"] = bias is None or bias.ndim == 2
    elif layout == "own":
        settings["model.reset_after"] = None
    return settings, notices


def _is_tied(layout: str, tensors: Mapping[str, Array]) -> bool:
    """Whether the classifier is the embedding, in every bit."""
    if layout == "keras":
        a, b = tensors.get("embedding.embeddings"), tensors.get("classifier.kernel")
        b = None if b is None else b.T
    else:
        a, b = tensors.get("embedding.weight"), tensors.get("classifier.weight")
    return a is not None and b is not None and np.array_equal(a, b)


def rules(layout: str, config: ModelConfig) -> list[Rule]:
    """The tensors of a file in this layout."""
    shapes = parameter_shapes(config)
    if layout == "own":
        return [renamed(name, name, shape) for name, shape in shapes.items()]
    if layout == "torch":
        if not config.reset_after:
            raise UsageError(
                "PyTorch's nn.GRU has no reset_after=false, the form of 2014; "
                "choose keras, safetensors or npz"
            )
        return _torch_rules(config, shapes)
    if layout == "keras":
        return _keras_rules(config, shapes)
    raise UsageError(f"a model of kind gru-lm cannot be laid out as {layout}")


def _torch_rules(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> list[Rule]:
    names = {name: re.sub(r"gru\.(\d+)\.(\w+)", r"gru.\2_l\1", name) for name in shapes}
    result = [renamed(names[name], name, shape) for name, shape in shapes.items()]
    if config.tied:  # a module with tied weights has both names in its state dict
        shape = shapes["embedding.weight"]
        result.append(renamed("classifier.weight", "embedding.weight", shape).optional())
    return result


def _keras_rules(config: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> list[Rule]:
    V, E = shapes["embedding.weight"]
    result = [renamed("embedding.embeddings", "embedding.weight", (V, E))]
    for layer in range(config.layers):
        ours, theirs = (f"gru.{layer}.{name}" for name in ("weight_ih", "kernel"))
        result.append(_keras_matrix(theirs, ours, shapes[ours]))
        ours, theirs = (f"gru.{layer}.{name}" for name in ("weight_hh", "recurrent_kernel"))
        result.append(_keras_matrix(theirs, ours, shapes[ours]))
        result.append(_keras_bias(f"gru.{layer}", config.hidden, config.reset_after))
    weight = "embedding.weight" if config.tied else "classifier.weight"
    kernel = transposed("classifier.kernel", weight, (config.hidden, V))
    result.append(kernel.optional() if config.tied else kernel)
    result.append(renamed("classifier.bias", "classifier.bias", (V,)))
    return result


def swap_gates(a: Array) -> Array:
    """(3H, …) in the order r, z, n as z, r, n, or back."""
    r, z, n = np.split(a, 3)
    return np.concatenate([z, r, n])


def _keras_matrix(name: str, parameter: str, shape: tuple[int, ...]) -> Rule:
    return Rule(
        name,
        shape[::-1],
        lambda p: swap_gates(p[parameter]).T,
        lambda a: {parameter: swap_gates(a.T)},
    )


def _keras_bias(layer: str, H: int, reset_after: bool) -> Rule:
    ih, hh = f"{layer}.bias_ih", f"{layer}.bias_hh"
    if reset_after:
        return Rule(
            f"{layer}.bias",
            (2, 3 * H),
            lambda p: np.stack([swap_gates(p[ih]), swap_gates(p[hh])]),
            lambda a: {ih: swap_gates(a[0]), hh: swap_gates(a[1])},
        )
    return Rule(
        f"{layer}.bias",
        (3 * H,),
        lambda p: swap_gates(_exact_sum(p[ih], p[hh], layer)),
        lambda a: {ih: swap_gates(a), hh: np.zeros_like(a)},
    )


def _exact_sum(a: Array, b: Array, layer: str) -> Array:
    """a + b; raises UsageError where the sum is not a number of their type.

    The error of a floating-point sum s is itself a floating-point number: (a − (s − c)) + (b − c), c = s − a
    (Knuth's two-sum).
    """
    s = a + b
    c = s - a
    if np.any((a - (s - c)) + (b - c)):
        raise UsageError(
            f"{layer}: Keras has one bias with reset_after=false, and bias_ih + bias_hh is not exact in "
            f"{a.dtype}; choose safetensors or npz"
        )
    return np.where(b == 0, a, s)  # keeps the sign of -0 + 0
