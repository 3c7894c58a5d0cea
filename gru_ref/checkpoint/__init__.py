"""Checkpoints: the layout, the atomic writer, the verifying reader and the verifier.

Names are looked up on first use (PEP 562), so that importing the package loads neither NumPy nor h5py.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "Checkpoint": "layout",
    "save_checkpoint": "write",
    "remove_stale_temporaries": "write",
    "load_checkpoint": "read",
    "verify_checkpoint": "verify",
    "VerifyReport": "verify",
    "TensorReport": "verify",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
