"""The figures of gru_ref/plan: FLOPs by hand, bytes, GPUs, what fits, and how a step's time is predicted."""

import itertools
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from gru_ref import config as configuration
from gru_ref import plan
from gru_ref.config import Config
from gru_ref.errors import ConfigError
from gru_ref.models import family, gru_lm
from gru_ref.plan import speed
from gru_ref.training.trainer import Trainer

GRU_RUN = configuration.load(preset="gru-l3-v3a", options={"model.vocab_size": 100})


@pytest.fixture(autouse=True)
def small_windows_are_cut_too(monkeypatch):
    monkeypatch.setattr(gru_lm, "SLICE_TOKENS", 1)


def gru(**model):
    return Config().replace("model", **{"layers": 2, "hidden": 3, "embedding": 2, "vocab_size": 5} | model)


def gpt2(**model):
    shape = {"kind": "gpt2", "layers": 2, "hidden": 4, "heads": 2, "context": 8, "vocab_size": 5} | model
    return Config().replace("model", **shape).replace("train", seq_len=8)


def total(config):
    return sum(plan.memory(config).values())


# FLOPs


def test_flops_of_a_gru_are_six_for_each_weight_in_a_product():
    assert plan.flops_per_token(gru()) == {
        "products with the input": 6 * (9 * 2 + 9 * 3),
        "products with the state": 6 * (9 * 3 + 9 * 3),
        "classifier": 6 * 5 * 3,
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_table_that_is_only_looked_up_does_not_count_and_a_tied_one_counts_once(tied):
    config = gru(embedding=3, vocab_padding=4, tied=tied)
    assert plan.flops_per_token(config)["classifier"] == 6 * 8 * 3


def test_flops_of_gpt2_have_attention_and_no_positions():
    assert plan.flops_per_token(gpt2(tied=True)) == {
        "classifier": 6 * 5 * 4,
        "products of the blocks": 6 * 2 * 12 * 4 * 4,
        "attention": 6 * 2 * 4 * 8,
    }


def test_segments_are_not_counted_as_flops():
    assert plan.flops_per_token(gru()) == plan.flops_per_token(gru().replace("train", segments=4))


@pytest.mark.parametrize(
    ("preset", "tokens_per_second", "peak", "percent"),
    [
        ("gru-l3-v3a", 17_666, 91.6e12, 8.8),
        ("gpt-16m", 39_000, 111e12, 3.5),
        ("gpt2-124m", 19_000, 111e12, 13.0),
    ],
)
def test_the_formula_gives_the_shares_that_the_public_runs_report(preset, tokens_per_second, peak, percent):
    config = configuration.load(preset=preset)
    config = config.replace("model", vocab_size=config.model.vocab_size or 100)
    share = tokens_per_second * sum(plan.flops_per_token(config).values()) / peak
    assert 100 * share == pytest.approx(percent, abs=0.1)


# Bytes


@pytest.mark.parametrize(
    ("preset", "megabytes"), [("gpt-16m", (64.4, 193.3)), ("gpt2-124m", (495.6, 1486.8))]
)
def test_checkpoints_have_the_sizes_that_the_public_runs_report(preset, megabytes):
    """Theirs are of whole files, up to 0.2 MB above the numbers in them."""
    sizes = plan.checkpoint_bytes(configuration.load(preset=preset))
    for n, reported in zip(sizes, megabytes, strict=True):
        assert -0.05 <= reported - n / 1e6 < 0.2


def test_the_checkpoint_of_the_gru_run_is_869_mib():
    assert plan.checkpoint_bytes(GRU_RUN) == (4 * 75_944_036, 12 * 75_944_036)
    assert round(plan.checkpoint_bytes(GRU_RUN)[1] / 2**20) == 869


@pytest.mark.parametrize("carry_state", [False, True])
def test_a_real_checkpoint_has_those_numbers(tiny, carry_state):
    trainer = Trainer.start(tiny({"train.carry_state": carry_state, "train.accumulation": 2}))
    sizes = []
    for _ in range(2):
        checkpoint = trainer.checkpoint()
        arrays = [*checkpoint.model.values(), *(a for m in checkpoint.moments.values() for a in m.values())]
        arrays += [] if checkpoint.hidden is None else [checkpoint.hidden]
        sizes.append(sum(array.nbytes for array in arrays))
        trainer.advance()
    assert tuple(sizes) == plan.checkpoint_bytes(trainer.config)


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("config", [gru(hidden=64, embedding=32), gpt2(hidden=64, layers=4, context=64)])
def test_activations_are_what_forward_keeps(config, segments):
    config = config.replace("train", seq_len=64, batch_size=16, segments=segments)
    model = family(config.model.kind).Model(config.model)
    ids = np.zeros((64, 16), np.int64)
    model.forward(ids, dropout_step=0, segments=segments)  # imports
    tracemalloc.start()
    logits, _, cache = model.forward(ids, dropout_step=0, segments=segments)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cache
    assert plan.memory(config)["activations"] == pytest.approx(kept - logits.nbytes, rel=0.06)


def test_the_gru_run_keeps_fifteen_arrays_and_the_last_layers_output():
    array = 4 * 1024 * 128 * 2048
    states = 4 * 128 * 2048 * 3 * (8 + 1)  # of 3 layers before each of 8 slices, and before the segment
    assert plan.memory(GRU_RUN)["activations"] == (5 * 3 + 1) * array + states


# GPUs


@pytest.mark.parametrize("gpu", plan.DEVICES, ids=lambda gpu: gpu.name)
def test_every_gpu_has_plausible_figures(gpu):
    assert 4 <= gpu.memory <= 512
    assert 100 <= gpu.bandwidth <= 10_000
    peaks = [gpu.peak[p] for p in ("fp32", "tf32", "fp16", "bf16") if p in gpu.peak]
    assert peaks == sorted(peaks)
    assert peaks[0] == gpu.peak["fp32"] > 1
    assert gpu.peak.get("bf16", gpu.peak.get("fp16")) == gpu.peak.get("fp16")
    assert plan.device(gpu.name.upper().replace("-", " ")) is gpu


def test_the_gpu_of_the_write_up():
    gpu = plan.device("l40s")
    assert (gpu.memory, gpu.bandwidth, gpu.flops_per_second("fp32")) == (48, 864, 91.6e12)


@pytest.mark.parametrize(
    ("name", "hint"), [("L40X", "did you mean l40 or l40s"), ("abacus", "known: here, t4, v100-16gb")]
)
def test_an_unknown_gpu_is_refused_with_near_names(name, hint):
    with pytest.raises(ConfigError, match=f"unknown device '{name}'; {hint}"):
        plan.device(name)


def test_a_precision_without_a_peak_is_refused():
    with pytest.raises(ConfigError, match="T4 has no listed peak for bf16; it has fp32, fp16"):
        plan.device("t4").flops_per_second("bf16")


# What fits


def test_the_largest_batch_fits_and_one_more_does_not():
    config = gru(hidden=32).replace("train", batch_size=4)
    rows = plan.fits(config, 10_000_000)
    assert [row.segments for row in rows] == [1, 2, 4, 8]
    for row in rows:
        config = config.replace("train", segments=row.segments, batch_size=4)
        largest, more = (config.replace("train", batch_size=row.largest_batch + i) for i in (0, 1))
        assert total(largest) <= 10_000_000 < total(more)
        assert row.bytes == total(config)
        assert row.fits == (row.bytes <= 10_000_000)


@pytest.mark.parametrize(
    ("config", "choices"),
    [
        (gpt2(layers=12), [1, 2, 4, 8, 12]),
        (gpt2(layers=12).replace("train", segments=5), [1, 2, 4, 5, 8, 12]),
        (gru().replace("train", seq_len=3), [1, 2, 3]),
        (gru().replace("train", segments=100), [1, 2, 4, 8]),
    ],
)
def test_segments_are_offered_up_to_what_the_model_can_cut(config, choices):
    assert [row.segments for row in plan.fits(config, 1e12)] == choices


def verdict(config, capacity):
    gpu = plan.Device("small", capacity / 0.9 / 2**30, 1, {"fp32": 1})
    return plan.summary(config, 1, gpu=gpu)["verdict"]


def test_the_verdict_says_which_segments_or_batch_would_fit():
    config = gru(hidden=32).replace("train", batch_size=64)
    needs = {row.segments: row.bytes for row in plan.fits(config, 1)}
    assert verdict(config, needs[1] + 1) == "fits"
    assert verdict(config, needs[4] + 1).startswith("does not fit: K=4 or batch ")
    assert verdict(config, needs[8] / 2).startswith("does not fit: batch ")
    assert verdict(config, 4000) == "does not fit: no K and no batch would"


# Time


def test_a_step_on_a_gpu_is_products_and_traffic():
    config = gru().replace("train", accumulation=2)
    sizes, n = plan.memory(config), sum(row.count for row in plan.parameters(config))
    predicted = plan.predict_on(config, plan.Device("x", 1, 2.0, {"fp32": 3.0}), "fp32", share=0.5)
    tokens = 2 * 32 * 128
    assert predicted.tokens == tokens
    assert predicted.parts["products"] == pytest.approx(tokens * (270 + 324 + 90) / 1.5e12)
    traffic = 2 * 2 * (sizes["activations"] + sizes["workspace"]) + 32 * n
    assert predicted.parts["memory traffic"] == pytest.approx(traffic / 2e9)


def test_the_gru_run_is_predicted_as_fast_as_it_was():
    predicted = plan.predict_on(GRU_RUN, plan.device("L40S"), "fp32")
    assert predicted.tokens_per_second == pytest.approx(17_666, rel=0.01)


@pytest.mark.parametrize(("segments", "factor"), [(1, 1), (2, 7 / 6), (4, 1.25), (100, 1 + 7 / 24)])
def test_segments_cost_a_third_for_what_they_recompute(segments, factor):
    gpu = plan.device("L40S")
    base = plan.predict_on(GRU_RUN, gpu, "fp32").parts["products"]
    config = GRU_RUN.replace("train", segments=segments)
    assert plan.predict_on(config, gpu, "fp32").parts["products"] == pytest.approx(factor * base)


@pytest.mark.parametrize("config", [gru(), gpt2()], ids=["gru-lm", "gpt2"])
@pytest.mark.parametrize("budget", [5.0, 400.0])
def test_a_timed_part_of_a_step_is_continued_to_the_whole(monkeypatch, config, budget):
    """On a clock that goes by the work: 0.01 s a token and 0.1 s a pass over the weights."""
    clock = SimpleNamespace(now=0.0)
    config = config.replace("train", batch_size=64, seq_len=128 if config.model.kind == "gru-lm" else 8)
    recurrent = config.model.kind == "gru-lm"

    def passes(T):
        return min(T, 8) if recurrent else 1

    def accumulate(model, micro_batches):
        T, B = micro_batches[0][0].shape
        clock.now += 0.01 * T * B + 0.1 * passes(T)

    monkeypatch.setattr("gru_ref.training.step.accumulate", accumulate)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock.now)
    train = config.train
    seconds, how = speed._time_micro_batch(config, budget)
    true = 0.01 * train.seq_len * train.batch_size + 0.1 * passes(train.seq_len)
    assert seconds == pytest.approx(true, rel=1e-9 if budget == 400 else 0.02)
    assert (how == ("128 of 128 time steps" if recurrent else "64 of 64 windows")) == (budget == 400)


