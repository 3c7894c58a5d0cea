"""Attention: what each query sees, and that the two definitions are one (N09, N10).

Gradients are proven by test_gradcheck.py, and against PyTorch by test_parity_torch_gpt2.py.
"""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gru_ref import random
from gru_ref.ops import attention, attention_blocked, dropout
from gru_ref.ops.matmul import round_to

BOTH = [attention, attention_blocked]


def example(T=5, S=5, B=2, N=3, D=4, seed=0, dtype=np.float64, **options):
    """q, k, v, and a cotangent dy."""
    inputs = attention.example(np.random.default_rng(seed), T=T, S=S, B=B, N=N, D=D, dtype=dtype) | options
    return inputs, np.random.default_rng(seed + 1).standard_normal(inputs["q"].shape).astype(dtype)


def run(op, inputs, dy, **options):
    y, cache = op.forward(**inputs, **options)
    return [y, *op.backward(dy, cache)]


def assert_close(actual, expected, tolerance):
    """By the norm of the whole array; where the expected one is all 0, the actual one is too."""
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


# --- the definition -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("offset", [0, 3, -2, 100])
def test_a_query_sees_the_keys_up_to_its_own_position_and_no_other(op, offset):
    """A change of a key or a value moves the results of exactly the queries that see it."""
    inputs, _ = example(T=6, S=7, offset=offset)
    y, _ = op.forward(**inputs)
    for name in ("k", "v"):
        for j in range(7):
            moved = inputs[name].copy()
            moved[j] += 1
            changed = np.any(op.forward(**inputs | {name: moved})[0] != y, axis=(1, 2, 3))
            sees = j <= np.arange(6) + offset
            alone = np.arange(6) + offset == 0  # one key has all the weight, whatever its score
            assert np.array_equal(changed, sees & ~alone if name == "k" else sees)


@pytest.mark.parametrize("op", BOTH)
def test_heads_and_sequences_do_not_see_each_other(op):
    inputs, dy = example()
    whole = run(op, inputs, dy)
    for b in range(2):
        for n in range(3):
            one = {key: inputs[key][:, b : b + 1, n : n + 1] for key in ("q", "k", "v")}
            part = run(op, inputs | one, dy[:, b : b + 1, n : n + 1])
            assert_close(part, [a[:, b : b + 1, n : n + 1] for a in whole], 1e-14)


