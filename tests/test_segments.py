"""Activations computed again in K segments change no bit of a loss, a gradient or a run (N02, N10)."""

import dataclasses
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from gru_ref.backend import KERNEL_FOLDERS, Backend
from gru_ref.checkpoint import load_checkpoint, save_checkpoint
from gru_ref.config import ModelConfig
from gru_ref.data.windows import Windows
from gru_ref.gradient_check import gradcheck
from gru_ref.kernels.numba_cpu import _recurrence, _workspace
from gru_ref.models import family, gru_lm, split_evenly
from gru_ref.models.gru_lm import GRULM
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.training import resume, train
from gru_ref.training.evaluation import evaluate
from gru_ref.training.step import accumulate

T, B, V = 19, 3, 11
GRU = ModelConfig(layers=2, hidden=10, embedding=6, vocab_size=V, dropout=0.5)
MODELS = {
    "gru": GRU,
    "gru, form of 2014, tied": dataclasses.replace(GRU, embedding=0, tied=True, reset_after=False),
    "gru without dropout": dataclasses.replace(GRU, dropout=0.0),
    "gpt2": ModelConfig(kind="gpt2", layers=5, hidden=8, heads=2, context=T, vocab_size=V, dropout=0.5),
    "gpt2 without dropout": ModelConfig(
        kind="gpt2", layers=5, hidden=8, heads=2, context=T, vocab_size=V, tied=True
    ),
}


@pytest.fixture(autouse=True)
def small_windows_are_cut_too(monkeypatch):
    monkeypatch.setattr(gru_lm, "SLICE_TOKENS", 1)


def build(config, **options):
    model = family(config.kind).Model(config, seed=7, **options)
    model.initialise()
    return model


def gradients(model, segments):
    """Loss, state and gradients of two micro-batches, from a carried state where there is one."""
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(0, V, (2, T, 2 * B))
    targets[3, 1] = IGNORE
    state = None
    if model.config.kind == "gru-lm":
        state = rng.standard_normal((model.config.layers, 2 * B, model.config.hidden))
        state = state.astype(model.arena.dtype)
    halves = [(ids[:, half], targets[:, half]) for half in (slice(0, B), slice(B, 2 * B))]
    model.arena.grads[...] = 0
    loss, _, state = accumulate(model, halves, micro_step=4, state=state, segments=segments)
    return loss, state, model.arena.grads.copy()


def same(a, b):
    return a[0] == b[0] and np.array_equal(a[2], b[2]) and (a[1] is None or np.array_equal(a[1], b[1]))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize("name", MODELS)
def test_loss_state_and_every_gradient_are_the_same_bits_for_every_number_of_segments(
    name, backend, precision
):
    """N10: K = 20 is more than there are slices or layers."""
    model = build(MODELS[name], backend=Backend(backend), precision=precision)
    whole = gradients(model, 1)
    assert all(view.any() for view in model.arena.grad.values())
    for segments in (2, 3, 8, 20):
        assert same(gradients(model, segments), whole), segments


def test_slices_whose_first_products_are_over_the_vocabulary_change_no_bit_either(monkeypatch):
    """A twin's choice, which segments must not change: 27 or 30 tokens a slice, 11 in the vocabulary."""
    monkeypatch.setattr(gru_lm, "TIME_SLICES", 2)
    model, steps = build(GRU, backend=Backend("numba")), []
    right = _recurrence.steps
    monkeypatch.setattr(
        _recurrence, "steps", lambda gates, *rest: steps.append(len(gates)) or right(gates, *rest)
    )
    whole = gradients(model, 1)
    assert steps[::2] == 4 * [V]
    assert same(gradients(model, 2), whole)


@pytest.mark.parametrize("name", ["gru", "gpt2"])
def test_a_recomputation_that_draws_another_mask_would_be_seen(name):
    """The fault of N10: dropout from a generator's state."""
    model = build(MODELS[name])
    dropout, drawn = model.ops.dropout, []

    def forward(x, p, *, seed, step, layer, start=0):
        drawn.append(start)
        again = drawn.count(start) if name == "gru" else len(drawn)
        return dropout.forward(x, p, seed=seed, step=step + 100 * again, layer=layer, start=start)

    whole = gradients(model, 1)
    model.ops.dropout = SimpleNamespace(**vars(dropout) | {"forward": forward})
    assert not same(gradients(model, 2), whole)


def test_slices_that_depended_on_the_segments_would_be_seen(monkeypatch):
    """Why a window that is not recomputed has slices too: whole, it sums in another order."""
    model = build(GRU)
    sliced = gradients(model, 8)
    monkeypatch.setattr(gru_lm, "TIME_SLICES", 1)
    assert not same(gradients(model, 1), sliced)


@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
def test_slices_are_exact_and_truncate_nothing(monkeypatch, backend):
    """N02: the window in one piece has the same gradients, masks included, but for rounding."""
    model = build(GRU, backend=Backend(backend), dtype=np.float64)
    sliced = gradients(model, 3)
    monkeypatch.setattr(gru_lm, "TIME_SLICES", 1)
    whole = gradients(model, 1)
    assert sliced[0] == pytest.approx(whole[0], rel=1e-14)
    np.testing.assert_allclose(sliced[2], whole[2], rtol=0, atol=1e-15)
    np.testing.assert_allclose(sliced[1], whole[1], rtol=0, atol=1e-14)


