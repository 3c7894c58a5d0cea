"""Counter-based random numbers: the published answers of Philox, and the laws that resuming relies on."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gru_ref import random
from gru_ref.random import MAX_SEED, bits, normal, permutation, philox4x32, uniform

ONES = 0xFFFFFFFF
DRAWS = [bits, uniform, normal]

coordinates = st.fixed_dictionaries(
    {
        "seed": st.integers(0, MAX_SEED),
        "stream": st.integers(0, 2**32 - 1),
        "step": st.integers(0, 2**32 - 1),
        "layer": st.integers(0, 2**32 - 1),
    }
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (  # the digits of π
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    """The three vectors for philox4x32-10 of the Random123 distribution."""
    words = philox4x32(np.array(counter, np.uint32)[:, None], key)
    assert words.dtype == np.uint32
    assert words[:, 0].tolist() == list(expected)


def test_blocks_are_independent_of_their_neighbours():
    """A block of many is what it is alone: columns never mix."""
    counter = np.arange(4 * 5, dtype=np.uint32).reshape(4, 5)
    alone = [philox4x32(counter[:, i : i + 1], (7, 11)) for i in range(5)]
    assert np.array_equal(philox4x32(counter, (7, 11)), np.concatenate(alone, axis=1))


@given(coordinates, st.integers(0, 40))
def test_a_draw_is_the_documented_word_of_the_documented_counter(at, index):
    counter = np.array([[index // 4], [at["layer"]], [at["step"]], [at["stream"]]], np.uint32)
    word = philox4x32(counter, (at["seed"] % 2**32, at["seed"] // 2**32))[index % 4, 0]
    assert bits(index + 1, **at)[index] == word


@pytest.mark.parametrize("draw", DRAWS)
@given(coordinates, st.integers(0, 30), st.integers(0, 30))
def test_draws_can_begin_anywhere(draw, at, start, n):
    assert np.array_equal(draw(n, start=start, **at), draw(start + n, **at)[start:])


@pytest.mark.parametrize("draw", DRAWS)
@given(coordinates, st.integers(0, 30), st.integers(0, 30))
def test_the_first_draws_do_not_depend_on_how_many_are_drawn(draw, at, n, more):
    assert np.array_equal(draw(n + more, **at)[:n], draw(n, **at))


@pytest.mark.parametrize("draw", [*DRAWS, permutation])
@pytest.mark.parametrize("name", ["seed", "stream", "step", "layer"])
@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_of_one_coordinate_changes_the_draws(draw, name, bit):
    at = {"seed": 3, "stream": 1, "step": 2, "layer": 0}
    other = at | {name: at[name] ^ 1 << bit}
    assert np.mean(draw(64, **at) == draw(64, **other)) < 0.2


@pytest.mark.parametrize("name", ["stream", "step", "layer"])
def test_neighbouring_coordinates_are_uncorrelated(name):
    """Correlation of 20,000 draws is below five standard errors, 5/√n."""
    at = {"seed": 1, "stream": 1, "step": 0, "layer": 0}
    n = 20_000
    first, second = uniform(n, **at), uniform(n, **(at | {name: at[name] + 1}))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(n)


def test_the_high_half_of_the_seed_counts():
    assert not np.array_equal(bits(8, seed=5, stream=1), bits(8, seed=5 + 2**32, stream=1))


def test_streams_are_all_different():
    numbers = [random.INITIALISATION, random.DATA_ORDER, random.DROPOUT, random.SAMPLING, random.GRADCHECK]
    assert len(set(numbers)) == len(numbers)


def test_uniform_has_53_bits_from_two_words():
    high, low = (int(word) for word in bits(2, seed=9, stream=1))
    assert uniform(1, seed=9, stream=1)[0] == ((high >> 5) * 2**26 + (low >> 6)) / 2**53


def test_uniform_lies_in_zero_to_one_with_the_moments_of_a_uniform():
    """Mean 1/2 and variance 1/12 within five standard errors, 1/√(12n) and 1/√(180n)."""
    n = 100_000
    u = uniform(n, seed=1, stream=2)
    assert u.dtype == np.float64
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert abs(u.mean() - 1 / 2) < 5 / np.sqrt(12 * n)
    assert abs(u.var() - 1 / 12) < 5 / np.sqrt(180 * n)
    counts, _ = np.histogram(u, bins=100, range=(0, 1))
    chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert 50 < chi_square < 165  # 99 degrees of freedom: mean 99, standard deviation 14


def test_the_largest_uniform_is_below_one(monkeypatch):
    """All bits set, the draw that a single-precision formula rounds up to 1."""
    monkeypatch.setattr(random, "philox4x32", lambda counter, key: np.full(counter.shape, ONES, np.uint32))
    assert uniform(1, seed=0, stream=1)[0] == 1 - 2**-53
    assert np.isfinite(normal(1, seed=0, stream=1)[0])


def test_normal_has_the_moments_of_a_normal():
    """Mean, variance, third and fourth moment within five standard errors."""
    n = 100_000
    x = normal(n, seed=1, stream=2)
    assert x.dtype == np.float64
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - moment) < 5 * np.sqrt(variance / n), power


@given(coordinates, st.integers(0, 200))
def test_permutation_is_one(at, n):
    order = permutation(n, **at)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))


def test_permutations_of_three_are_equally_likely():
    """3,000 of them; chi-square with 5 degrees of freedom is below 30 but for 1 in 70,000."""
    orders = [tuple(permutation(3, seed=1, stream=2, step=step)) for step in range(3000)]
    counts = np.array([orders.count(order) for order in sorted(set(orders))])
    assert len(counts) == 6
    assert ((counts - 500) ** 2 / 500).sum() < 30


@pytest.mark.parametrize("draw", [*DRAWS, permutation])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 2**64),
        ("stream", -1),
        ("stream", 2**32),
        ("step", -1),
        ("step", 2**32),
        ("layer", -1),
        ("layer", 2**32),
    ],
)
def test_a_coordinate_out_of_range_raises_and_is_named(draw, name, value):
    at = {"seed": 0, "stream": 1, "step": 0, "layer": 0} | {name: value}
    with pytest.raises(ValueError, match=name):
        draw(4, **at)


@pytest.mark.parametrize("n", [-1, -3, -4, 4 * 2**32])
def test_an_impossible_number_of_draws_raises(n):
    with pytest.raises(ValueError, match="n // 4"):
        bits(n, seed=0, stream=1)
