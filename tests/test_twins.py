"""Laws of every compiled twin, found by themselves: near the definition, the same for any number of threads.

What a single twin promises beyond that stands in tests/test_backend.py.
"""

import functools
import inspect
import json
import os
import pkgutil
import subprocess
import sys

import numpy as np
import pytest

from gru_ref import Backend, accuracy, cli, ops, threads
from gru_ref.kernels import numba_cpu
from gru_ref.kernels.numba_cpu import _compile, _elementary, _product, _workspace

TWINS = sorted(m.name for m in pkgutil.iter_modules(numba_cpu.__path__) if not m.name.startswith("_"))
BOTH_WAYS = [op for op in TWINS if hasattr(getattr(ops, op), "forward") and op != "matmul"]
DTYPES = [np.float32, np.float64]
CASES = [
    pytest.param(op, case, id=f"{op}, {name}")
    for op in BOTH_WAYS
    for name, case in getattr(getattr(ops, op), "CASES", {"plain": {}}).items()
]


@pytest.fixture
def twins():
    return Backend("numba")


@pytest.fixture(autouse=True)
def _two_threads_for_the_smallest_work(monkeypatch):
    for limit in ("_WORTH_ALONE", "_WORTH_AMONG_OTHERS"):
        monkeypatch.setattr(threads, limit, 1e-9)


def run(functions, inputs, dy=None):
    """Output, cache and gradients; dy of the first output's shape, the same for the same shape."""
    y, cache = functions.forward(**inputs)
    dy = np.random.default_rng(2).standard_normal(y.shape).astype(y.dtype)
    return y, cache, functions.backward(dy, cache), dy


def example(op, case, dtype, **sizes):
    return getattr(ops, op).example(np.random.default_rng(1), dtype=dtype, **case, **sizes)


def arrays(*values):
    """All arrays within nested tuples."""
    for value in values:
        if isinstance(value, np.ndarray):
            yield value
        elif isinstance(value, tuple):
            yield from arrays(*value)


def assert_near(actual, expected, dtype):
    """To 64 units in the last place of the largest value: small enough for any wrong term to show."""
    if expected is None:
        assert actual is None
        return
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite], equal_nan=True)
    bound = 64 * np.finfo(dtype).eps * max(1, np.abs(expected[finite]).max(initial=0))
    assert np.abs(actual - expected)[finite].max(initial=0) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_a_twin_agrees_with_its_definition_in_every_case_and_their_caches_mix(op, case, dtype, twins):
    definition, twin = Backend("numpy"), getattr(twins, op)
    definition = getattr(definition, op)
    sizes = {"T": 17} if op == "gru" and "T" not in case else {}
    inputs = example(op, case, dtype, **sizes)
    before = [a.tobytes() for a in arrays(*inputs.values())]
    y, cache, gradients, dy = run(definition, inputs)
    fast_y, fast_cache, fast_gradients, _ = run(twin, inputs)
    assert_near(fast_y, y, dtype)
    for from_cache in (fast_gradients, twin.backward(dy, cache), definition.backward(dy, fast_cache)):
        for actual, expected in zip(from_cache, gradients, strict=True):
            assert_near(actual, expected, dtype)
    assert [a.tobytes() for a in arrays(*inputs.values())] == before
    assert [type(part) for part in fast_cache] == [type(part) for part in cache]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", TWINS)
def test_the_errors_that_the_command_prints_are_those_of_rounding(op, dtype, twins):
    rows = accuracy.errors(op, dtype, twins)
    assert {row["function"] for row in rows} == twins.twins(op).keys() - {"keep_mask"}
    for row in rows:
        bound = 32 if row["definition"] is None else 4 + 2 * row["definition"]
        assert row["twin"] <= bound, row


def test_a_wrong_twin_would_show(monkeypatch, twins):
    """The check is able to fail: a thousandth off is hundreds of units."""
    right = twins.gelu.forward

    @functools.wraps(right)
    def wrong(*arguments, **options):
        y, cache = right(*arguments, **options)
        return y * np.float32(1.001), cache

    monkeypatch.setattr(twins.gelu, "forward", wrong)
    (row,) = [row for row in accuracy.errors("gelu", np.float32, twins) if row["function"] == "forward"]
    assert row["twin"] > 100


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D"), [(4, 16), (3, 21)])
def test_attention_drops_the_same_probabilities_where_there_are_more_than_vectors_hold(N, D, dtype, twins):
    """N of 4 and of 3: four draws belong together, of four heads or across sequences."""
    inputs = example("attention_blocked", {"dropout": 0.2}, dtype, T=70, S=75, B=3, N=N, D=D, offset=5)
    y, _, gradients, dy = run(Backend("numpy").attention_blocked, inputs)
    fast_y, _, fast_gradients, _ = run(twins.attention_blocked, inputs, dy)
    for actual, expected in zip((fast_y, *fast_gradients), (y, *gradients), strict=True):
        assert_near(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [op for op in BOTH_WAYS if op != "linear"])
