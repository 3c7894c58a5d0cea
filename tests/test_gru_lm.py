"""The GRU language model: its parameters, its first loss, its state, its gradients over batches."""

import dataclasses
import hashlib
import inspect
import math

import numpy as np
import pytest

from gru_ref import GRULM, Backend, config
from gru_ref.config import ModelConfig
from gru_ref.errors import ConfigError
from gru_ref.models import gru_lm, padded_vocab, parameter_shapes
from gru_ref.ops import cross_entropy

SMALL = ModelConfig(layers=2, hidden=6, embedding=4, vocab_size=11, vocab_padding=8, dropout=0.3)
TIED = ModelConfig(layers=1, hidden=6, vocab_size=11, tied=True)


def build(model_config, seed=1, dtype=np.float64, **options):
    model = GRULM(model_config, seed=seed, dtype=dtype, **options)
    model.initialise()
    return model


def batch(model, T=5, B=4, seed=0):
    """ids, targets of which some are ignored, and a non-zero state."""
    rng = np.random.default_rng(seed)
    ids, targets = rng.integers(0, model.config.vocab_size, (2, T, B))
    targets[rng.random((T, B)) < 0.2] = cross_entropy.IGNORE
    return ids, targets, rng.standard_normal((model.config.layers, B, model.config.hidden))


def accumulate(model, ids, targets, state, count, dropout_step=None):
    """Add the gradient of Σ loss / count to the arena; the sum of the losses and the state after."""
    logits, state, cache = model.forward(ids, state, dropout_step=dropout_step)
    losses, loss_cache = cross_entropy.forward(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), vocab_size=model.config.vocab_size
    )
    dlogits, _ = cross_entropy.backward(np.full(ids.size, 1 / count), loss_cache)
    model.backward(dlogits.reshape(logits.shape), cache)
    return losses.sum(dtype=np.float64), state


def count_parameters(model_config):
    return sum(math.prod(shape) for shape in parameter_shapes(model_config).values())


def test_the_preset_of_the_write_up_has_75_944_036_parameters():
    """Shapes only: no 300 MB are touched for it."""
    model_config = config.load(preset="gru-l3-v3a").model
    assert (model_config.layers, model_config.hidden, model_config.tied) == (3, 2048, False)
    assert count_parameters(dataclasses.replace(model_config, vocab_size=100)) == 75_944_036


@pytest.mark.parametrize(
    ("model_config", "expected"),
    [
        # P·E + Σ 3H(I + H + 2) + P·H + P with P = 16, E = 4, H = 6
        (SMALL, 16 * 4 + 18 * (4 + 6 + 2) + 18 * (6 + 6 + 2) + 16 * 6 + 16),
        (TIED, 11 * 6 + 18 * (6 + 6 + 2) + 11),
        (ModelConfig(layers=1, hidden=1, vocab_size=1), 1 + 3 * 4 + 1 + 1),
    ],
)
def test_parameters_are_counted_by_the_formula_and_a_tied_matrix_once(model_config, expected):
    assert count_parameters(model_config) == expected == GRULM(model_config).arena.size


def test_weight_decay_reaches_every_matrix_and_no_bias():
    """N07: the decayed slice of the arena, written to, is exactly the weights."""
    arena = GRULM(SMALL).arena
    arena.params[arena.decayed] = 1
    for name, parameter in arena.param.items():
        assert np.all(parameter == (1 if name.endswith(("weight", "weight_ih", "weight_hh")) else 0)), name


def test_initial_weights_are_a_function_of_the_seed():
    plain = dataclasses.replace(SMALL, vocab_padding=1)
    first, again, other = (build(plain, seed).arena for seed in (1, 1, 2))
    assert first.params.tobytes() == again.params.tobytes()
    for name, parameter in first.param.items():
        assert not np.any(parameter == other.param[name]), name
    values = np.concatenate([p.reshape(-1) for p in first.param.values()])
    assert len(np.unique(values)) == first.size  # no two parameters share a draw


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_pad_the_vocabulary_start_at_zero_and_change_no_other_draw(tied):
    padded = ModelConfig(layers=2, hidden=6, vocab_size=11, vocab_padding=16, tied=tied)
    unpadded = build(dataclasses.replace(padded, vocab_size=16)).arena.param
    for name, parameter in build(padded).arena.param.items():
        rows = len(parameter) if name.startswith("gru.") else 11
        assert np.array_equal(parameter[:rows], unpadded[name][:rows]), name
        assert not parameter[rows:].any(), name


