"""The operations: the contract that each of them keeps, found by discovery, and the laws of each one.

Gradients are proven elsewhere, by finite differences (test_gradcheck.py) and against PyTorch
(test_parity_torch.py).
"""

import inspect
import itertools
import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gru_ref import Backend, ops, random, threads
from gru_ref.backend import KERNEL_FOLDERS, public_functions
from gru_ref.ops import adamw, clip, cross_entropy, dropout, embedding, gru, linear, matmul, nadam

DIFFERENTIABLE = [name for name in ops.names() if hasattr(getattr(ops, name), "backward")]
OTHERS = [name for name in ops.names() if name not in DIFFERENTIABLE]
OP_CASES = [
    pytest.param(op, case, id=f"{op}-{case}") for op in DIFFERENTIABLE for case in getattr(ops, op).CASES
]
UPDATE = {"accumulate": "add", "adamw": "step", "nadam": "step", "clip": "global_norm"}
"""The function of an operation that takes its example."""


def is_float(value):
    return isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating)


def example(op, case, dtype=np.float64, seed=0):
    definition = getattr(ops, op)
    return definition.example(np.random.default_rng(seed), **definition.CASES[case], dtype=dtype)


def cotangents(op, y, dtype=np.float64):
    """A random gradient of y, rounded to `dtype`, and one of the last state where backward takes it."""
    rng = np.random.default_rng(1)
    dy = rng.standard_normal(y.shape).astype(dtype).astype(y.dtype)
    if "dh_T" not in inspect.signature(getattr(ops, op).backward).parameters:
        return dy, {}
    return dy, {"dh_T": rng.standard_normal(y.shape[1:]).astype(dtype).astype(y.dtype)}


def run(functions, op, inputs, dtype=np.float64):
    """y and the gradients, from the functions of a backend or a definition, for the same cotangents."""
    y, cache = functions.forward(**inputs)
    dy, extra = cotangents(op, y, dtype)
    return [y, *functions.backward(dy, cache, **extra)]