def test_the_result_of_a_query_is_the_mean_of_the_values_weighted_by_the_scores():
    """By hand: one head, scores ln 1, ln 2 and ln 5 over a scale of √4."""
    q, v = np.ones((1, 1, 1, 4)), np.arange(12.0).reshape(3, 1, 1, 4)
    k = np.log([1, 2, 5])[:, None, None, None] * np.ones((3, 1, 1, 4)) / 2
    for op in BOTH:
        y, _ = op.forward(q, k, v, offset=2)
        assert y[0, 0, 0] == pytest.approx((1 * v[0] + 2 * v[1] + 5 * v[2])[0, 0] / 8, rel=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", BOTH)
def test_a_query_that_sees_nothing_gives_0_and_not_nan(op, dtype):
    """N09. Its gradient is 0 too, and it adds nothing to those of keys and values."""
    inputs, dy = example(T=4, S=3, offset=-2, dtype=dtype)
    with np.errstate(all="raise"):
        y, dq, dk, dv = run(op, inputs, dy)
        seeing = run(op, inputs | {"q": inputs["q"][2:], "offset": 0}, dy[2:])
    assert not y[:2].any()
    assert not dq[:2].any()
    assert_close([y[2:], dq[2:], dk, dv], seeing, 1e-6)
    assert not dk[2:].any()  # a key that no query sees


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("T", [1, 3])
def test_one_token_attends_to_itself(op, T):
    """N09: sequence length 1, and no more than the first of 3."""
    inputs, dy = example(T=T, S=T)
    y, dq, dk, dv = run(op, inputs, dy * (np.arange(T) == 0)[:, None, None, None])
    assert np.array_equal(y[0], inputs["v"][0])
    assert np.abs(dq).max() < 1e-15
    assert np.abs(dk).max() < 1e-15
    assert_close([dv[0]], [dy[0]], 1e-15)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores_neither_overflow_nor_lose_the_largest(op, size):
    """The softmax is of differences from the largest score: a constant added to all is none."""
    inputs, dy = example(dtype=np.float32)
    large = inputs | {"q": inputs["q"] * np.float32(size)}
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        results = run(op, large, dy)
    assert all(np.isfinite(a).all() for a in results)
    shifted = inputs | {"k": inputs["k"] + 64}
    exact = run(op, {key: a.astype(np.float64) if key in "qkv" else a for key, a in inputs.items()}, dy)
    assert_close(run(op, shifted, dy)[:2:2], exact[:2:2], 1e-4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("op", BOTH)
def test_products_of_mixed_precision_round_their_inputs(op, precision):
    """Weights of 1/2 and 1/4 are exact in 16 bits: there, the results are those of rounded inputs exactly."""
    inputs, dy = example(T=1, S=2, D=4, offset=1, dtype=np.float32, precision=precision)
    inputs["k"][1] = inputs["k"][0]  # equal scores: both keys have half of the weight
    y, dq, dk, dv = run(op, inputs, dy)
    v, dy = round_to(inputs["v"], precision), round_to(dy, precision)
    assert np.array_equal(y[0], (v[0] + v[1]) / 2)
    assert np.array_equal(dv[0], dy[0] / 2)
    assert y.dtype == dq.dtype == dk.dtype == np.float32


@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("op", BOTH)
def test_mixed_precision_is_off_by_its_rounding_and_no_more(op, precision, tolerance):
    inputs, dy = example(T=9, S=9, dtype=np.float32)
    exact = run(op, inputs, dy)
    rounded = run(op, inputs | {"precision": precision}, dy)
    assert_close(rounded, exact, tolerance)
    assert all(
        np.linalg.norm(a - b) > tolerance / 20 * np.linalg.norm(b)
        for a, b in zip(rounded, exact, strict=True)
    )


# --- the second definition ----------------------------------------------------------------------------------

SHAPES = st.tuples(*(st.integers(1, n) for n in (9, 9, 2, 2, 5)))


@settings(max_examples=60, deadline=None)
@given(
    shape=SHAPES,
    block=st.integers(1, 10),
    offset=st.integers(-3, 9),
    rate=st.sampled_from([0.0, 0.4]),
    size=st.sampled_from([1.0, 30.0]),
)
def test_blocks_of_keys_change_nothing_in_float64(shape, block, offset, rate, size):
    """Value and gradients to 1e-12, for any cut of the keys, and scores from even to steep."""
    T, S, B, N, D = shape
    inputs, dy = example(T, S, B, N, D, offset=offset, dropout=rate)
    inputs["q"] *= size
    expected = run(attention, inputs, dy)
    actual = run(attention_blocked, inputs, dy, block=block)
    scale = max(np.linalg.norm(a) for a in expected)
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(a - b) <= 1e-12 * scale


def test_blocks_change_nothing_at_the_size_of_a_model():
    inputs, dy = example(T=256, S=256, B=1, N=2, D=16)
    assert_close(run(attention_blocked, inputs, dy), run(attention, inputs, dy), 1e-12)
    narrow = {key: a.astype(np.float32) if key in "qkv" else a for key, a in inputs.items()}
    assert_close(run(attention_blocked, narrow, dy.astype(np.float32)), run(attention, inputs, dy), 2e-6)


def test_the_scores_may_rise_or_fall_from_block_to_block():
    """The correction of the online softmax is used in the one case and not needed in the other."""
    inputs, dy = example(T=8, S=8)
    for order in (1, -1):
        steep = inputs | {"k": inputs["k"] * np.arange(1, 9)[::order, None, None, None] ** 2.0}
        assert_close(run(attention_blocked, steep, dy, block=2), run(attention, steep, dy), 1e-12)


def test_memory_of_the_second_definition_is_in_proportion_to_the_length():
    """T queries × 64 keys at a time; the first definition holds T × T."""

    def peak(op, T):
        inputs, dy = example(T=T, S=T, B=1, N=1, D=1)
        tracemalloc.start()
        run(op, inputs, dy)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    short, long = peak(attention_blocked, 512), peak(attention_blocked, 2048)
    assert long < 4.5 * short
    assert long < 2048 * 64 * 8 * 7
    assert peak(attention, 2048) > 3 * long


# --- dropout of the probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3, 64])
def test_both_definitions_draw_the_same_mask_and_again_in_backward(block):
    """N10: a function of seed, step, layer and position, not of a generator's state or of the blocks."""
    inputs, dy = example(T=7, S=7, dropout=0.5)
    expected = run(attention, inputs, dy)
    assert_close(run(attention_blocked, inputs, dy, block=block), expected, 1e-14)
    for other in ({"seed": 8}, {"step": 4}, {"layer": 2}):
        assert not np.allclose(run(attention_blocked, inputs | other, dy, block=block)[0], expected[0])


@pytest.mark.parametrize("op", BOTH)
def test_dropout_zeroes_weights_and_scales_the_others(op):
    """With the identity as values, the result is the matrix of weights itself."""
    T = 6
    inputs, _ = example(T=T, S=T, B=1, N=1, D=T, v=np.eye(T).reshape(T, 1, 1, T))
    weights = op.forward(**inputs)[0][:, 0, 0]
    dropped = op.forward(**inputs | {"dropout": 0.25})[0][:, 0, 0]
    mask = dropout.keep_mask((T, T), 0.25, seed=7, step=3, layer=1).T
    assert np.allclose(dropped, weights * mask / 0.75, rtol=1e-14)
    assert 0 < np.count_nonzero(np.tril(mask)) < T * (T + 1) / 2
    assert np.allclose(weights.sum(axis=1), 1)


@given(start=st.integers(0, 40), n=st.integers(0, 20))
def test_draws_from_a_later_index_are_the_end_of_those_from_the_first(start, n):
    whole = random.bits(start + n, seed=3, stream=random.DROPOUT, step=5)
    assert np.array_equal(random.bits(n, seed=3, stream=random.DROPOUT, step=5, start=start), whole[start:])


def test_the_scale_is_that_of_the_heads_width():
    """1/√D: with it, the spread of random scores does not depend on the width."""
    q, k = np.random.default_rng(0).standard_normal((2, 64, 1, 1, 256))
    _, (*_, p, _, _) = attention.forward(q, k, k)
    scores = np.log(p[0, 0, -1])
    assert np.std(scores) == pytest.approx(1, rel=0.3)
    assert np.std(scores) == pytest.approx(np.std(q[-1, 0, 0] @ k[:, 0, 0].T) / math.sqrt(256), rel=1e-12)