def test_a_shape_that_no_model_can_have_is_refused():
    """As GPT2 refuses it, before anything is allocated."""
    for changes, reason in (
        ({"heads": 8}, "model.heads is of gpt2 and not of gru-lm"),
        ({"tied": True, "embedding": 4}, "model.tied needs model.embedding = model.hidden"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            GRULM(ModelConfig(**{"hidden": 6, "vocab_size": 11} | changes))


def test_initial_weights_have_the_documented_spread():
    arena = build(ModelConfig(layers=1, hidden=64, vocab_size=500)).arena
    assert abs(arena.param["embedding.weight"].std() - 1) < 0.02
    for name, parameter in arena.param.items():
        if name != "embedding.weight":
            assert 0.9 / 8 < np.abs(parameter).max() <= 1 / 8, name
    tied = build(ModelConfig(layers=1, hidden=64, vocab_size=500, tied=True)).arena
    assert abs(tied.param["embedding.weight"].std() - 1 / 8) < 0.02 / 8


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("layers", "hidden", "V"), [(1, 64, 100), (3, 256, 100), (2, 128, 257), (2, 96, 5000)]
)
def test_the_first_loss_is_close_to_the_logarithm_of_the_vocabulary(layers, hidden, V, tied):
    model = build(ModelConfig(layers=layers, hidden=hidden, vocab_size=V, tied=tied), dtype=np.float32)
    ids = np.random.default_rng(0).integers(0, V, (17, 16))
    logits, _, _ = model.forward(ids[:-1])
    losses, _ = cross_entropy.forward(logits.reshape(-1, V), ids[1:].reshape(-1))
    assert abs(losses.mean() - math.log(V)) < 0.1


@pytest.mark.parametrize("dropout_step", [None, 3])
def test_forward_and_backward_leave_ids_state_and_weights_as_they_are(dropout_step):
    """N02: hashed before and after."""
    model = build(SMALL)
    ids, targets, state = batch(model)
    arrays = (ids, targets, state, model.arena.params)
    before = [hashlib.sha256(a.tobytes()).digest() for a in arrays]
    _, after = accumulate(model, ids, targets, state, 10, dropout_step)
    assert [hashlib.sha256(a.tobytes()).digest() for a in arrays] == before
    assert not np.shares_memory(after, state)


def test_evaluation_twice_gives_the_same_bits_whatever_the_dropout():
    """N02: without a dropout_step there is none, however large the rate."""
    model, without = build(SMALL), build(dataclasses.replace(SMALL, dropout=0.0))
    ids, _, state = batch(model)
    first, again, plain = (m.forward(ids, state)[0].tobytes() for m in (model, model, without))
    assert first == again == plain


def test_dropout_is_a_function_of_seed_and_micro_batch():
    """N10: the same step repeats to the last bit; another step or seed drops other values."""
    model, other_seed = build(SMALL), build(SMALL, seed=2)
    other_seed.arena.params[...] = model.arena.params
    ids, _, state = batch(model)
    first, again, next_step = (model.forward(ids, state, dropout_step=s)[0] for s in (4, 4, 5))
    assert first.tobytes() == again.tobytes()
    assert not np.allclose(first, next_step)
    assert not np.allclose(first, other_seed.forward(ids, state, dropout_step=4)[0])
    assert not np.allclose(first, model.forward(ids, state)[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_layer_gets_a_mask_of_its_own_and_every_product_the_models_precision(precision, monkeypatch):
    """N10: masks by (seed, micro-batch, layer). The operations report what they are called with."""
    model = build(SMALL, seed=5, dtype=np.float32, precision=precision)
    model.ops = Backend("numpy")
    monkeypatch.setattr(gru_lm, "SLICE_TOKENS", 1)
    calls = []

    def report(op):
        functions = getattr(model.ops, op)
        forward = functions.forward

        def reporting(*args, **kwargs):
            calls.append((op, inspect.signature(forward).bind(*args, **kwargs).arguments))
            return forward(*args, **kwargs)

        functions.forward = reporting

    for op in ("embedded_gru", "gru", "dropout", "linear"):
        report(op)
    model.forward(batch(model)[0], dropout_step=4)
    a_slice = ["embedded_gru", "dropout", "gru", "dropout"]
    assert [op for op, _ in calls] == 5 * a_slice + ["linear"]  # 5 steps, 5 slices
    assert {a["precision"] for op, a in calls if op != "dropout"} == {precision}
    masks = [(a["p"], a["seed"], a["step"], a["layer"], a["start"]) for op, a in calls if op == "dropout"]
    assert masks == [(0.3, 5, 4, layer, t * 4 * 6) for t in range(5) for layer in (0, 1)]


def test_the_carried_state_continues_the_sequence():
    """S03: a sequence in one go equals the same one in parts, token by token included."""
    model = build(SMALL)
    ids, _, state = batch(model, T=6)
    whole, last, _ = model.forward(ids, state)
    for cuts in ([2], [1, 2, 3, 4, 5]):
        carried, parts = state, []
        for part in np.split(ids, cuts):
            logits, carried, _ = model.forward(part, carried)
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-14)
        np.testing.assert_allclose(carried, last, rtol=0, atol=1e-15)
    zeros = model.forward(ids, model.initial_state(4))
    assert np.array_equal(model.forward(ids)[0], zeros[0])


@pytest.mark.parametrize("dropout_step", [None, 2])
def test_gradients_accumulate(dropout_step):
    """The same micro-batch twice is twice the gradient: nothing is overwritten."""
    once, twice = build(SMALL), build(SMALL)
    ids, targets, state = batch(once)
    accumulate(once, ids, targets, state, 10, dropout_step)
    for _ in range(2):
        accumulate(twice, ids, targets, state, 10, dropout_step)
    # not bit for bit: the slices of the second are added one by one to the sum of the first's
    np.testing.assert_allclose(twice.arena.grads, 2 * once.arena.grads, rtol=1e-12, atol=1e-17)


@pytest.mark.parametrize("model_config", [SMALL, TIED])
def test_two_micro_batches_add_up_to_the_joined_batch(model_config):
    """With unequal numbers of counted targets: one divisor for both, never a mean of means."""
    joined, parted = build(model_config), build(model_config)
    ids, targets, state = batch(joined, T=5, B=7)
    targets[:, :2] = cross_entropy.IGNORE
    count = np.sum(targets != cross_entropy.IGNORE)
    loss, _ = accumulate(joined, ids, targets, state, count)
    total = 0.0
    for rows in (slice(0, 3), slice(3, 7)):
        total += accumulate(parted, ids[:, rows], targets[:, rows], state[:, rows], count)[0]
    assert total == pytest.approx(loss, rel=1e-15)
    np.testing.assert_allclose(parted.arena.grads, joined.arena.grads, rtol=0, atol=1e-15)


def test_a_tied_matrix_gets_the_sum_of_the_gradients_of_both_uses():
    """N03: against an untied model whose two matrices hold the same values; one token repeated."""
    untied, tied = build(dataclasses.replace(TIED, tied=False)), build(TIED)
    assert "classifier.weight" not in tied.arena.param
    assert untied.arena.size == tied.arena.size + 11 * 6
    for name, parameter in untied.arena.param.items():
        parameter[...] = tied.arena.param["embedding.weight" if name == "classifier.weight" else name]
    ids, targets, state = batch(tied)
    ids[:2] = 3
    losses = [accumulate(model, ids, targets, state, 10)[0] for model in (untied, tied)]
    assert losses[0] == losses[1]
    grad = untied.arena.grad
    assert np.array_equal(
        tied.arena.grad["embedding.weight"], grad["classifier.weight"] + grad["embedding.weight"]
    )
    for name in tied.arena.param.keys() - {"embedding.weight"}:
        assert np.array_equal(tied.arena.grad[name], grad[name])


@pytest.mark.parametrize("tied", [False, True])
def test_padded_rows_get_no_gradient_and_do_not_move_the_loss(tied):
    model = build(ModelConfig(layers=1, hidden=6, vocab_size=11, vocab_padding=16, tied=tied))
    assert padded_vocab(model.config) == 16
    ids, targets, state = batch(model)
    loss, _ = accumulate(model, ids, targets, state, 10)
    for name in model.arena.param:
        if not name.startswith("gru."):
            assert model.arena.grad[name][:11].any()
            assert not model.arena.grad[name][11:].any()
            model.arena.param[name][11:] = 1e3
    assert accumulate(model, ids, targets, state, 10)[0] == loss


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_model_computes_in_the_type_of_its_arena(dtype):
    model = build(SMALL, dtype=dtype)
    ids, targets, _ = batch(model)
    logits, state, _ = model.forward(ids.astype(np.uint16), dropout_step=1)
    accumulate(model, ids, targets, None, 10)
    assert logits.shape == (5, 4, 16)
    assert state.shape == model.initial_state(4).shape == (2, 4, 6)
    assert logits.dtype == state.dtype == model.initial_state(4).dtype == model.arena.grads.dtype == dtype


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_rounds_products_and_keeps_fp32_results(precision):
    exact, mixed = (build(SMALL, dtype=np.float32, precision=p) for p in ("fp32", precision))
    ids, targets, state = batch(exact)
    for model in (exact, mixed):
        accumulate(model, ids, targets, state.astype(np.float32), 10)
    assert mixed.arena.grads.dtype == np.float32
    difference = np.linalg.norm(mixed.arena.grads - exact.arena.grads) / np.linalg.norm(exact.arena.grads)
    assert 1e-5 < difference < 2e-2