def test_a_twin_gives_the_same_bits_for_any_number_of_threads(op, dtype, twins):
    """BLAS may not, in products of other sizes (linear; a GRU, so that is compared within rounding)."""
    inputs = example(op, {}, dtype, **accuracy.SIZES.get(op, {}))
    for name in accuracy._SMALLER.get(op, ()):
        inputs[name] = inputs[name] / 8
    results = []
    for n in (1, 2, 3):
        with threads.limited(n):
            y, _, gradients, _ = run(getattr(twins, op), inputs)
            results.append([y, *(g for g in gradients if g is not None)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            if op in ("embedded_gru", "gru"):
                assert_near(a, b, dtype)
            else:
                assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("op", BOTH_WAYS)
def test_twins_take_views_that_are_strided_and_read_only(op, twins):
    inputs = example(op, {}, np.float32, **({"T": 17} if op == "gru" else {}))
    views = {
        k: np.repeat(v, 2, axis=-1)[..., ::2] if isinstance(v, np.ndarray) else v for k, v in inputs.items()
    }
    for v in arrays(*views.values()):
        v.flags.writeable = False
    expected = run(getattr(twins, op), inputs)
    actual = run(getattr(twins, op), views)
    assert_near(actual[0], expected[0], np.float32)
    for a, b in zip(actual[2], expected[2], strict=True):
        assert_near(a, b, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("M", "K", "N"), [(1, 1, 1), (3, 300, 1151), (33, 257, 100), (64, 17, 49), (9, 512, 48), (21, 9, 72)]
)
def test_both_matrix_products_are_right_for_awkward_sizes_and_layouts(M, K, N, dtype):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((K, N)).astype(dtype)
    wide = _product.whole_vectors(N, a.itemsize)
    row = np.zeros(wide, dtype)
    row[:N] = rng.standard_normal(N)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    tolerance = 4 * K * np.finfo(dtype).eps * (np.abs(exact).max() + np.abs(row).max())
    for left in (a, np.asfortranarray(a)):
        for right in (b, np.asfortranarray(b)):
            assert np.abs(_product.product(left, right) - exact).max() <= tolerance
            panels = _product.packed(right)
            c = np.full((M, wide), np.nan, dtype)
            _run_multiply(left, panels, row, c, N)
            assert np.abs(c[:, :N] - exact - row[:N]).max() <= tolerance
            some = np.full((M, wide), np.nan, dtype)
            _run_multiply(left, panels, row, some, N // 2)
            assert np.array_equal(some[:, : N // 2], c[:, : N // 2])
            _run_multiply_add(left, panels, c)
            assert np.abs(c[:, :N] - 2 * exact - row[:N]).max() <= 2 * tolerance
    assert np.array_equal(_product.product(a, b, a[0, :1].repeat(N)), _product.product(a, b) + a[0, 0])


@_compile.compiled("T[:, :], T[::1], T[::1], T[:, ::1], intp")
def _run_multiply(a, panels, row, c, columns):
    _product.multiply(a, panels, a.shape[1], row, c, columns)


@_compile.compiled("T[:, :], T[::1], T[:, ::1]")
def _run_multiply_add(a, panels, c):
    _product.multiply_add(a, panels, a.shape[1], c)


@pytest.mark.parametrize(
    ("name", "function"), [("sigmoid", lambda x: 1 / (1 + np.exp(-x))), ("tanh", np.tanh)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gates_functions_keep_nan_and_reach_their_limits(name, function, dtype):
    x = np.array([np.nan, np.inf, -np.inf, 0, 1e-30, -1e-30, 60, -60, 1e30, -1e30], dtype)
    with np.errstate(over="ignore"):
        expected = function(x)
    assert np.allclose(_elementary.over(name, x), expected, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_the_elementary_functions_are_within_their_stated_units_in_the_last_place():
    stated = {"exp": 1.1, "sigmoid": 2.6, "tanh": 2.6}
    assert {
        row["function"]: row["ulp"] <= stated[row["function"]] for row in accuracy.elementary_errors()
    } == (dict.fromkeys(stated, True))


def test_the_command_prints_the_errors(capsys):
    assert cli.run(["backends", "--errors", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["op"] for row in printed["errors"]} >= {"gru", "attention_blocked", "adamw"}
    assert [row["function"] for row in printed["elementary"]] == ["exp", "sigmoid", "tanh"]
    assert cli.run(["backends", "--errors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["op", "function", "result", "dtype", "twin", "definition"]
    assert sum(line.startswith("gru ") for line in lines) == sum(r["op"] == "gru" for r in printed["errors"])


# --- memory -----------------------------------------------------------------------------------------------


def test_memory_is_used_again_once_nothing_refers_to_it(monkeypatch):
    monkeypatch.setattr(_workspace, "_free", {})
    a = _workspace.empty((300, 400), np.float32)
    view, address = a[1:, ::2], a.ctypes.data
    del a
    other = _workspace.empty((300, 400), np.float32)
    assert other.ctypes.data != address  # a view still refers to the first
    del view
    again = _workspace.empty((400, 300), np.int32)  # another shape of as many bytes
    assert again.ctypes.data == address
    assert again.flags.c_contiguous
    assert again.flags.writeable


def test_memory_goes_to_an_array_of_a_few_rows_less_and_gives_place_to_one_of_a_few_more(monkeypatch):
    """A window that its slices do not divide once held the arrays of both lengths, a quarter of its peak."""

    def sizes():
        return sorted(size for size, blocks in _workspace._free.items() for _ in blocks)

    monkeypatch.setattr(_workspace, "_free", {})
    for rows, largest in [(32, 32), (33, 33), (32, 33), (33, 33)]:
        arrays = [_workspace.empty((rows, 64, 128), np.float32) for _ in range(5)]
        del arrays
        assert sizes() == [2**15 * largest] * 5
    other = _workspace.empty((32, 128, 64), np.float32)  # of other rows, so it may be needed beside them
    del other
    assert sizes() == [2**20, *[33 * 2**15] * 5]
    whole = _workspace.empty((64, 64, 128), np.float32)  # nothing near its size is free
    del whole
    assert sizes() == [2**20, *[33 * 2**15] * 5, 2**21]


def test_memory_that_is_not_asked_for_is_returned(monkeypatch):
    monkeypatch.setattr(_workspace, "_free", {})
    monkeypatch.setattr(_workspace, "_OLD", 3)
    for n in (100_000, 200_000, 300_000, 400_000, 500_000):
        _workspace.empty(n, np.uint8)
    assert sum(len(blocks) for blocks in _workspace._free.values()) <= 3


def test_every_option_of_accuracy_is_one_of_the_example():
    for op, sizes in accuracy.SIZES.items():
        parameters = inspect.signature(getattr(ops, op).example).parameters
        assert "options" in parameters or sizes.keys() <= parameters.keys()


def test_without_compiling_the_loops_written_for_llvm_are_the_same_in_python():
    """NUMBA_DISABLE_JIT=1, which a reader with a debugger sets."""
    script = """
import numpy as np
from gru_ref.kernels.numba_cpu import attention_blocked as twin, gru as gru_twin
from gru_ref.ops import attention_blocked, gru
rng = np.random.default_rng(0)
q, k, v, dy = (rng.standard_normal((9, 2, 2, 10)) for _ in range(4))
w = [rng.standard_normal(shape) for shape in ((27, 7), (27, 9), 27, 27)]
x, dh = rng.standard_normal((6, 3, 7)), rng.standard_normal((6, 3, 9))
for a, b, inputs, back in ((twin, attention_blocked, (q, k, v), dy), (gru_twin, gru, (x, None, *w), dh)):
    (y, cache), (y_b, cache_b) = a.forward(*inputs), b.forward(*inputs)
    for p, z in zip((y, *a.backward(back, cache)), (y_b, *b.backward(back, cache_b))):
        assert p is z is None or np.abs(p - z).max() < 1e-13
"""
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
def test_the_matrix_products_are_right_in_the_vectors_of_other_cpus(vector_bytes, tmp_path):
    """The tiles for AVX-512, AVX2 and neither, made of the vectors that this CPU has."""
    script = f"""
import sys
import llvmlite.binding as llvm, numba, pytest
numba.njit("intp(intp)")(lambda x: x)  # by now numba knows the real CPU
features = llvm.FeatureMap(avx2={vector_bytes >= 32}, avx512f={vector_bytes == 64})
read, llvm.get_host_cpu_features = llvm.get_host_cpu_features, lambda: features
from gru_ref.kernels.numba_cpu import _tile
llvm.get_host_cpu_features = read
assert _tile.VECTOR_BYTES == {vector_bytes}
chosen = [{__file__!r}, "-k", "both_matrix_products and float32"]
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *chosen]))
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert "6 passed" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_of_float64_has_the_definitions_dtype_in_every_precision(precision, bias, twins):
    inputs = example("linear", {"bias": bias, "lead": (20,)}, np.float64) | {"precision": precision}
    y, _, gradients, dy = run(Backend("numpy").linear, inputs)
    fast_y, _, fast_gradients, _ = run(twins.linear, inputs, dy)
    for actual, expected in zip((fast_y, *fast_gradients), (y, *gradients), strict=True):
        assert_near(actual, expected, np.float64 if precision == "fp32" else np.float32)


def test_a_nan_that_dropout_leaves_out_is_still_seen_in_the_gradients(twins):
    """0 · NaN is NaN in the definition, so a broken value is found whatever the draw."""
    inputs = example("attention_blocked", {"dropout": 0.5}, np.float32, T=3, S=28, B=1, N=2, D=1, offset=25)
    for seed in range(20):
        inputs["seed"] = seed
        inputs["v"][0] = np.nan
        _, _, gradients, dy = run(Backend("numpy").attention_blocked, inputs)
        _, _, fast_gradients, _ = run(twins.attention_blocked, inputs, dy)
        for actual, expected in zip(fast_gradients, gradients, strict=True):
            assert np.array_equal(np.isnan(actual), np.isnan(expected))
