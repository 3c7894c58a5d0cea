"""Whether there is a peer to measure."""

import importlib
from types import ModuleType

NO_TORCH = "torch is not installed"


def torch_peers() -> ModuleType | None:
    """gru_ref.bench._torch_peers, or None where torch is not installed."""
    try:
        importlib.import_module("torch")
    except ImportError:
        return None
    return importlib.import_module("gru_ref.bench._torch_peers")
