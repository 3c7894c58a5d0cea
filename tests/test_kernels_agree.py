"""A run with the compiled twins beside the same run with the definitions: `--kernels numba` and `numpy`."""

import sys

import numpy as np
import pytest

from gru_ref import threads
from gru_ref.kernels.numba_cpu import _workspace
from gru_ref.training.loop import train
from gru_ref.training.trainer import Trainer
from gru_ref.training.warm_up import warm_up

MODELS = {
    "gru-lm": {"model.layers": 2, "model.hidden": 24},
    "gpt2": {"model.kind": "gpt2", "model.layers": 2, "model.hidden": 24, "model.heads": 2},
}
STEPS = 200


def losses(config):
    trainer = Trainer.start(config)
    return [trainer.advance()[0]["loss"] for _ in range(STEPS)], trainer.model.arena.params.copy()


@pytest.mark.parametrize("kind", MODELS)
def test_the_losses_of_200_steps_agree_to_1e_5(kind, tiny):
    options = MODELS[kind] | {
        "train.steps": STEPS,
        "train.batch_size": 4,
        "train.seq_len": 12,
        "schedule.lr": 2e-3,
    }
    (plain, start), (fast, end) = (losses(tiny(options | {"run.kernels": k})) for k in ("numpy", "numba"))
    assert max(abs(a - b) for a, b in zip(plain, fast, strict=True)) <= 1e-5
    assert plain[-1] < plain[0] - 1  # it did learn
    assert not np.array_equal(start, end)  # and they are not the same functions


def test_a_run_says_once_that_it_compiles_and_a_second_one_does_not(
    tiny, tmp_path, monkeypatch, short_samples
):
    """The cold start is a step of its own; nothing of it is in the run's own logs."""
    from gru_ref.kernels.numba_cpu import _compile
    from gru_ref.kernels.numba_cpu import embedding as twin

    fresh = _compile.Kernel(twin._add_rows.function, twin._add_rows.signature, ())
    monkeypatch.setattr(twin, "_add_rows", fresh)
    monkeypatch.setattr(_compile._config, "CACHE_DIR", str(tmp_path / "cache"))
    events = []
    config = tiny({"run.kernels": "numba"})
    train(config, out=tmp_path / "run", observer=events.append)
    kinds = [event["event"] for event in events]
    assert kinds[:3] == ["start", "compiling", "compiled"]
    assert events[2]["kernels"] >= 1
    assert "compil" not in (tmp_path / "run" / "events.jsonl").read_text()
    assert warm_up(config, lambda: pytest.fail("compiled again")) == 0
    assert warm_up(tiny(), lambda: pytest.fail("the definitions compile nothing")) == 0


@pytest.mark.parametrize("kind", MODELS)
def test_a_run_with_twins_gives_the_same_bytes_twice(kind, tiny):
    config = tiny(MODELS[kind] | {"run.kernels": "numba", "train.batch_size": 8, "model.dropout": 0.1})
    runs = []
    for _ in range(2):
        with threads.limited(2):
            trainer = Trainer.start(config)
            rows = [trainer.advance()[0]["loss"] for _ in range(5)]
        runs.append((rows, trainer.model.arena.params.tobytes()))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kind", MODELS)
def test_a_step_after_the_first_ones_asks_for_no_large_memory(kind, tiny, monkeypatch):
    """The twins' arrays take the memory of the step before; what the models add by NumPy is small here."""
    options = {"train.batch_size": 16, "train.seq_len": 48, "model.hidden": 64, "run.kernels": "numba"}
    trainer = Trainer.start(tiny(MODELS[kind] | options | {"data.val_fraction": 0.0}))
    large, seen = [], _workspace.empty
    for module in [m for name, m in sys.modules.items() if name.startswith("gru_ref.kernels.numba_cpu.")]:
        if hasattr(module, "empty"):
            monkeypatch.setattr(module, "empty", lambda *a: large.append(a) or seen(*a))
    for _ in range(3):
        trainer.advance()
    assert len(large) > 10
    monkeypatch.setattr(_workspace, "_return_what_is_old", lambda: pytest.fail("more memory was asked for"))
    trainer.advance()