def test_a_slice_that_keeps_the_gradient_of_its_state_to_itself_is_caught(monkeypatch):
    """N02: the gradient of the state before a slice is that of the state after the one before it."""
    right = GRULM._layers_backward
    monkeypatch.setattr(
        GRULM, "_layers_backward", lambda self, dx, dstate, caches: right(self, dx, None, caches)
    )
    wrong = {result.input for result in gradcheck("gru-lm") if not result.ok}
    assert {"gru.0.weight_hh", "gru.1.weight_ih", "embedding.weight"} <= wrong


@pytest.mark.parametrize("segments", [1, 2, 3, 8, 20])
@pytest.mark.parametrize(
    ("name", "op", "parts"), [("gru", "embedded_gru", 8), ("gru", "gru", 8), ("gpt2", "attention_blocked", 5)]
)
def test_all_but_the_last_segment_are_computed_once_more(name, op, parts, segments):
    model = build(MODELS[name])
    functions, calls = getattr(model.ops, op), []

    def forward(*args, **options):
        calls.append(op)
        return functions.forward(*args, **options)

    setattr(model.ops, op, SimpleNamespace(**vars(functions) | {"forward": forward}))
    gradients(model, segments)
    again = parts - len(split_evenly(parts, segments)[-1])
    layers = model.config.layers - 1 if op == "gru" else 1
    assert len(calls) == 2 * layers * (parts + again)


@pytest.mark.parametrize("name", ["gru", "gpt2"])
@pytest.mark.parametrize("segments", [1, 3])
def test_a_cache_serves_once(name, segments):
    """Its activations are gone; in silence the second gradient would lack every layer."""
    model = build(MODELS[name])
    logits, _, cache = model.forward(np.zeros((T, B), np.int64), segments=segments)
    model.backward(logits, cache)
    once = model.arena.grads.copy()
    with pytest.raises(ValueError, match="this cache has served already"):
        model.backward(logits, cache)
    assert np.array_equal(model.arena.grads, once)


@pytest.mark.parametrize("segments", [1, 3])
def test_a_cache_holds_one_rounded_copy_of_the_weights_and_not_one_a_slice(segments):
    model = build(GRU, precision="bf16")
    _, _, (weights, _, _, kept, _) = model.forward(np.zeros((T, B), np.int64), segments=segments)
    caches = [gru_cache for *_, slices in kept for layers in slices for gru_cache, _ in layers]
    assert len(caches) == {1: 8, 3: 3}[segments] * 2
    for i, cache in enumerate(caches):
        assert cache[6] is weights[i % 2][0]
        assert cache[7] is weights[i % 2][1]


def test_segments_are_contiguous_and_the_last_is_the_longest():
    for n in range(1, 40):
        for parts in range(1, 45):
            ranges = split_evenly(n, parts)
            assert [i for part in ranges for i in part] == list(range(n))
            lengths = list(map(len, ranges))
            assert len(lengths) == min(n, parts)
            assert max(lengths) - min(lengths) <= 1
            assert lengths[-1] == max(lengths)


RUNS = {
    "gru": {"model.layers": 2, "train.carry_state": True},
    "gpt2": {"model.kind": "gpt2", "model.layers": 3, "model.heads": 2},
}


@pytest.mark.parametrize("kernels", KERNEL_FOLDERS)
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_in_segments_ends_with_the_checkpoint_of_one_without(
    tiny, tmp_path, kind, kernels, short_samples
):
    """N10: 5 steps with dropout .5, seed 7, and two micro-batches a step; one run changes K on resume."""
    options = {"train.steps": 5, "train.seed": 7, "train.accumulation": 2, "model.dropout": 0.5}
    options |= RUNS[kind] | {"run.kernels": kernels}
    train(tiny(options), tmp_path / "1")
    train(tiny(options | {"train.segments": 8}), tmp_path / "8", stop_at=3)
    resume(tmp_path / "8", changes={"train.segments": 2})
    ends = [load_checkpoint(tmp_path / run / "checkpoints/step-00000005.h5") for run in ("1", "8")]
    assert ends[1].config == ends[0].config.replace("train", segments=2)
    for name, end in zip(("a.h5", "b.h5"), ends, strict=True):
        save_checkpoint(tmp_path / name, dataclasses.replace(end, config=ends[0].config))
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()


@pytest.mark.parametrize(
    ("T", "B", "slices"), [(1, 10**6, 1), (64, 63, 1), (64, 64, 2), (128, 64, 4), (1024, 128, 8)]
)
def test_slices_have_at_least_two_thousand_tokens_and_are_at_most_eight(T, B, slices, monkeypatch):
    monkeypatch.undo()
    assert gru_lm.time_slices(T, B) == slices


@pytest.mark.parametrize("name", ["gru", "gpt2"])
def test_no_segments_at_all_is_an_error_that_says_so(name):
    with pytest.raises(ValueError, match="segments must be at least 1, not 0"):
        build(MODELS[name]).forward(np.zeros((4, 2), np.int64), segments=0)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
@pytest.mark.parametrize("name", ["gru without dropout", "gpt2 without dropout"])
def test_an_evaluation_needs_no_more_memory_than_a_step_in_as_many_segments_as_there_are(name, kernels):
    """Else a run that fits thanks to its segments would end at its first validation."""
    T, B = 128, 16
    config = dataclasses.replace(MODELS[name], hidden=64, context=T if "gpt2" in name else 0, layers=4)
    model = build(config, backend=Backend(kernels))
    windows = Windows(np.random.default_rng(0).integers(0, V, 4 * B * T + 1), T, seed=1)
    evaluate(model, windows, batch_size=B, max_tokens=T)  # compiles
    _workspace._free.clear()
    tracemalloc.start()
    evaluate(model, windows, batch_size=B)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * family(config.kind).activation_floats(config, T, B, 2**16, kernels == "numba")