def error(a, b):
    """Norm of the difference over the norm of `b`, in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)


# --- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ops.names())
def test_an_operation_has_its_functions_an_example_and_documented_shapes(op):
    definition = getattr(ops, op)
    functions = public_functions(definition)
    assert len(definition.__doc__.strip().splitlines()) > 3
    assert "example" in functions
    assert all(function.__doc__ for function in functions.values())
    if op in DIFFERENTIABLE:
        assert "forward" in functions
        assert definition.CASES
        pages = definition.__doc__ + functions["forward"].__doc__
        for key, value in example(op, next(iter(definition.CASES))).items():
            if isinstance(value, np.ndarray):
                assert re.search(rf"\b{key} (\(|of any shape)", pages), f"the shape of {key}"
        assert "->" in functions["forward"].__doc__
        assert "->" in functions["backward"].__doc__
    else:
        assert UPDATE[op] in functions


def test_an_unknown_operation_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match=r"no operation 'grru'; known: accumulate, adamw, attention"):
        _ = ops.grru


@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize(("op", "case"), OP_CASES)
def test_forward_and_backward_leave_their_arguments_as_they_are(op, case, backend):
    """N02. The cache too: a second backward gives the same bits."""
    functions, inputs = getattr(Backend(backend), op), example(op, case)
    before = {key: value.tobytes() for key, value in inputs.items() if isinstance(value, np.ndarray)}
    y, cache = functions.forward(**inputs)
    y_before = y.tobytes()
    dy, extra = cotangents(op, y)
    dy_before = [a.tobytes() for a in (dy, *extra.values())]
    first = functions.backward(dy, cache, **extra)
    second = functions.backward(dy, cache, **extra)
    assert {key: inputs[key].tobytes() for key in before} == before
    assert [a.tobytes() for a in (dy, *extra.values())] == dy_before
    assert y.tobytes() == y_before
    for a, b in zip(first, second, strict=True):
        assert a is b is None or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize(("op", "case"), OP_CASES)
def test_results_have_the_precision_and_the_shape_of_the_inputs(op, case, backend, dtype):
    inputs = example(op, case, dtype)
    keys = [k for k in inspect.signature(getattr(ops, op).forward).parameters if k in inputs]
    arrays = [inputs[k] for k in keys if inputs[k] is None or isinstance(inputs[k], np.ndarray)]
    y, *gradients = run(getattr(Backend(backend), op), op, inputs, dtype)
    assert y.dtype == dtype
    for x, gradient in zip(arrays, gradients, strict=True):
        if is_float(x):
            assert (gradient.dtype, gradient.shape) == (dtype, x.shape)
        else:
            assert gradient is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize(("op", "case"), OP_CASES)
def test_values_and_gradients_are_those_of_the_definition_in_float64(op, case, backend, dtype):
    """Within 2e-6 (float32) and 1e-12 (float64) by norm; to the last bit where no twin is involved."""
    inputs = example(op, case, dtype)
    wide = {k: v.astype(np.float64) if is_float(v) else v for k, v in inputs.items()}
    actual = run(getattr(Backend(backend), op), op, inputs, dtype)
    expected = run(getattr(ops, op), op, wide, dtype)
    same = run(getattr(ops, op), op, inputs, dtype)
    for a, b, c in zip(actual, expected, same, strict=True):
        if b is None:
            assert a is None
            continue
        assert error(a, b) <= (2e-6 if dtype == np.float32 else 1e-12)
        if not Backend(backend).twins(op):
            assert a.tobytes() == c.tobytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lead", [(6,), (40, 3)])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
def test_a_linear_layer_writes_its_weights_gradient_where_it_is_told(backend, lead, precision):
    """Few rows and many, which twins treat differently; part of a larger array; the same bits as without."""
    functions = Backend(backend).linear
    inputs = linear.example(np.random.default_rng(0), lead=lead, dtype=np.float32)
    y, cache = functions.forward(**inputs, precision=precision)
    memory = np.full((7, 5), np.nan, np.float32)
    dx, dweight, dbias = functions.backward(y, cache, memory[1:5])
    expected = functions.backward(y, cache)
    assert np.shares_memory(dweight, memory)
    assert [a.tobytes() for a in (dx, memory[1:5], dbias)] == [a.tobytes() for a in expected]
    assert np.isnan(memory[[0, 5, 6]]).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
def test_an_embeddings_gradient_is_added_to_a_total(backend, dtype):
    backward = Backend(backend).embedding.backward
    rng = np.random.default_rng(0)
    ids, dy = rng.integers(0, 6, (9, 4)), rng.integers(-9, 9, (9, 4, 5)).astype(dtype)
    total = rng.integers(-9, 9, (6, 5)).astype(dtype)  # whole numbers, whose sums are exact
    expected = total + backward(dy, (ids, 6))[1]
    assert backward(dy, (ids, 6), total)[1] is total
    assert np.array_equal(total, expected)
    strided = np.zeros((6, 10), dtype)[:, ::2]
    backward(dy, (ids, 6), strided)
    assert np.array_equal(strided, backward(dy, (ids, 6))[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize("op", OTHERS)
def test_updates_and_the_norm_are_those_of_the_definition_in_float64(op, backend, dtype):
    """Within 2e-6 (float32) and 1e-14 (float64); what an update only reads stays as it is."""
    inputs = getattr(ops, op).example(np.random.default_rng(0), n=1151, dtype=dtype)
    actual = {k: v.copy() if is_float(v) else v for k, v in inputs.items()}
    expected = {k: v.astype(np.float64) if is_float(v) else v for k, v in inputs.items()}
    result = getattr(getattr(Backend(backend), op), UPDATE[op])(**actual)
    true = getattr(getattr(ops, op), UPDATE[op])(**expected)
    assert result == (pytest.approx(true, rel=1e-14) if op == "clip" else true)
    for key in (k for k, v in inputs.items() if is_float(v)):
        assert actual[key].dtype == dtype
        assert error(actual[key], expected[key]) <= (2e-6 if dtype == np.float32 else 1e-14)
    if "params" in inputs:
        assert actual["grads"].tobytes() == inputs["grads"].tobytes()
        assert not np.array_equal(actual["params"], inputs["params"])


# --- matmul: rounding and products --------------------------------------------------------------------------


def float32(bits):
    return np.array([bits], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800000, 0x3F800000),  # 1 is kept
        (0x3F808000, 0x3F800000),  # halfway above an even number: down to it
        (0x3F808001, 0x3F810000),  # just above halfway: up
        (0x3F807FFF, 0x3F800000),  # just below: down
        (0x3F818000, 0x3F820000),  # halfway above an odd number: up to the even one
        (0xBF818000, 0xBF820000),  # the same below zero
        (0x3FFF8000, 0x40000000),  # the carry passes into the exponent
        (0x7F7F0000, 0x7F7F0000),  # the largest bf16 is kept
        (0x7F7F7FFF, 0x7F7F0000),  # and so is what lies nearer to it than to 2^128
        (0x7F7F8000, 0x7F800000),  # halfway to 2^128: infinite
        (0x7F7FFFFF, 0x7F800000),  # the largest fp32: infinite
        (0xFF7FFFFF, 0xFF800000),
        (0x7F800000, 0x7F800000),  # infinity is kept
        (0xFF800000, 0xFF800000),
        (0x00000000, 0x00000000),
        (0x80000000, 0x80000000),  # minus zero is kept
        (0x00000001, 0x00000000),  # subnormal numbers round like all others
        (0x00018000, 0x00020000),
        (0x007FFFFF, 0x00800000),
    ],
)
def test_bf16_rounds_to_the_nearest_and_ties_to_even(bits, rounded):
    result = matmul.round_to(np.array([float32(bits)]), "bf16")
    assert result.dtype == np.float32
    assert hex(result.view(np.uint32)[0]) == hex(rounded)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFFFFFFFF])
@pytest.mark.parametrize("precision", matmul.PRECISIONS)
def test_nan_stays_nan(bits, precision):
    with np.errstate(invalid="ignore"):  # a signalling NaN may signal as it becomes a quiet one
        assert np.isnan(matmul.round_to(np.array([float32(bits)]), precision)).all()


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_bf16_is_nearest_and_rounding_again_changes_nothing(x):
    x = np.array([x], np.float32)
    r = matmul.round_to(x, "bf16")
    assert np.array_equal(matmul.round_to(r, "bf16"), r)
    bits = r.view(np.uint32)
    assert bits[0] & 0xFFFF == 0
    if np.isfinite(r[0]):
        distance = abs(Fraction(float(x[0])) - Fraction(float(r[0])))
        for neighbour in (bits - np.uint32(0x10000), bits + np.uint32(0x10000)):
            other = neighbour.view(np.float32)[0]
            if np.isfinite(other):
                assert distance <= abs(Fraction(float(x[0])) - Fraction(float(other)))


@pytest.mark.parametrize(
    ("x", "rounded"),
    [
        (2049.0, 2048.0),  # ties to even: from 2048 on an fp16 counts by twos
        (2051.0, 2052.0),
        (65504.0, 65504.0),  # the largest
        (65519.0, 65504.0),
        (65520.0, math.inf),
        (-70000.0, -math.inf),
        (2.0**-24, 2.0**-24),  # the smallest
        (2.0**-25, 0.0),
        (0.1, 0.0999755859375),
    ],
)
def test_fp16_rounds_to_the_nearest_and_overflows_to_infinity_without_a_warning(x, rounded):
    result = matmul.round_to(np.array([x], np.float32), "fp16")
    assert result.dtype == np.float32
    assert result[0] == rounded


def test_fp32_keeps_float64_and_float32_and_widens_fp16():
    for dtype, kept in ((np.float64, np.float64), (np.float32, np.float32), (np.float16, np.float32)):
        x = np.array([0.1, 1e-3], dtype)
        assert matmul.round_to(x, "fp32").dtype == kept
        assert np.array_equal(matmul.round_to(x, "fp32"), x.astype(kept))


def test_an_unknown_precision_raises_and_names_the_known_ones():
    with pytest.raises(ValueError, match="one of fp32, fp16, bf16, not 'tf32'"):
        matmul.forward(np.ones((2, 2)), np.ones((2, 2)), "tf32")


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("precision", matmul.PRECISIONS)
@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (np.ones((1, 4096)), np.ones((4096, 1)), 4096.0),  # an fp16 sum sticks at 2048
        (np.full((1, 300), 16.0), np.full((300, 1), 16.0), 76800.0),  # beyond fp16's 65504
        (np.full((1, 1), 3.0), np.full((1, 1), 5.0), 15.0),
    ],
)
def test_sums_are_exact_in_fp32_for_16_bit_inputs(a, b, expected, precision, lead):
    """N09, for two-dimensional and batched shapes alike, from fp16 arrays."""
    a = np.broadcast_to(a, (*lead, *a.shape)).astype(np.float16)
    c, cache = matmul.forward(a, b.astype(np.float16), precision)
    assert c.dtype == np.float32
    assert np.array_equal(c, np.full((*lead, 1, 1), expected))
    da, db = matmul.backward(np.ones_like(c), cache)
    assert da.dtype == db.dtype == np.float32
    y, _ = linear.forward(a, b.T.astype(np.float16), None, precision)
    assert np.array_equal(y, c)


@pytest.mark.parametrize("precision", matmul.PRECISIONS)
def test_batched_and_two_dimensional_products_agree(precision):
    """Bit for bit where the same rows meet the same matrix; a shared b collects the sum of the gradients."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((4, 5, 7)), rng.standard_normal((4, 7, 3))
    dc = rng.standard_normal((4, 5, 3))
    c, cache = matmul.forward(a, b, precision)
    da, db = matmul.backward(dc, cache)
    for i in range(4):
        c_i, cache_i = matmul.forward(a[i], b[i], precision)
        da_i, db_i = matmul.backward(dc[i], cache_i)
        for whole, part in ((c[i], c_i), (da[i], da_i), (db[i], db_i)):
            np.testing.assert_allclose(whole, part, rtol=1e-6, atol=1e-6)
    shared, cache = matmul.forward(a, b[0], precision)
    _, db = matmul.backward(dc, cache)
    parts = [matmul.backward(dc[i], matmul.forward(a[i], b[0], precision)[1])[1] for i in range(4)]
    np.testing.assert_allclose(shared[0], c[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(db, sum(parts), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_product_of_mixed_precision_is_the_product_of_the_rounded_inputs(precision):
    """Forward and all gradients: rounding happens where the page says, and only there; never of a bias."""
    inputs = example("linear", "bias", np.float32)
    rounded = {k: matmul.round_to(inputs[k], precision) for k in ("x", "weight")}
    y, cache = linear.forward(**inputs, precision=precision)
    assert np.array_equal(y, rounded["x"] @ rounded["weight"].T + inputs["bias"])
    dy = np.random.default_rng(3).standard_normal(y.shape).astype(np.float32)
    dx, dweight, dbias = linear.backward(dy, cache)
    assert np.array_equal(dx, matmul.round_to(dy, precision) @ rounded["weight"])
    assert np.array_equal(dweight, matmul.round_to(dy, precision).T @ rounded["x"])
    assert np.array_equal(dbias, dy.sum(axis=0))
    c, cache = matmul.forward(inputs["x"], inputs["weight"].T, precision)
    da, db = matmul.backward(dy, cache)
    np.testing.assert_allclose(c, rounded["x"] @ rounded["weight"].T, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(da, dx, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(db, dweight.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_every_product_of_the_gru_rounds_its_inputs_and_nothing_else_is_rounded(reset_after, precision):
    """One row and one step: there the gradients of the biases are those of the gates themselves."""

    def rounded(x):
        return matmul.round_to(x, precision)

    rng = np.random.default_rng(4)
    p = gru.example(rng, T=1, B=1, reset_after=reset_after, dtype=np.float32)
    x, h, W, U, H = p["x"][0], p["h0"], p["weight_ih"], p["weight_hh"], 6
    y, cache = gru.forward(**p, precision=precision)
    gates_x = rounded(x) @ rounded(W).T + p["bias_ih"]
    gates_h = rounded(h) @ rounded(U).T + p["bias_hh"]
    r, z = np.split(gru.sigmoid(gates_x + gates_h)[:, : 2 * H], 2, axis=1)
    q = gates_h[:, 2 * H :] if reset_after else r * h
    from_state = r * q if reset_after else rounded(q) @ rounded(U[2 * H :]).T + p["bias_hh"][2 * H :]
    n = np.tanh(gates_x[:, 2 * H :] + from_state)
    np.testing.assert_allclose(y[0], (1 - z) * n + z * h, rtol=1e-6)

    dy = rng.standard_normal((1, 1, H)).astype(np.float32)
    dx, dh0, dW, dU, db_i, db_h = gru.backward(dy, cache)
    da_x, da_h = rounded(db_i[None]), rounded(db_h[None])
    np.testing.assert_allclose(dx[0], da_x @ rounded(W), rtol=1e-5, atol=1e-7)
    assert np.array_equal(dW, da_x.T @ rounded(x))
    assert np.array_equal(dU[: 2 * H], da_h[:, : 2 * H].T @ rounded(h))
    assert np.array_equal(dU[2 * H :], da_h[:, 2 * H :].T @ rounded(h if reset_after else q))
    if reset_after:
        through_U = da_h @ rounded(U)
    else:
        dq = da_h[:, 2 * H :] @ rounded(U[2 * H :])
        through_U = da_h[:, : 2 * H] @ rounded(U[: 2 * H]) + dq * r
    np.testing.assert_allclose(dh0, dy[0] * z + through_U, rtol=1e-5, atol=1e-6)


# --- embedding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_gradients_of_repeated_ids_add_up(shape):
    """N03: ids 1, 1, 3 with ones; the fancy `+=` would give 0, 1, 0, 1."""
    y, cache = embedding.forward(np.array([1, 1, 3]).reshape(shape), np.arange(8.0).reshape(4, 2))
    assert np.array_equal(y.reshape(3, 2), [[2, 3], [2, 3], [6, 7]])
    _, dweight = embedding.backward(np.ones_like(y), cache)
    assert dweight[:, 0].tolist() == dweight[:, 1].tolist() == [0, 2, 0, 1]


@given(st.lists(st.integers(0, 4), max_size=12))
def test_the_gradient_of_the_table_is_the_one_hot_product(ids):
    ids = np.array(ids, np.uint16)
    dy = np.arange(1.0, 3 * len(ids) + 1).reshape(len(ids), 3)
    _, cache = embedding.forward(ids, np.zeros((5, 3)))
    assert np.array_equal(embedding.backward(dy, cache)[1], np.eye(5)[ids].T.reshape(5, -1) @ dy)


# --- cross-entropy ------------------------------------------------------------------------------------------

EXTREMES = [
    ([-431, 279, 427], 0, 858.0),
    ([-1047, -981, 1891], 0, 2938.0),
    ([1000, 0, -1000], 2, 2000.0),
    ([88.8, 88.8], 0, math.log(2)),
    ([-200] * 4, 0, math.log(4)),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize(("logits", "target", "expected"), EXTREMES)
def test_the_loss_of_extreme_logits_is_exact_and_silent(logits, target, expected, dtype):
    """N04. fp16 is only how the logits are stored: loss and gradient are computed in fp32."""
    z = np.array([logits], dtype)
    with np.errstate(all="raise", under="ignore"):
        loss, cache = cross_entropy.forward(z, np.array([target]))
        dz, none = cross_entropy.backward(np.ones(1, loss.dtype), cache)
    assert none is None
    assert loss.dtype == dz.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert loss[0] == pytest.approx(expected, rel=1e-15 if dtype == np.float64 else 1e-7)
    p = [float(np.exp(zi - np.logaddexp.reduce(z[0].astype(np.float64)))) for zi in z[0].astype(np.float64)]
    onehot = np.eye(len(logits))[target]
    np.testing.assert_allclose(dz[0], p - onehot, rtol=1e-6, atol=1e-30)
    assert abs(dz.sum()) < 1e-7


def test_the_gradient_of_a_tiny_probability_keeps_its_size():
    """N04: the first case is −1, e^(279−427) = 5.3e-65, 1."""
    _, cache = cross_entropy.forward(np.array([[-431.0, 279, 427]]), np.array([0]))
    dz, _ = cross_entropy.backward(np.ones(1), cache)
    assert dz[0].tolist() == [-1.0, pytest.approx(math.exp(-148), rel=1e-13), 1.0]


def test_log_softmax_pulled_back_with_ones():
    """N04. Label smoothing 1 leaves −(1/V)·Σ log p, so dloss = −V asks for the gradient of Σ log p."""
    _, cache = cross_entropy.forward(np.array([[0.1, 0.9]]), np.array([0]), label_smoothing=1.0)
    dz, _ = cross_entropy.backward(np.array([-2.0]), cache)
    np.testing.assert_allclose(dz[0], [0.379949, -0.379949], atol=5e-7)


@settings(max_examples=50)
@given(st.floats(0, 1), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_label_smoothing_is_the_cross_entropy_with_the_smoothed_target(epsilon, target, seed):
    z = 3 * np.random.default_rng(seed).standard_normal((1, 4))
    loss, cache = cross_entropy.forward(z, np.array([target]), label_smoothing=epsilon)
    log_p = z[0] - np.logaddexp.reduce(z[0])
    smoothed = np.full(4, epsilon / 4)
    smoothed[target] += 1 - epsilon
    assert loss[0] == pytest.approx(-smoothed @ log_p, rel=1e-13)
    dz, _ = cross_entropy.backward(np.ones(1), cache)
    np.testing.assert_allclose(dz[0], np.exp(log_p) - smoothed, atol=1e-14)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_padded_vocabulary_changes_no_bit_and_gets_no_gradient(dtype, label_smoothing):
    rng = np.random.default_rng(4)
    z, targets = rng.standard_normal((9, 100)).astype(dtype), rng.integers(0, 100, 9)
    padded = np.concatenate([z, np.full((9, 28), 1e4, dtype)], axis=1)  # large, were they looked at
    options = {"label_smoothing": label_smoothing}
    loss, cache = cross_entropy.forward(z, targets, **options)
    padded_loss, padded_cache = cross_entropy.forward(padded, targets, vocab_size=100, **options)
    assert loss.tobytes() == padded_loss.tobytes()
    dloss = rng.standard_normal(9).astype(dtype)
    dz, _ = cross_entropy.backward(dloss, cache)
    dpadded, _ = cross_entropy.backward(dloss, padded_cache)
    assert dpadded.shape == padded.shape
    assert dz.tobytes() == dpadded[:, :100].tobytes()
    assert not dpadded[:, 100:].any()


def test_ignored_targets_have_no_loss_and_no_gradient_and_change_no_other_row():
    rng = np.random.default_rng(5)
    z, targets = rng.standard_normal((6, 4)), rng.integers(0, 4, 6)
    masked = targets.copy()
    masked[[1, 4]] = cross_entropy.IGNORE
    kept = masked != cross_entropy.IGNORE
    loss, cache = cross_entropy.forward(z, masked, label_smoothing=0.1)
    all_loss, all_cache = cross_entropy.forward(z, targets, label_smoothing=0.1)
    dz, all_dz = (cross_entropy.backward(np.ones(6), c)[0] for c in (cache, all_cache))
    assert not loss[~kept].any()
    assert not dz[~kept].any()
    assert np.array_equal(loss[kept], all_loss[kept])
    assert np.array_equal(dz[kept], all_dz[kept])


@pytest.mark.parametrize("target", [-2, 5, 7])
def test_a_target_outside_the_true_vocabulary_raises(target):
    """7 is a padded column: as wrong a target as 8 would be."""
    with pytest.raises(ValueError, match=r"0…4 or be -1"):
        cross_entropy.forward(np.zeros((1, 8)), np.array([target]), vocab_size=5)


# --- dropout ------------------------------------------------------------------------------------------------

AT = {"seed": 7, "step": 3, "layer": 1}


def test_the_dropout_mask_is_a_function_of_its_coordinates():
    """N10: nothing that was drawn before can change it, so a recomputation cannot draw another one."""
    mask = dropout.keep_mask((50, 4), 0.5, **AT)
    dropout.keep_mask((3,), 0.5, seed=1, step=0, layer=0)
    assert np.array_equal(mask, dropout.keep_mask((50, 4), 0.5, **AT))
    assert np.array_equal(mask.reshape(-1)[:20], dropout.keep_mask((20,), 0.5, **AT))


def test_the_dropout_mask_is_the_documented_comparison():
    """What was trained with one rule must be recomputed with the same: k = 1 where u ≥ p·2³²."""
    draws = random.bits(200, stream=random.DROPOUT, **AT)
    assert dropout.keep_mask((200,), 0.25, **AT).tolist() == [int(u) >= 2**30 for u in draws]


@pytest.mark.parametrize("name", AT)
def test_masks_of_other_coordinates_differ(name):
    """N02: a backward pass that reused one step's mask for all would be wrong."""
    mask, other = (dropout.keep_mask((1000,), 0.5, **at) for at in (AT, AT | {name: AT[name] + 1}))
    assert 400 < np.sum(mask != other) < 600


def test_backward_applies_the_same_mask_and_factor():
    x = np.random.default_rng(6).standard_normal((5, 4, 3))
    y, cache = dropout.forward(x, 0.25, **AT)
    (dx,) = dropout.backward(np.ones_like(x), cache)
    assert np.array_equal(y, x * dropout.keep_mask(x.shape, 0.25, **AT) / 0.75)
    assert set(np.unique(dx)) == {0.0, 1 / 0.75}
    np.testing.assert_allclose(x * dx, y, rtol=1e-15)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_expectation(p):
    """The share of kept values is 1 − p within five standard errors, so the mean of y is that of x."""
    n = 40_000
    y, _ = dropout.forward(np.ones(n), p, **AT)
    assert abs(np.count_nonzero(y) / n - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
    assert y.max() == 1 / (1 - p)


def test_no_dropout_is_the_identity_to_the_last_bit():
    x = np.random.default_rng(7).standard_normal((5, 4)).astype(np.float32)
    y, cache = dropout.forward(x, 0.0, **AT)
    (dx,) = dropout.backward(x, cache)
    assert x.tobytes() == y.tobytes() == dx.tobytes()


@pytest.mark.parametrize("p", [-0.1, 1.0, math.nan])
def test_a_probability_outside_its_range_raises(p):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        dropout.forward(np.ones(3), p, **AT)


# --- gru ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset_after", [True, False])
def test_a_sequence_in_one_go_is_the_sequence_step_by_step(reset_after):
    """S03, N02: the state carries everything; T = 1 is a sequence too."""
    inputs = example("gru", "reset_after" if reset_after else "reset_before")
    y, _ = gru.forward(**inputs)
    h = inputs["h0"]
    for t in range(len(y)):
        (h,), _ = gru.forward(**inputs | {"x": inputs["x"][t : t + 1], "h0": h})
        np.testing.assert_allclose(h, y[t], rtol=0, atol=1e-15)


@pytest.mark.parametrize("reset_after", [True, False])
def test_backward_in_two_parts_with_the_last_states_gradient_is_backward_in_one_go(reset_after):
    """What enters the first part as dh_T is what leaves the second as dh0."""
    inputs = example("gru", "reset_after" if reset_after else "reset_before")
    y, *whole = run(gru, "gru", inputs)
    dy, extra = cotangents("gru", y)
    y_first, first_cache = gru.forward(**inputs | {"x": inputs["x"][:2]})
    _, second_cache = gru.forward(**inputs | {"x": inputs["x"][2:], "h0": y_first[-1]})
    dx_2, dh, *second = gru.backward(dy[2:], second_cache, **extra)
    dx_1, dh0, *first = gru.backward(dy[:2], first_cache, dh_T=dh)
    parts = [np.concatenate([dx_1, dx_2]), dh0, *(a + b for a, b in zip(first, second, strict=True))]
    for a, b in zip(parts, whole, strict=True):
        assert error(a, b) < 1e-14


@pytest.mark.parametrize("reset_after", [True, False])
def test_truncated_backpropagation_is_the_full_one_with_the_state_detached_at_the_cuts(reset_after):
    """N02, K = 2 over T = 6: the full run's recursion is written out here, cell by cell from T = 1."""
    inputs = example("gru", "reset_after" if reset_after else "reset_before") | {
        "x": np.random.default_rng(8).standard_normal((6, 3, 4))
    }
    dy = np.random.default_rng(9).standard_normal((6, 3, 6))

    truncated = [0.0] * 4
    h = inputs["h0"]
    for start in range(0, 6, 2):
        y, cache = gru.forward(**inputs | {"x": inputs["x"][start : start + 2], "h0": h})
        gradients = gru.backward(dy[start : start + 2], cache)[2:]
        truncated = [a + b for a, b in zip(truncated, gradients, strict=True)]
        h = y[-1]

    caches, h = [], inputs["h0"]
    for t in range(6):
        y, cache = gru.forward(**inputs | {"x": inputs["x"][t : t + 1], "h0": h})
        caches.append(cache)
        h = y[-1]
    detached, dh = [0.0] * 4, np.zeros((3, 6))
    for t in reversed(range(6)):
        if t in (1, 3):  # the state after steps 1 and 3 is cut off from what follows
            dh = np.zeros((3, 6))
        _, dh, *gradients = gru.backward(dy[t : t + 1], caches[t], dh_T=dh)
        detached = [a + b for a, b in zip(detached, gradients, strict=True)]
    full = gru.backward(dy, gru.forward(**inputs)[1])[2:]
    for a, b, c in zip(truncated, detached, full, strict=True):
        assert error(a, b) < 1e-14
        assert error(a, c) > 1e-3  # and truncation matters here


def test_no_state_is_a_state_of_zeros_that_gets_no_gradient():
    inputs = example("gru", "reset_after")
    _, *zeros = run(gru, "gru", inputs | {"h0": np.zeros((3, 6))})
    _, *none = run(gru, "gru", inputs | {"h0": None})
    assert none[1] is None
    for i in (0, 2, 3, 4, 5):
        assert np.array_equal(zeros[i], none[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sigmoid_of_extreme_arguments_is_exact_and_silent(dtype):
    x = np.array([-np.inf, -1e30, -800, -80, 0, 80, 800, 1e30, np.inf], dtype)
    with np.errstate(all="raise", under="ignore"):
        y = gru.sigmoid(x)
    assert y.dtype == dtype
    assert y[[0, 1, 2, 4, 5, 6, 7, 8]].tolist() == [0, 0, 0, 0.5, 1, 1, 1, 1]
    assert y[3] == pytest.approx(math.exp(-80), rel=1e-6)  # 1/(1 + e^80) keeps its digits, and 0 would not
    np.testing.assert_allclose(gru.sigmoid(-x) + y, 1)


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("size", [-1e4, 1e4])
def test_saturated_gates_are_finite_and_silent(reset_after, size):
    """z = 1 keeps the state, z = 0 replaces it by n = ±1, and no gradient passes a saturated gate."""
    inputs = example("gru", "reset_after" if reset_after else "reset_before", np.float32)
    inputs["bias_ih"] = np.full(18, size, np.float32)
    with np.errstate(all="raise", under="ignore"):
        y, *gradients = run(gru, "gru", inputs, np.float32)
    assert np.array_equal(y, np.broadcast_to(inputs["h0"] if size > 0 else np.float32(-1), y.shape))
    assert all(np.isfinite(g).all() for g in gradients)
    assert not any(g.any() for g in gradients[2:])


# --- optimizers and clipping --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", nadam.MOMENTUM_DECAY)
def test_seven_parameters_of_different_rank_take_the_same_steps(variant):
    """N05: to the last bit, so nothing advances once a tensor (test_golden_values.py has the trajectory)."""
    tensors = [[np.full((1,) * rank, value) for value in (1.0, 0.0, 0.0)] for rank in range(7)]
    product = 1.0
    for t, g in enumerate((0.5, -0.25, 0.1), start=1):
        product *= nadam.momentum(t, variant=variant)
        for params, m, v in tensors:
            grads = np.full(params.shape, g)
            nadam.step(params, grads, m, v, t=t, mu_product=product, lr=2e-3, variant=variant)
        values = [params.item() for params, _, _ in tensors]
        assert values == [values[0]] * 7
        assert values[0] != 1.0


def test_the_momentum_schedules():
    assert nadam.momentum(1) == 0.9 * (1 - 0.5 * 0.96**0.004)
    assert nadam.momentum(250, variant="torch") == pytest.approx(nadam.momentum(1, variant="keras"))
    assert nadam.momentum(1, 0.8, "constant") == nadam.momentum(99, 0.8, "constant") == 0.8
    assert nadam.momentum(10**6, variant="keras") == 0.9


def adamw_run(gradients, **options):
    params, m, v = np.ones(1), np.zeros(1), np.zeros(1)
    for t, g in enumerate(gradients, start=1):
        grads = np.full(1, g)
        adamw.step(params, grads, m, v, t=t, **({"lr": 1e-3} | options))
        assert grads[0] == g
    return params[0]


def test_adamw_follows_its_formula_in_scalar_arithmetic():
    theta, m, v = 1.0, 0.0, 0.0
    for t, g in enumerate((0.5, -0.25, 0.1), start=1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.99**t)
        theta -= 0.05 * (m_hat / (math.sqrt(v_hat) + 1e-8) + 0.2 * theta)
        expected = adamw_run((0.5, -0.25, 0.1)[:t], lr=0.05, beta2=0.99, weight_decay=0.2)
        assert theta == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("g", [1e-3, -0.5, 2.0, -1e4])
def test_adams_first_step_is_the_learning_rate_against_the_sign(g):
    """N05: wrong where t starts from 0 or 2."""
    assert adamw_run([g], eps=0.0) == pytest.approx(1 - math.copysign(1e-3, g), abs=1e-15)


def nadam_run(gradients, **options):
    params, m, v, product = np.ones(1), np.zeros(1), np.zeros(1), 1.0
    for t, g in enumerate(gradients, start=1):
        product *= nadam.momentum(t)
        grads = np.full(1, g)
        nadam.step(params, grads, m, v, t=t, mu_product=product, **({"lr": 1e-3} | options))
        assert grads[0] == g
    return params[0]


@pytest.mark.parametrize("run_optimizer", [adamw_run, nadam_run])
def test_decoupled_decay_scales_and_leaves_the_step_alone(run_optimizer):
    """N07: without a gradient a parameter is scaled by exactly 1 − lr·λ, and by nothing without decay."""
    assert run_optimizer([0.0], lr=0.01, weight_decay=0.1) == 1 - 0.01 * 0.1
    assert run_optimizer([0.0], lr=0.01) == 1.0
    decayed, plain = (run_optimizer([0.3], weight_decay=d) for d in (0.1, 0.0))
    assert decayed == pytest.approx(plain - 1e-3 * 0.1, abs=1e-16)


@pytest.mark.parametrize("run_optimizer", [adamw_run, nadam_run])
def test_l2_decay_is_a_gradient(run_optimizer):
    """The first step with λ·θ added to g is the plain one with that gradient; g itself stays as it is."""
    assert run_optimizer([0.3], weight_decay=0.1, decoupled=False) == run_optimizer([0.3 + 0.1 * 1.0])
    assert run_optimizer([0.3], weight_decay=0.1, decoupled=False) != run_optimizer([0.3])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize("op", ["adamw", "nadam"])
def test_a_step_tells_whether_parameters_and_second_moments_are_finite(op, backend, dtype, value):
    """A vector's lanes and the rest behind them; with two threads, in the part of either."""
    step, n = getattr(Backend(backend), op).step, 150_007
    with np.errstate(all="ignore"), threads.limited(2):
        for name in ("params", "v"):
            for place in (0, 5, n // 2 + 9, n - 1):
                inputs = getattr(ops, op).example(np.random.default_rng(0), n=n, dtype=dtype)
                assert step(**inputs) is True
                inputs[name][place] = value
                assert step(**inputs) is False


def test_the_global_norm_is_over_all_arrays_in_float64():
    """3-4-12-13; 2^24 + 1, which an fp32 sum cannot hold; and squares beyond fp32's range."""
    assert clip.global_norm([np.array([3.0, 4.0], np.float32), np.full((1, 1), 12.0)]) == 13.0
    assert clip.global_norm([]) == 0.0
    assert clip.global_norm([np.array([2**12, 1], np.float32)]) == math.sqrt(2**24 + 1)
    assert clip.global_norm([np.full(4, 2.0**100, np.float32)]) == 2.0**101


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_makes_a_norm_that_is_not_finite(value):
    assert not math.isfinite(clip.global_norm([np.ones(3), np.array([1.0, value])]))


@pytest.mark.parametrize(("max_norm", "factor"), [(2.5, 0.5), (5.0, 1.0), (9.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_to_the_largest_norm_and_never_up(max_norm, factor):
    assert clip.factor(5.0, max_norm) == factor


@pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": False}])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("backend", KERNEL_FOLDERS)
@pytest.mark.parametrize("op", ["adamw", "nadam"])
def test_a_step_of_scaled_gradients_is_the_step_of_their_product(op, backend, dtype, decay):
    """To the last bit, and in the twin those of the definition; the gradients stay as they are."""
    inputs = getattr(ops, op).example(np.random.default_rng(0), n=1151, dtype=dtype) | decay
    results = []
    for step, scaled in itertools.product(
        [getattr(Backend(backend), op).step, getattr(ops, op).step], [True, False]
    ):
        given = {k: v.copy() if is_float(v) else v for k, v in inputs.items()}
        if not scaled:
            given |= {"grads": inputs["grads"] * given["grad_scale"], "grad_scale": 1.0}
        before = given["grads"].tobytes()
        step(**given)
        assert given["grads"].tobytes() == before
        results.append([given[name].tobytes() for name in ("params", "m", "v")])
    assert results == results[:1] * 4


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_cross_entropy_of_an_ignored_row_has_no_gradient_whatever_its_logits(backend):
    ops = Backend(backend)
    logits = np.array([[np.nan, np.inf, 1.0], [1.0, 2.0, 3.0]])
    with np.errstate(invalid="ignore"):
        _, cache = ops.cross_entropy.forward(logits, np.array([-1, 2]))
        dlogits, _ = ops.cross_entropy.backward(np.ones(2), cache)
    assert dlogits[0].tolist() == [0, 0, 0]
    assert np.isfinite(dlogits[1]).all()
