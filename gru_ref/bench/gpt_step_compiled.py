"""The same steps of GPT-2, against PyTorch under torch.compile, which needs a C++ compiler and minutes."""

import shutil

from gru_ref.bench import gpt_step
from gru_ref.bench._peer import torch_peers
from gru_ref.bench._rows import Row, missing
from gru_ref.bench._settings import Settings

LONG = True
PEER = "torch.compile"
BAR = 1.6


def run(settings: Settings) -> list[Row]:
    """A row a shape."""
    if torch_peers() and not (shutil.which("g++") or shutil.which("clang++")):
        return [missing("GPT step", f"faster than {PEER}", BAR, "there is no C++ compiler")]
    return [gpt_step.compare(shape, settings, PEER, BAR, compiled=True) for shape in gpt_step.SHAPES]
