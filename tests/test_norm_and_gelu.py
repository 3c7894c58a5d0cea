"""Layer norm and GELU: their laws and known values. Gradients are proven by test_gradcheck.py."""

import math

import numpy as np
import pytest

from gru_ref.ops import gelu, layer_norm


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def test_a_norm_has_mean_0_and_variance_1_before_its_gain_and_offset():
    x = 5 + 3 * normal(4, 3, 50)
    y, _ = layer_norm.forward(x, np.ones(50))
    assert np.abs(y.mean(axis=-1)).max() < 1e-14
    # the biased variance, and ε inside the root
    var = x.var(axis=-1)
    assert y.var(axis=-1) == pytest.approx(var / (var + 1e-5), rel=1e-12)
    weight, bias = normal(2, 50)
    assert np.array_equal(layer_norm.forward(x, weight, bias)[0], weight * y + bias)


def test_a_norm_does_not_see_a_shift_or_a_factor():
    x = normal(4, 9)
    y, _ = layer_norm.forward(x, np.ones(9), eps=0.0)
    assert layer_norm.forward(100 + 7 * x, np.ones(9), eps=0.0)[0] == pytest.approx(y, abs=1e-12)


def test_the_gradient_of_a_norm_is_orthogonal_to_what_it_does_not_see():
    """Along (1, …, 1) and along x̂ the result does not move, so dx has no part there."""
    x, dy = normal(2, 6, 9)
    _, cache = layer_norm.forward(x, np.ones(9), eps=0.0)
    dx, _, dbias = layer_norm.backward(dy, cache)
    assert np.abs(dx.sum(axis=-1)).max() < 1e-14
    assert np.abs((dx * cache[0]).sum(axis=-1)).max() < 1e-13
    assert dbias is None


def test_a_constant_row_gives_the_offset():
    """Its variance is 0: ε keeps the division finite, in float32 too."""
    x = np.full((2, 8), 1e4, np.float32)
    bias = np.arange(8, dtype=np.float32)
    y, cache = layer_norm.forward(x, np.ones(8, np.float32), bias)
    assert np.array_equal(y, np.stack([bias, bias]))
    assert all(np.isfinite(g).all() for g in layer_norm.backward(y, cache))


@pytest.mark.parametrize(
    ("approximate", "at_1", "at_minus_2"),
    [("erf", 0.8413447460685429, -0.04550026389635842), ("tanh", 0.8411919906082768, -0.04540230591222494)],
)
def test_gelu_has_its_known_values(approximate, at_1, at_minus_2):
    y, _ = gelu.forward(np.array([0.0, 1.0, -2.0]), approximate)
    assert y[0] == 0
    assert y[1:] == pytest.approx([at_1, at_minus_2], rel=1e-14)


def test_the_two_forms_differ_by_less_than_5e_4():
    x = np.linspace(-8, 8, 4001)
    difference = np.abs(gelu.forward(x, "tanh")[0] - gelu.forward(x, "erf")[0])
    assert 4e-4 < difference.max() < 5e-4


@pytest.mark.parametrize("approximate", gelu.FORMS)
def test_far_from_0_gelu_is_x_or_0_and_so_is_its_slope(approximate):
    x = np.array([-1e4, -40, 40, 1e4], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        y, cache = gelu.forward(x, approximate)
        (dx,) = gelu.backward(np.ones_like(x), cache)
    assert np.array_equal(y, x.clip(0))
    assert np.array_equal(dx, x > 0)


def test_erf_is_that_of_the_standard_library_in_the_type_of_its_input():
    x = normal(3, 4)
    assert np.array_equal(gelu.erf(x), [[math.erf(value) for value in row] for row in x])
    assert gelu.erf(x.astype(np.float32)).dtype == np.float32


def test_an_unknown_form_raises_and_names_the_known_ones():
    with pytest.raises(ValueError, match="one of tanh, erf, not 'none'"):
        gelu.forward(np.zeros(1), "none")
