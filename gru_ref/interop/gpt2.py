"""GPT-2 in Hugging Face's and its own names and layouts.

    ours                                     theirs, behind 'transformer.', which a file may lack
    embedding.weight            (V, C)       wte.weight
    position.weight             (S, C)       wpe.weight                   S: the context
    block.0.ln_1.weight, bias   (C,)         h.0.ln_1.weight, bias
    block.0.attention.qkv       (3C, C)      h.0.attn.c_attn              weight (C, 3C)
    block.0.attention.proj      (C, C)       h.0.attn.c_proj              weight (C, C), transposed too
    block.0.ln_2.weight, bias   (C,)         h.0.ln_2.weight, bias
    block.0.mlp.fc              (4C, C)      h.0.mlp.c_fc                 weight (C, 4C)
    block.0.mlp.proj            (C, 4C)      h.0.mlp.c_proj               weight (4C, C)
    ln_f.weight, bias           (C,)         ln_f.weight, bias
    classifier.weight           (V, C)       lm_head.weight, never prefixed; needless where tied

Its Conv1D holds the transpose of a matrix; both split q, k, v and the heads in the same order. The number of
heads is in no shape: it is read from the config.json beside the weights. A model without biases is written
with biases of zeros.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gru_ref.config import ModelConfig
from gru_ref.errors import UsageError
from gru_ref.interop.rules import Rule, renamed, transposed, zeros
from gru_ref.interop.tensor_files import TensorFile, read_json
from gru_ref.models import parameter_shapes

VOCABULARY = ("embedding.weight", "classifier.weight")
"""The parameters with one row a token."""

_MARKS = {
    "own": re.compile(r"block\.([0-9]{1,5})\.ln_1\.weight"),
    "hf-gpt2": re.compile(r"(?:transformer\.)?h\.([0-9]{1,5})\.ln_1\.weight"),
}
"""The tensor that every layer has in a layout, with the number of the layer."""

_THEIRS = {
    "embedding": "wte",
    "position": "wpe",
    "attention.qkv": "attn.c_attn",
    "attention.proj": "attn.c_proj",
    "mlp.fc": "mlp.c_fc",
    "mlp.proj": "mlp.c_proj",
}

# What config.json may say of a model that is computed as ours is.
_COMPUTED_SO: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_HF_KEYS = {
    "model.layers": "n_layer",
    "model.hidden": "n_embd",
    "model.heads": "n_head",
    "model.context": "n_positions",
    "model.vocab_size": "vocab_size",
    "model.tied": "tie_word_embeddings",
}
_DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop")


def detect(names: Iterable[str]) -> str | None:
    """Which layout these names are of."""
    names = list(names)
    return next((layout for layout, mark in _MARKS.items() if any(map(mark.fullmatch, names))), None)


def tidy(layout: str, name: str) -> str | None:
    """A tensor's name as the rules have it, with its prefix; None for causal masks, which some files hold."""
    if layout == "own":
        return name
    if re.fullmatch(r"(transformer\.)?h\.[0-9]{1,5}\.attn\.(masked_)?bias", name):
        return None
    return f"transformer.{name}" if re.match(r"(wte|wpe|h|ln_f)\.", name) else name


def infer(layout: str, content: TensorFile) -> tuple[dict[str, Any], list[str]]:
    """The settings of the model that the shapes and config.json tell, None for what they do not; notices."""
    own = layout == "own"
    shapes = {name: array.shape for name, array in content.tensors.items()}
    layers = [int(match[1]) for name in shapes if (match := _MARKS[layout].fullmatch(name))]
    table = "embedding.weight" if own else "transformer.wte.weight"
    head = "classifier.weight" if own else "lm_head.weight"
    vocab_size, hidden = (*shapes.get(table, ()), 0, 0)[:2]
    context = (*shapes.get("position.weight" if own else "transformer.wpe.weight", ()), 0)[0]
    settings: dict[str, Any] = {
        "model.layers": max(layers) + 1,
        "model.hidden": hidden,
        "model.heads": None,
        "model.context": context,
        "model.vocab_size": vocab_size,
        "model.bias": not own or "ln_f.bias" in shapes,
        "model.tied": head not in shapes
        or (table in shapes and np.array_equal(content.tensors[head], content.tensors[table])),
    }
    notices: list[str] = []
    beside = content.path.with_name("config.json")
    if not own and beside.exists():
        told, notices = _from_hf_config(beside, hidden)
        settings |= told
    return settings | {"train.seq_len": settings["model.context"]}, notices


def _from_hf_config(path: Path, hidden: int) -> tuple[dict[str, Any], list[str]]:
    config = read_json(path)
    for key, known in _COMPUTED_SO.items():
        if key in config and config[key] not in known:
            raise UsageError(f"{path}: {key} is {config[key]!r}; a gpt2 here has {known[0]!r}")
    if config.get("n_inner") not in (None, 4 * hidden):
        raise UsageError(f"{path}: n_inner is {config['n_inner']!r}; a gpt2 here has 4 · n_embd")
    settings = {ours: config[theirs] for ours, theirs in _HF_KEYS.items() if theirs in config}
    dropouts = [config.get(key, 0.1) for key in _DROPOUTS]  # 0.1 is what theirs has by default
    if dropouts.count(dropouts[0]) == len(dropouts):
        return settings | {"model.dropout": dropouts[0]}, []
    return settings, [f"{path.name} has several dropouts: taken as 0, give the one to train with by --set"]


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of a model; no token begins or ends a text."""
    return {key: known[0] for key, known in _COMPUTED_SO.items()} | {
        "architectures": ["GPT2LMHeadModel"],
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": None,
        "n_ctx": config.context,
        "n_embd": config.hidden,
        "n_head": config.heads,
        "n_inner": None,
        "n_layer": config.layers,
        "n_positions": config.context,
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocab_size,
        **dict.fromkeys(_DROPOUTS, config.dropout),
    }


def rules(layout: str, config: ModelConfig) -> list[Rule]:
    """The tensors of a file in this layout."""
    shapes = parameter_shapes(config)
    if layout == "own":
        return [renamed(name, name, shape) for name, shape in shapes.items()]
    if layout != "hf-gpt2":
        raise UsageError(f"a model of kind gpt2 cannot be laid out as {layout}")
    result = []
    for name, shape in shapes.items():
        theirs = _hf_name(name)
        is_conv1d = ".c_" in theirs and len(shape) == 2
        result.append(transposed(theirs, name, shape[::-1]) if is_conv1d else renamed(theirs, name, shape))
        if not config.bias and name not in (*VOCABULARY, "position.weight"):
            result.append(zeros(theirs.replace(".weight", ".bias"), shape[:1]))
    if config.tied:
        head = renamed("lm_head.weight", "embedding.weight", shapes["embedding.weight"])
        result.append(head.optional(written=False))
    return result


def _hf_name(name: str) -> str:
    """block.0.mlp.fc.weight -> transformer.h.0.mlp.c_fc.weight."""
    if name == "classifier.weight":
        return "lm_head.weight"
    module, _, kind = name.rpartition(".")
    block = re.match(r"block\.\d+\.", module)
    prefix = block[0].replace("block", "h") if block else ""
    inner = module[block.end() if block else 0 :]
    return f"transformer.{prefix}{_THEIRS.get(inner, inner)}.{kind}"
