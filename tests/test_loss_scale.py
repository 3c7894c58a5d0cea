"""The loss scale of fp16: exact where nothing overflows, found where something does, and state (N09)."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from gru_ref import GPT2, GRULM, verify_checkpoint
from gru_ref import config as configuration
from gru_ref.checkpoint import load_checkpoint, save_checkpoint
from gru_ref.config import ModelConfig, OptimizerConfig
from gru_ref.errors import CheckpointError, RunError
from gru_ref.ops import cross_entropy
from gru_ref.training import resume, train
from gru_ref.training.loss_scale import MAX_SCALE, LossScale
from gru_ref.training.optimizer import Optimizer
from gru_ref.training.step import train_step
from gru_ref.training.trainer import Trainer

MODELS = {
    GPT2: ModelConfig(
        kind="gpt2", layers=2, hidden=8, heads=2, context=6, vocab_size=11, tied=True, dropout=0.2
    ),
    GRULM: ModelConfig(layers=2, hidden=8, vocab_size=11, dropout=0.2),
}


def build(family, precision="fp16"):
    model = family(MODELS[family], precision=precision)
    model.initialise()
    return model, Optimizer(OptimizerConfig(name="adamw", weight_decay=0.1), model.ops)


def batches(B=4):
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 11, (2, 6, B))
    return [(ids[:, : B // 2], targets[:, : B // 2]), (ids[:, B // 2 :], targets[:, B // 2 :])]


def scale(value, growth_steps=1000):
    return LossScale(value, growth_steps)


def state(model, optimizer):
    arena = model.arena
    return [arena.params.tobytes(), arena.m.tobytes(), arena.v.tobytes(), optimizer.t]


# --- the step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", MODELS)
def test_the_update_does_not_depend_on_the_scale(family, precision):
    """N09: 2⁰ … 2¹⁵, over steps of which one doubles it; to the last bit, clipped after unscaling."""
    results = set()
    for exponent in range(16):
        model, optimizer = build(family, precision)
        loss_scale = scale(2.0**exponent, growth_steps=2)
        norms = []
        for step in range(3):
            result = train_step(
                model,
                optimizer,
                batches(),
                lr=1e-2,
                clip_norm=0.1,
                micro_step=2 * step,
                loss_scale=loss_scale,
            )
            norms.append(result.grad_norm)
        assert (loss_scale.value, loss_scale.good_steps) == (2.0 ** (exponent + 1), 1)
        assert min(norms) > 0.1
        results.add((*state(model, optimizer), *norms))
    model, optimizer = build(family, precision)
    for step in range(3):
        train_step(model, optimizer, batches(), lr=1e-2, clip_norm=0.1, micro_step=2 * step)
    assert {result[:4] for result in results} == {tuple(state(model, optimizer))}
    assert len(results) == 1


@pytest.mark.parametrize("family", MODELS)
def test_a_scale_keeps_gradients_that_fp16_would_lose(family):
    """Of a loss as small as that of a token among 400,000: without a scale most are rounded to 0."""

    def gradient(precision, value):
        model, optimizer = build(family, precision)
        model.ops.cross_entropy = SimpleNamespace(
            forward=cross_entropy.forward,
            backward=lambda dloss, cache: cross_entropy.backward(dloss / np.float32(2**14), cache),
        )
        train_step(model, optimizer, batches(), lr=0.0, loss_scale=scale(value))
        return model.arena.grads

    exact = gradient("fp32", 1.0)
    error = {value: np.linalg.norm(gradient("fp16", value) - exact) for value in (1.0, 2.0**14)}
    assert error[2.0**14] < 0.01 * np.linalg.norm(exact)
    assert error[1.0] > 5 * error[2.0**14]


@pytest.mark.parametrize("family", MODELS)
def test_an_overflow_skips_the_step_and_halves_the_scale(family):
    """N09: weights, moments and the step count stay; the loss itself was finite."""
    model, optimizer = build(family)
    loss_scale = scale(2.0**24)
    train_step(model, optimizer, batches(), lr=1e-2, loss_scale=scale(2.0**8))
    before = state(model, optimizer)
    result = train_step(model, optimizer, batches(), lr=1e-2, clip_norm=1.0, loss_scale=loss_scale)
    assert np.isfinite(result.loss)
    assert not np.isfinite(result.grad_norm)
    assert result.nonfinite.startswith("gradient of ")
    assert result.loss_scale_lowered
    assert (loss_scale.value, loss_scale.good_steps) == (2.0**23, 0)
    assert state(model, optimizer) == before
    while train_step(model, optimizer, batches(), lr=1e-2, loss_scale=loss_scale).nonfinite:
        pass
    assert 1 < loss_scale.value < 2.0**23
    assert loss_scale.good_steps == 1


def test_a_loss_that_is_not_finite_is_not_the_scales_doing():
    model, optimizer = build(GPT2)
    model.arena.param["ln_f.bias"][0] = np.nan
    loss_scale = scale(64.0)
    result = train_step(model, optimizer, batches(), lr=1e-2, loss_scale=loss_scale)
    assert (result.nonfinite, result.loss_scale_lowered) == ("parameter ln_f.bias", False)
    assert loss_scale.value == 64


def test_the_scale_doubles_after_enough_good_steps_and_has_two_ends():
    loss_scale = scale(MAX_SCALE / 2, growth_steps=3)
    seen = []
    for _ in range(7):
        loss_scale.good_step()
        seen.append((loss_scale.value, loss_scale.good_steps))
    half = MAX_SCALE / 2
    assert seen == [(half, 1), (half, 2), (MAX_SCALE, 0)] + [(MAX_SCALE, n) for n in (1, 2, 0, 1)]
    assert loss_scale.overflow()
    assert (loss_scale.value, loss_scale.good_steps) == (half, 0)
    least = scale(2.0)
    assert least.overflow()
    assert not least.overflow()
    assert least.value == 1


# --- the run ------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer.sample, "__defaults__", (5,))
    (tmp_path / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog.\n" * 20)

    def make(kind="gpt2", **changes):
        model = {"kind": kind, "layers": 1, "hidden": 8, "embedding": 0}
        model |= {"heads": 2, "tied": True} if kind == "gpt2" else {}
        options = {
            **{f"model.{key}": value for key, value in model.items()},
            "data.files": [str(tmp_path / "text.txt")],
            "data.val_fraction": 0,
            "run.precision": "fp16",
            "run.threads": 1,
            "train.batch_size": 2,
            "train.checkpoint_every": 0,
            "train.eval_every": 0,
            "train.loss_scale": MAX_SCALE,
            "train.loss_scale_growth": 3,
            "train.max_skipped": 2,
            "train.seq_len": 8,
            "train.steps": 8,
        }
        return configuration.load(options=options | {k.replace("__", "."): v for k, v in changes.items()})

    return make


def checkpoint_at(run, step):
    return run / "checkpoints" / f"step-{step:08d}.h5"


def rows(run, name="metrics"):
    volatile = {"seconds", "tokens_per_second"}
    lines = (run / f"{name}.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in volatile} for line in lines]


def skipped(run):
    """The loss scale that each skipped step left, None where it did not lower it."""
    return [row["loss_scale"] for row in rows(run, "events") if row["event"] == "skipped"]


@pytest.mark.parametrize("kind", ["gpt2", "gru-lm"])
def test_a_run_finds_its_scale_however_many_steps_it_takes(tiny, tmp_path, kind):
    """More of them in a row than `max_skipped`, which is for steps that the scale does not explain."""
    result = train(tiny(kind), tmp_path / "run")
    assert (result.step, result.finished) == (8, True)
    lowered = skipped(tmp_path / "run")
    assert lowered[:3] == [MAX_SCALE / 2, MAX_SCALE / 4, MAX_SCALE / 8]
    done = [row for row in rows(tmp_path / "run") if row["grad_norm"] is not None]
    assert [row["step"] for row in done] == list(range(1, 9))
    assert done[0]["loss_scale"] <= MAX_SCALE / 8
    scalars = load_checkpoint(result.checkpoint).trainer
    assert (scalars["skipped"], scalars["skipped_in_a_row"]) == (len(lowered), 0)


@pytest.mark.parametrize("kind", ["gpt2", "gru-lm"])
def test_a_row_says_what_a_checkpoint_after_its_step_holds(tiny, tmp_path, kind):
    """Before the scale grows, after it has, and behind skipped steps; one row a step, all the same."""
    run = train(tiny(kind, train__checkpoint_every=1), tmp_path / "run").path
    metrics = rows(run)
    assert [row["step"] for row in metrics] == list(range(1, 9))
    for row in metrics:
        scalars = load_checkpoint(checkpoint_at(run, row["step"])).trainer
        for key in ("step", "tokens", "skipped", "loss_scale", "loss_scale_good_steps"):
            assert row[key] == scalars[key]
    assert {row["loss_scale_good_steps"] for row in metrics} == {0, 1, 2}
    events = [row for row in rows(run, "events") if row["event"] == "skipped"]
    assert [event["skipped"] for event in events] == list(range(1, metrics[-1]["skipped"] + 1))
    assert events


@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_the_scale_its_counter_and_the_skips_are_gone_on_with(tiny, tmp_path, stop):
    """R01: doubled every 3 steps, so each stop is at another count; the next overflow comes as before."""
    config = tiny(train__loss_scale=2.0**17, train__checkpoint_every=1)
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(config, straight)
    train(config, run, stop_at=stop)
    assert resume(run).finished
    states = set()
    for step in range(9):
        assert checkpoint_at(run, step).read_bytes() == checkpoint_at(straight, step).read_bytes()
        scalars = load_checkpoint(checkpoint_at(run, step)).trainer
        states.add((scalars["loss_scale"], scalars["loss_scale_good_steps"], scalars["skipped"]))
    assert len(states) >= 6
    assert rows(run) == rows(straight)
    assert skipped(run) == skipped(straight) != []


def test_a_run_that_is_really_not_finite_ends(tiny, tmp_path, monkeypatch):
    """An infinite gradient whatever the scale: halved down to 1, and then counted."""
    backward = GPT2.backward

    def infinite(self, dlogits, cache):
        backward(self, dlogits, cache)
        self.arena.grad["ln_f.weight"][0] = np.inf

    monkeypatch.setattr(GPT2, "backward", infinite)
    with pytest.raises(RunError, match=r"steps in a row were not finite .last: gradient of ln_f\.weight"):
        train(tiny(train__loss_scale=8.0), tmp_path / "run")
    assert skipped(tmp_path / "run") == [4, 2, 1, None]
    last = rows(tmp_path / "run", "events")[-1]
    assert (last["event"], last["step"], last["skipped"], last["loss_scale"]) == ("failed", 0, 4, 1)
    assert last["reason"] == "4 steps in a row were not finite (last: gradient of ln_f.weight)"


def test_the_precision_may_change_on_resume_and_the_scale_comes_and_goes_with_it(tiny, tmp_path):
    train(tiny(train__loss_scale=4.0), tmp_path / "run", stop_at=2)
    resume(tmp_path / "run", changes={"run.precision": "bf16"}, override=True, stop_at=4)
    assert "loss_scale" not in load_checkpoint(checkpoint_at(tmp_path / "run", 4)).trainer
    resume(tmp_path / "run", changes={"run.precision": "fp16"}, override=True, stop_at=5)
    scalars = load_checkpoint(checkpoint_at(tmp_path / "run", 5)).trainer
    assert (scalars["loss_scale"], scalars["loss_scale_good_steps"]) == (4.0, 1)
    assert ["loss_scale" in row for row in rows(tmp_path / "run")] == [True] * 2 + [False] * 2 + [True]


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"loss_scale": None}, "/trainer/loss_scale: missing"),
        ({"loss_scale_good_steps": None}, "/trainer/loss_scale_good_steps: missing"),
        ({"loss_scale": 3.0}, "expected a power of two"),
        ({"loss_scale": 0.5}, "expected a power of two"),
        ({"loss_scale": np.inf}, "expected a finite number"),
        ({"loss_scale_good_steps": -1}, "expected at least 0"),
    ],
)
def test_a_checkpoint_with_another_scale_is_refused(tiny, tmp_path, scalars, message):
    train(tiny(train__loss_scale=4.0, train__steps=1), tmp_path / "run")
    checkpoint = load_checkpoint(checkpoint_at(tmp_path / "run", 1))
    changed = {k: v for k, v in (checkpoint.trainer | scalars).items() if v is not None}
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "broken.h5", dataclasses.replace(checkpoint, trainer=changed))
    in_fp32 = dataclasses.replace(checkpoint, config=checkpoint.config.replace("run", precision="fp32"))
    with pytest.raises(CheckpointError, match=r"/trainer/loss_scale.*not explained by the config"):
        save_checkpoint(tmp_path / "broken.h5", in_fp32)
    assert verify_checkpoint(checkpoint_at(tmp_path / "run", 1)).problems == []
