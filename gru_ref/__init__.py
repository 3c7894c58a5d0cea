"""gru-ref: a reference engine for recurrent language models, small enough to read in an afternoon.

The definitions are in `gru_ref.ops`, one file an operation; start with `gru_ref/ops/gru.py`.

Everything below loads on first use, so `import gru_ref` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gru_ref.version import __version__ as __version__

if TYPE_CHECKING:
    from gru_ref import ops as ops
    from gru_ref.backend import Backend as Backend
    from gru_ref.checkpoint import load_checkpoint as load_checkpoint
    from gru_ref.checkpoint import save_checkpoint as save_checkpoint
    from gru_ref.checkpoint import verify_checkpoint as verify_checkpoint
    from gru_ref.config import Config as Config
    from gru_ref.config import load as load_config  # noqa: F401 (in __all__ by _HOME)
    from gru_ref.errors import GruRefError as GruRefError
    from gru_ref.gradient_check import gradcheck as gradcheck
    from gru_ref.models.gpt2 import GPT2 as GPT2
    from gru_ref.models.gru_lm import GRULM as GRULM
    from gru_ref.training import resume as resume
    from gru_ref.training import train as train

_HOME = {
    "Backend": "gru_ref.backend",
    "Config": "gru_ref.config",
    "GPT2": "gru_ref.models.gpt2",
    "GRULM": "gru_ref.models.gru_lm",
    "GruRefError": "gru_ref.errors",
    "gradcheck": "gru_ref.gradient_check",
    "load_checkpoint": "gru_ref.checkpoint",
    "load_config": "gru_ref.config:load",
    "save_checkpoint": "gru_ref.checkpoint",
    "resume": "gru_ref.training",
    "train": "gru_ref.training",
    "verify_checkpoint": "gru_ref.checkpoint",
}

__all__ = ["__version__", "ops", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("gru_ref.ops")
    if name not in _HOME:
        raise AttributeError(f"module 'gru_ref' has no attribute '{name}'")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
