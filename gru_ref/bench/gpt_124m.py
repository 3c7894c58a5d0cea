"""A training step of GPT-2 124M against plain C loops with OpenMP (benchmarks/gpt2_loops.c of a checkout)."""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gru_ref.bench import _ours
from gru_ref.bench._rows import Row, faster, missing
from gru_ref.bench._settings import Settings
from gru_ref.bench._timing import alternate
from gru_ref.config import ModelConfig
from gru_ref.errors import RunError
from gru_ref.models import LanguageModel
from gru_ref.training.step import MicroBatch, accumulate
from gru_ref.types import Array

LONG = True
BAR = 4.0
B, T = 4, 64
MODEL = ModelConfig(kind="gpt2", layers=12, hidden=768, heads=12, context=1024, vocab_size=50304, tied=True)
PEER = "plain C loops"
SOURCE = Path(__file__).parents[2] / "benchmarks" / "gpt2_loops.c"


def run(settings: Settings) -> list[Row]:
    """One row."""
    work = f"GPT-2 124M step, B {B}, ctx {T}"
    compiler = shutil.which("cc")
    if not (SOURCE.exists() and compiler):
        why = "there is no C compiler" if SOURCE.exists() else "benchmarks/gpt2_loops.c is in a checkout only"
        return [missing(work, f"faster than {PEER}", BAR, why)]
    model = _ours.language_model(MODEL, settings.kernels)
    batch = _ours.random_batch(MODEL, T, B)
    peer = Loops(compiled(compiler), model, batch, settings.threads)
    check_same_gradients(model, batch, peer)
    ours = _ours.Training(model, _ours.ADAMW, batch)
    _ours.check_same_losses(ours, peer.step, work)
    return [faster(work, alternate({"ours": ours, PEER: peer.step}, settings), PEER, BAR)]


def compiled(compiler: str) -> ctypes.CDLL:
    """The loops as a library, which stays loaded after its file is gone.

    Compiled and linked apart: -Ofast at linking would add code that flushes subnormal numbers to zero in
    all of this process, our side included.
    """
    with tempfile.TemporaryDirectory(prefix="gru-ref-bench-") as folder:
        thing, library = str(Path(folder, "loops.o")), str(Path(folder, "loops.so"))
        optimised = ["-Ofast", "-march=native", "-fopenmp", "-fPIC"]
        for command in (
            [compiler, *optimised, "-c", str(SOURCE), "-o", thing],
            [compiler, "-shared", "-fopenmp", thing, "-o", library, "-lm"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise RunError(f"{SOURCE.name} does not compile: {done.stderr.splitlines()[0]}")
        return ctypes.CDLL(library)


class Loops:
    """The C side: a model with the weights of ours, and its step on one batch."""

    def __init__(self, library: ctypes.CDLL, model: LanguageModel, batch: MicroBatch, threads: int) -> None:
        c = model.config
        T, B = batch[0].shape
        self.ids, self.targets = (np.ascontiguousarray(a.T, np.int32) for a in batch)
        self.library, self.t = library, 0
        library.gpt2_new.restype = ctypes.c_void_p
        library.gpt2_gradients.restype = ctypes.c_double
        sizes = (c.layers, c.hidden, c.heads, c.context, c.vocab_size, B, T, threads)
        self.model = ctypes.c_void_p(library.gpt2_new(*sizes))
        self.params, self.grads = (
            self._vector(pointer, model.arena.size) for pointer in (library.gpt2_params, library.gpt2_grads)
        )
        self.params[:] = np.concatenate([value.ravel() for value in model.arena.param.values()])

    def _vector(self, pointer: Any, size: int) -> Array:
        pointer.restype = ctypes.POINTER(ctypes.c_float)
        return np.ctypeslib.as_array(pointer(self.model), (size,))

    def gradients(self) -> float:
        """Forward and backward: the mean loss; `grads` has the gradients in the order of the parameters."""
        ids, targets = (ctypes.c_void_p(a.ctypes.data) for a in (self.ids, self.targets))
        return float(self.library.gpt2_gradients(self.model, ids, targets))

    def step(self) -> float:
        """A whole step: forward, backward, clip, AdamW."""
        loss = self.gradients()
        self.t += 1
        rates = (ctypes.c_float(x) for x in (_ours.LR, _ours.ADAMW.weight_decay, _ours.CLIP_NORM))
        self.library.gpt2_update(self.model, self.t, *rates)
        return loss


def check_same_gradients(model: LanguageModel, batch: MicroBatch, peer: Loops) -> None:
    """Raise RunError where a gradient of the first step differs by more than SAME of its norm."""
    peer.gradients()
    accumulate(model, [batch])
    start = 0
    for name, ours in model.arena.grad.items():
        theirs = peer.grads[start : start + ours.size].reshape(ours.shape)
        start += ours.size
        if not np.linalg.norm(ours - theirs) <= _ours.SAME * np.linalg.norm(ours):
            raise RunError(f"the gradient of {name} is not the same in {SOURCE.name}, so it is no peer")