@pytest.mark.parametrize("kernels", ["numpy", "numba"])
def test_a_step_here_is_timed(kernels):
    config = gru().replace("train", accumulation=3).replace("run", kernels=kernels, threads=1)
    timed = plan.measure_here(config, budget=0.01)
    assert list(timed.parts) == ["forward and backward", "update"]
    assert all(seconds > 0 for seconds in timed.parts.values())
    assert timed.tokens == 3 * 32 * 128
    assert timed.how.startswith("timed: 2 of 2 layers over ")


def test_a_large_model_is_timed_with_few_layers(monkeypatch):
    monkeypatch.setattr(speed, "SMALL", 0)
    timed = plan.measure_here(gpt2(layers=5), budget=0.01)
    assert timed.how.startswith("timed: 1 of 5 layers over ")
    assert all(seconds > 0 for seconds in timed.parts.values())


def test_a_layer_is_not_lost_beside_a_large_vocabulary(monkeypatch):
    """On a clock that errs by a fifth. The difference of two whole models once made a step last −70 s."""
    clock, errors = SimpleNamespace(now=0.0), itertools.cycle((1.2, 0.8, 1.0, 0.8, 1.2))

    def accumulate(model, micro_batches, **options):
        tokens = sum(inputs.size for inputs, _ in micro_batches)
        clock.now += tokens * (model.config.vocab_size / 50257 + 0.05 * model.config.layers) * next(errors)
        return 0.0, 0, None

    monkeypatch.setattr("gru_ref.training.step.accumulate", accumulate)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(speed, "SMALL", 0)
    config = gpt2(layers=12, vocab_size=50257).replace("train", batch_size=16)
    for _ in range(5):
        timed = plan.measure_here(config, budget=0.01)
        assert timed.parts["forward and backward"] == pytest.approx(16 * 8 * (1 + 0.6), rel=0.45)
        next(errors)


def test_what_does_not_fit_here_is_not_timed():
    found = plan.summary(gru(hidden=2**17), 10)
    assert found["speed"] is found["run"] is None
    assert found["verdict"] == "does not fit: no K and no batch would"


def test_the_plan_loads_neither_numba_nor_h5py():
    code = "import sys, gru_ref.plan; sys.exit(bool({'numba', 'h5py', 'click', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
