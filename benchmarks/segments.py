"""What recomputing activations costs in time and saves in memory: python benchmarks/segments.py [ROUNDS]

One step of a GRU and of a GPT-2 with K = 1, 2, 4 and 8 segments: the median seconds of the steps (and of
the processor, which other work on the machine disturbs less), taken in turns so that a slow minute meets
every K alike, and from a step of its own the peak of what was allocated beside parameters, gradients and
moments. One thread, so that figures of machines compare.
"""

# ruff: noqa: T201 (it prints its figures)
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import platform
import sys
import time
import tracemalloc
from functools import partial

import numpy as np

from gru_ref import Backend, plan
from gru_ref.config import Config, OptimizerConfig
from gru_ref.kernels.numba_cpu import _workspace
from gru_ref.models import family
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import train_step

SEGMENTS = (1, 2, 4, 8)
GPT2 = {"kind": "gpt2", "layers": 8, "hidden": 128, "heads": 4, "context": 128, "tied": True}
MODELS = {  # each is cut into 8 parts at most: a window of 16,384 tokens, 8 blocks
    "GRU, L 2, H 256": ({"layers": 2, "hidden": 256}, {"seq_len": 512, "batch_size": 32}),
    "GPT-2, L 8, C 128": (GPT2, {"seq_len": 128, "batch_size": 32}),
}


def main(rounds: int) -> None:
    """Print one table for each model and backend."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()},", end=" ")
    print(f"NumPy {np.__version__}, {os.environ['OPENBLAS_NUM_THREADS']} BLAS thread(s), {rounds} rounds")
    for name, (shape, batch) in MODELS.items():
        config = Config().replace("model", vocab_size=100, **shape).replace("train", **batch)
        for kernels in ("numpy", "numba"):
            config = config.replace("run", kernels=kernels)
            print(f"\n{name}, T {batch['seq_len']}, B {batch['batch_size']}, {kernels}")
            print("  K  seconds      CPU seconds      peak MB  predicted MB")
            step = stepper(config, kernels)
            for K, times in measure(step, rounds).items():
                shown = "  ".join(f"{seconds:7.3f} {share - 1:+4.0%}" for seconds, share in times)
                sizes = plan.memory(config.replace("train", segments=K))
                predicted = sizes["activations"] + sizes["workspace"]
                print(f"  {K}  {shown}  {peak(partial(step, K)) / 1e6:10.1f} {predicted / 1e6:10.1f}")


def stepper(config: Config, kernels: str):
    """A function of K that makes one training step."""
    model = family(config.model.kind).Model(config.model, backend=Backend(kernels))
    model.initialise()
    optimizer = Optimizer(OptimizerConfig(), model.ops)
    shape = (2, config.train.seq_len, config.train.batch_size)
    batch = tuple(np.random.default_rng(0).integers(0, config.model.vocab_size, shape))
    return lambda K: train_step(model, optimizer, [batch], lr=1e-3, segments=K)


def measure(step, rounds: int) -> dict[int, list[tuple[float, float]]]:
    """For each K, of wall and of processor: median seconds of a step, median share of K = 1 in its round."""
    taken = {K: [] for K in SEGMENTS}
    for _ in range(rounds + 1):
        for K, times in taken.items():
            start = np.array([time.perf_counter(), time.process_time()])
            step(K)
            times.append(np.array([time.perf_counter(), time.process_time()]) - start)
    seconds = {K: np.array(times[1:]) for K, times in taken.items()}  # the first round compiles
    medians = {K: (np.median(t, axis=0), np.median(t / seconds[1], axis=0)) for K, t in seconds.items()}
    return {K: list(zip(*pair, strict=True)) for K, pair in medians.items()}


def peak(step) -> int:
    """Bytes that a step holds at most beyond what was there before; no memory of an earlier step serves."""
    _workspace._free.clear()
    tracemalloc.start()
    step()
    bytes_at_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return bytes_at_peak


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
