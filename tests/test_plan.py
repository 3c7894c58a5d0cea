"""What `--dry-run` predicts, against what a step really allocates."""

import tracemalloc

import numpy as np
import pytest

from gru_ref import Backend, plan
from gru_ref.config import Config, ModelConfig
from gru_ref.kernels.numba_cpu import _workspace
from gru_ref.models import family, gru_lm
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import train_step

GPT2 = {"kind": "gpt2", "context": 64}
SHAPES = {
    "activations dominate": {"layers": 2, "hidden": 64, "vocab_size": 100},
    "logits dominate": {"layers": 1, "hidden": 16, "vocab_size": 1000},
    "the optimizer dominates": {"layers": 1, "hidden": 256, "vocab_size": 100},
    "narrow embedding": {"layers": 3, "hidden": 48, "embedding": 16, "vocab_size": 100},
    "wide embedding": {"layers": 2, "hidden": 32, "embedding": 96, "vocab_size": 100},
    "gpt2": GPT2 | {"layers": 4, "hidden": 64, "heads": 4, "vocab_size": 100, "tied": True},
    "gpt2, logits dominate": GPT2 | {"layers": 2, "hidden": 16, "heads": 1, "vocab_size": 1000},
}


@pytest.fixture(autouse=True)
def small_windows_are_cut_too(monkeypatch):
    monkeypatch.setattr(gru_lm, "SLICE_TOKENS", 128)


@pytest.mark.parametrize("segments", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_predicted_memory_of_a_step_is_what_it_allocates(shape, segments):
    config = Config().replace("model", **shape)
    config = config.replace("train", seq_len=64, batch_size=16, segments=segments)
    if shape["hidden"] == 256:
        config = config.replace("train", seq_len=4, batch_size=1)
    # the second micro-batch must not find the activations of the first
    assert sum(plan.memory(config).values()) == pytest.approx(peak_of_a_step(config, 2), rel=0.05)


def peak_of_a_step(config, micro_batches):
    train, run = config.train, config.run
    inputs = np.zeros((train.seq_len, train.batch_size), np.int64)
    tracemalloc.start()
    model = family(config.model.kind).Model(
        config.model, backend=Backend(run.kernels), precision=run.precision
    )
    model.initialise()
    optimizer = Optimizer(config.optimizer, model.ops)
    for step in range(2):
        if step:
            tracemalloc.reset_peak()  # the first step also imports and compiles
        batches = [(inputs, inputs)] * micro_batches
        train_step(model, optimizer, batches, lr=1e-3, clip_norm=1e-3, segments=train.segments)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


OPTIONS = {
    "plain": {},
    "bf16": {"run": {"precision": "bf16"}},
    "dropout": {"model": {"dropout": 0.2}},
    "accumulation": {"train": {"accumulation": 2}},
    "L2": {"optimizer": {"decoupled": False, "weight_decay": 0.1}, "train": {"seq_len": 4, "batch_size": 4}},
    "few tokens": {"train": {"seq_len": 4, "batch_size": 4}},
    "slices of two lengths": {"train": {"seq_len": 61}},
    "slices of two lengths, 8 segments": {"train": {"seq_len": 61, "segments": 8}},
    "slices of two lengths, 3 segments": {"train": {"seq_len": 63, "segments": 3}},
}


@pytest.mark.parametrize("model", [{"layers": 2, "hidden": 300}, GPT2 | {"layers": 2, "hidden": 320}])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_memory_of_twins_is_predicted_too(model, options, monkeypatch):
    """Where it is not, the twins' own memory, copies that are rounded, or a temporary array was forgotten."""
    config = Config().replace("model", vocab_size=100, **model).replace("run", kernels="numba")
    config = config.replace("train", seq_len=64, batch_size=16)
    for section, values in options.items():
        config = config.replace(section, **values)
    peak_of_a_step(config.replace("model", hidden=16), 1)  # compiles
    monkeypatch.setattr(_workspace, "_free", {})
    predicted = sum(plan.memory(config).values())
    assert predicted == pytest.approx(peak_of_a_step(config, config.train.accumulation), rel=0.05)


@pytest.mark.parametrize("model", [{}, GPT2])
def test_initial_weights_are_drawn_within_a_steps_memory(model):
    """They once took 100 bytes a number of the largest parameter, five times a step's peak."""
    config = ModelConfig(**{"layers": 1, "hidden": 64, "vocab_size": 20_000, "tied": True} | model)
    tracemalloc.start()
    model = family(config.kind).Model(config)
    model.initialise()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * model.arena.size + 4e6


@pytest.mark.parametrize("shape", ["activations dominate", "gpt2"])
def test_more_segments_need_less_memory(shape):
    config = Config().replace("model", **SHAPES[shape]).replace("train", seq_len=64, batch_size=16)
    sizes = [plan.memory(config.replace("train", segments=K)) for K in (1, 2, 4, 8)]
    needs = [size["activations"] + size["workspace"] for size in sizes]
    if shape == "gpt2":  # of 4 layers
        assert needs.pop() == needs[-1]
    assert needs == sorted(set(needs), reverse=True)
    assert needs[-1] < needs[0] / 2


def test_decay_reaches_matrices_only_and_a_tied_matrix_is_one_row():
    config = Config().replace("model", layers=1, hidden=8, vocab_size=100, tied=True)
    decayed = {row.name: row.decayed for row in plan.parameters(config)}
    assert decayed == {
        "embedding.weight": True,
        "gru.0.weight_ih": True,
        "gru.0.weight_hh": True,
        "gru.0.bias_ih": False,
        "gru.0.bias_hh": False,
        "classifier.bias": False,
    }
