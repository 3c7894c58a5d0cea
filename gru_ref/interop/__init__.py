"""Exchange with other programs: weights in and out, golden values, and the difference of two files.

    tensor_files.py   safetensors and npz, read without trusting them; pickles are refused
    rules.py          how a tensor of a file is made of parameters, and back
    gru_lm.py         PyTorch's and Keras's names and layouts of a GRU language model
    gpt2.py           Hugging Face's names and layout of GPT-2
    vocabulary.py     the vocabulary of a bpe as tokenizer.json
    exchange.py       export and import of checkpoints
    compare.py        the difference of two sets of tensors
    golden.py         inputs, outputs, caches and gradients of an operation

docs/exchange.md and docs/golden.md show their use. Names are looked up on first use (PEP 562).
"""

from importlib import import_module
from typing import Any

_HOME = {
    "export_checkpoint": "exchange",
    "import_file": "exchange",
    "compare": "compare",
    "Comparison": "compare",
    "golden": "golden",
    "write_golden": "golden",
    "read_tensors": "tensor_files",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
