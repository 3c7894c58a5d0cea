"""One number for each convention that has more than one form: it tells the right one from the others.

The numbers stand in the design page; each was worked out by hand from the formula, not read off this code.
"""

import math

import numpy as np
import pytest

from gru_ref import GRULM
from gru_ref.config import ModelConfig
from gru_ref.ops import adamw, cross_entropy, gru, nadam

CELL = {
    "x": np.full((1, 1, 1), 0.5),
    "h0": np.full((1, 1), 0.8),
    "weight_ih": np.array([[0.3], [-0.2], [0.7]]),  # r, z, n
    "weight_hh": np.array([[-0.4], [0.6], [0.9]]),
    "bias_ih": np.array([0.1, 0.05, 0.2]),
    "bias_hh": np.array([0.0, 0.0, -0.3]),
}
RESET_AFTER, RESET_BEFORE, UPDATE_SWAPPED = 0.7356506108, 0.6956355648, 0.7010784174


def sigma(a):
    return 1 / (1 + math.exp(-a))


def step_of_the_cell(reset_after):
    y, _ = gru.forward(**CELL, reset_after=reset_after)
    return y[0, 0, 0]


@pytest.mark.parametrize(("reset_after", "expected"), [(True, RESET_AFTER), (False, RESET_BEFORE)])
def test_the_scalar_cell_has_the_known_next_state(reset_after, expected):
    """N01."""
    assert step_of_the_cell(reset_after) == pytest.approx(expected, abs=5e-11)


def test_the_known_next_states_follow_from_the_equations():
    """N01: the three numbers themselves, in scalar arithmetic."""
    r, z = sigma(0.3 * 0.5 - 0.4 * 0.8 + 0.1), sigma(-0.2 * 0.5 + 0.6 * 0.8 + 0.05)
    after = math.tanh(0.7 * 0.5 + 0.2 + r * (0.9 * 0.8 - 0.3))
    before = math.tanh(0.7 * 0.5 + 0.2 + 0.9 * (r * 0.8) - 0.3)
    assert (1 - z) * after + z * 0.8 == pytest.approx(RESET_AFTER, abs=5e-11)
    assert (1 - z) * before + z * 0.8 == pytest.approx(RESET_BEFORE, abs=5e-11)
    assert z * after + (1 - z) * 0.8 == pytest.approx(UPDATE_SWAPPED, abs=5e-11)


@pytest.mark.parametrize("reset_after", [True, False])
def test_the_update_gate_is_not_used_the_wrong_way_round(reset_after):
    """N01."""
    assert abs(step_of_the_cell(reset_after) - UPDATE_SWAPPED) > 1e-3


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 2, 1), (2, 1, 0)])
@pytest.mark.parametrize("reset_after", [True, False])
def test_the_gates_have_one_order(reset_after, order):
    """N01: with gates in another order than r, z, n the state is another one."""
    permuted = {k: v[list(order)] if k not in ("x", "h0") else v for k, v in CELL.items()}
    y, _ = gru.forward(**permuted, reset_after=reset_after)
    assert abs(y[0, 0, 0] - step_of_the_cell(reset_after)) > 1e-3


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize("reset_after", [True, False])
def test_only_the_biases_of_n_differ_and_only_where_reset_comes_after(reset_after, gate):
    """N01: r multiplies b_hn and not b_in, which zero biases would hide."""
    interchangeable = not (reset_after and gate == 2)
    moved = {k: v.copy() for k, v in CELL.items()}
    moved["bias_ih"][gate] += 0.25
    moved["bias_hh"][gate] -= 0.25
    y, _ = gru.forward(**moved, reset_after=reset_after)
    assert (abs(y[0, 0, 0] - step_of_the_cell(reset_after)) < 1e-15) == interchangeable


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("torch", (0.9978870965, 0.9987093159, 0.9982599224)),
        ("constant", (0.9970526316, 0.9973823589, 0.9967100322)),
    ],
)
def test_nadam_follows_the_known_trajectory(variant, expected):
    """N05; a schedule's product applied twice would begin with .9979009378, started at zero .9988101176."""
    params, m, v = np.ones(1), np.zeros(1), np.zeros(1)
    product = 1.0
    for t, (g, value) in enumerate(zip((0.5, -0.25, 0.1), expected, strict=True), start=1):
        product *= nadam.momentum(t, variant=variant)
        nadam.step(params, np.full(1, g), m, v, t=t, mu_product=product, lr=2e-3, variant=variant)
        assert params[0] == pytest.approx(value, abs=5e-11)


def test_adamw_decays_a_parameter_without_gradient_by_lr_times_lambda():
    params = np.ones(1)
    adamw.step(params, np.zeros(1), np.zeros(1), np.zeros(1), t=1, lr=1e-3, weight_decay=0.1)
    assert params[0] == 0.9999


def test_a_tied_matrix_decays_once():
    """N03, N07: one parameter, one decay; biases are left as they are, to the last bit."""
    model = GRULM(ModelConfig(layers=1, hidden=4, vocab_size=5, tied=True), dtype=np.float64)
    model.initialise()
    arena, before = model.arena, model.arena.params.copy()
    decayed = arena.decayed
    adamw.step(
        arena.params[decayed],
        arena.grads[decayed],
        arena.m[decayed],
        arena.v[decayed],
        t=1,
        lr=1e-3,
        weight_decay=0.1,
    )
    for name, old in arena.views(before).items():
        assert np.array_equal(arena.param[name], old * 0.9999 if old.ndim == 2 else old)


def test_the_loss_is_a_mean_over_tokens_not_of_means():
    """Four tokens at 1 nat in one micro-batch and one at 5 in another: 1.8, not 3.0, and the gradient too."""
    total, count = 0.0, 5
    dlogits = []
    for nats, n in ((1.0, 4), (5.0, 1)):
        z = np.tile([0.0, math.log(math.expm1(nats))], (n, 1))  # −log p[0] = log(1 + e^z) = nats
        loss, cache = cross_entropy.forward(z, np.zeros(n, int))
        total += loss.sum()
        dlogits.append(cross_entropy.backward(np.full(n, 1 / count), cache)[0])
    assert total / count == pytest.approx(1.8, rel=1e-15)
    assert np.concatenate(dlogits)[:, 0] == pytest.approx([(math.exp(-n) - 1) / 5 for n in (1, 1, 1, 1, 5)])


@pytest.mark.parametrize(("vocab_size", "bits"), [(100, 6.643856), (256, 8.0)])
def test_a_uniform_model_costs_log2_of_the_vocabulary(vocab_size, bits):
    """N11: nats over ln 2, where one token is one byte."""
    loss, _ = cross_entropy.forward(np.zeros((7, vocab_size)), np.arange(7))
    assert loss.sum() / (math.log(2) * 7) == pytest.approx(bits, abs=5e-7)
