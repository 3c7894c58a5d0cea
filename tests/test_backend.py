"""Backends: every twin file is really used, and a twin is its definition but for speed.

Results are compared with the definition's in the same dtype. The optimizers must agree to the last bit.
Elsewhere sums are in another order: within 1e-14 in float64 and 4 units of 2⁻²³ in float32, relative to the
size of what is summed.
"""

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys

import numpy as np
import pytest

from gru_ref import Backend, cli, ops, threads
from gru_ref.backend import KERNEL_FOLDERS, public_functions
from gru_ref.errors import BackendError
from gru_ref.kernels import numba_cpu
from gru_ref.kernels.numba_cpu import _compile, _product, _recurrence
from gru_ref.ops import adamw, cross_entropy, embedded_gru, embedding, gru, nadam
from gru_ref.ops.cross_entropy import IGNORE

TWIN_FILES = sorted(m.name for m in pkgutil.iter_modules(numba_cpu.__path__) if not m.name.startswith("_"))
TWINS = {
    (op, name): function
    for op in TWIN_FILES
    for name, function in public_functions(importlib.import_module(f"gru_ref.kernels.numba_cpu.{op}")).items()
}
DTYPES = [np.float32, np.float64]
TOLERANCE = {np.dtype(np.float32): 4 * 2.0**-23, np.dtype(np.float64): 1e-14}
OPTIMIZERS = {"adamw": adamw, "nadam": nadam}


@pytest.fixture
def twins():
    return Backend("numba")


@pytest.fixture
def kernel_calls(monkeypatch):
    """The names of the kernels that are called, by one thread so that each is called once."""
    calls = []
    call = _compile.Kernel.__call__

    def spy(kernel, *arguments):
        calls.append(kernel.function.__name__)
        call(kernel, *arguments)

    monkeypatch.setattr(_compile.Kernel, "__call__", spy)
    with threads.limited(1):
        yield calls


def assert_close(actual, expected, size=None):
    """Within TOLERANCE of `size`, by default |expected| or 1 if that is larger; NaN and ∞ where they were."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    finite = np.isfinite(expected)
    assert np.array_equal(actual[~finite], expected[~finite], equal_nan=True)
    size = np.maximum(1, np.abs(expected)) if size is None else size
    with np.errstate(invalid="ignore"):  # ∞ − ∞ and ∞ · 0, where there are not compared
        error = np.abs(actual - expected, dtype=np.float64) - TOLERANCE[expected.dtype] * size
    assert np.all(error[finite] <= 0), error[finite].max()


def copies(inputs):
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in inputs.items()}


# --- which function serves what ---------------------------------------------------------------------------


def test_every_twin_file_is_selected():
    """A file that no operation asks for, or whose functions are not picked, would fall back in silence."""
    assert TWIN_FILES
    assert set(TWIN_FILES) <= set(ops.names())
    numba, numpy = Backend("numba"), Backend("numpy")
    assert {op for op, _ in TWINS} == set(TWIN_FILES)
    for (op, name), twin in TWINS.items():
        assert getattr(getattr(numba, op), name) is twin
        assert getattr(getattr(numpy, op), name) is getattr(getattr(ops, op), name)


@pytest.mark.parametrize(("op", "name"), TWINS)
def test_a_twin_has_the_signature_of_its_definition(op, name):
    assert inspect.signature(TWINS[op, name]) == inspect.signature(getattr(getattr(ops, op), name))


def test_the_table_has_every_function_and_what_serves_it():
    rows = {(row["op"], row["function"]): row["served_by"] for row in Backend("numba").table()}
    functions = {
        (op, name) for op in ops.names() for name in public_functions(getattr(ops, op)) if name != "example"
    }
    assert rows.keys() == functions
    for op, name in functions:
        folder = "kernels.numba_cpu" if (op, name) in TWINS else "ops"
        assert rows[op, name] == f"gru_ref.{folder}.{op}"


def test_an_unknown_backend_is_an_error_that_names_the_known_ones():
    with pytest.raises(BackendError, match="unknown backend 'cuda'; known: numpy, numba"):
        Backend("cuda")


@pytest.mark.parametrize("body", ["", "def forwards(x, p):\n    return x, ()\n", "from math import sqrt\n"])
@pytest.mark.parametrize("defined", ["", "def forward(x, p):\n    return x, ()\n"])
def test_a_twin_file_that_redefines_nothing_or_adds_something_is_an_error(
    body, defined, tmp_path, monkeypatch
):
    (tmp_path / "attention.py").write_text(body + defined)
    monkeypatch.setattr(numba_cpu, "__path__", [*numba_cpu.__path__, str(tmp_path)])
    name = "gru_ref.kernels.numba_cpu.attention"
    monkeypatch.setitem(sys.modules, name, None)  # so that what is imported now is taken out again
    del sys.modules[name]
    monkeypatch.setattr(numba_cpu, "attention", None, raising=False)
    if defined and "forwards" not in body:
        assert Backend("numba").attention.forward.__module__ == name
        assert Backend("numba").attention.backward.__module__ == "gru_ref.ops.attention"
    else:
        with pytest.raises(BackendError, match=r"numba_cpu/attention\.py must redefine public functions"):
            _ = Backend("numba").attention


def test_numba_is_imported_by_the_numba_backend_only_and_its_absence_is_one_line():
    """E01: importing the package and running the definitions needs no numba, not even a working one."""
    script = (
        "import sys, gru_ref\n"
        "sys.modules['numba'] = None\n"  # importing it raises ImportError
        "assert gru_ref.Backend('numpy').table()\n"
        "try: gru_ref.Backend('numba').embedding\n"
        "except gru_ref.GruRefError as error: print(error)\n"
        "from gru_ref.cli import run\n"
        "print(run(['backends']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("numba cannot be used here (")
    assert lines[0].endswith("take --kernels numpy")
    assert lines[-2:] == [f"numba: not usable: {lines[0]}", "0"]


def test_the_command_shows_the_table_plain_and_whole(capsys):
    assert cli.run(["backends"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["op", "function", "numpy", "numba"]
    assert ["embedding", "backward", "ops.embedding", "kernels.numba_cpu.embedding"] in rows
    assert ["embedding", "forward", "ops.embedding", "ops.embedding"] in rows
    assert len(rows) == 1 + len(Backend("numpy").table())


def test_the_command_prints_json(capsys):
    assert cli.run(["backends", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["unusable"] == {}
    assert {
        "op": "nadam",
        "function": "step",
        "numpy": "gru_ref.ops.nadam",
        "numba": "gru_ref.kernels.numba_cpu.nadam",
    } in printed["functions"]


# --- optimizers -------------------------------------------------------------------------------------------

OPTIONS = {"lr": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.2, "decoupled": False}
"""No default among them; Nadam has one more."""
DECAYS = [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": False}]


def assert_same_steps(op, inputs, steps=3):
    """The same steps by twin and definition leave the same bits, and the gradients as they were."""
    actual, expected = copies(inputs), copies(inputs)
    with np.errstate(all="ignore"):
        for t in range(1, steps + 1):
            getattr(Backend("numba"), op).step(**actual | {"t": t})
            OPTIMIZERS[op].step(**expected | {"t": t})
    for key in ("params", "m", "v"):
        assert actual[key].tobytes() == expected[key].tobytes(), key
        assert actual[key].size == 0 or not np.array_equal(actual[key], inputs[key])
    assert actual["grads"].tobytes() == inputs["grads"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", DECAYS, ids=["no decay", "decoupled", "L2"])
@pytest.mark.parametrize("n", [0, 1, 7, 1151])
@pytest.mark.parametrize("op", OPTIMIZERS)
def test_an_optimizer_twin_leaves_the_same_bits(op, n, decay, dtype, kernel_calls):
    assert_same_steps(op, OPTIMIZERS[op].example(np.random.default_rng(n), n, dtype) | decay)
    assert kernel_calls == ["_update"] * 3


@pytest.mark.parametrize("variant", ["torch", "keras", "constant"])
def test_the_nadam_twin_has_every_momentum_schedule(variant):
    assert_same_steps("nadam", nadam.example(np.random.default_rng(0), 5) | OPTIONS | {"variant": variant})


def test_the_adamw_twin_has_every_option():
    assert_same_steps("adamw", adamw.example(np.random.default_rng(0), 5) | OPTIONS)


@pytest.mark.parametrize("op", OPTIMIZERS)
def test_an_optimizer_twin_takes_matrices_and_keeps_nan_infinity_and_subnormals(op, kernel_calls):
    inputs = OPTIMIZERS[op].example(np.random.default_rng(0), 15, np.float32)
    inputs = {k: v.reshape(3, 5) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    inputs["grads"][0] = [np.nan, np.inf, -np.inf, 1e-42, 3e38]
    inputs["params"][1, :2] = [np.nan, np.inf]
    inputs["m"][2, :2] = [1e-42, -1e-45]
    assert_same_steps(op, inputs)
    assert kernel_calls == ["_update"] * 3


def strided(inputs):
    """Every second element of arrays twice as long."""
    return inputs | {k: np.repeat(v, 2)[::2] for k, v in inputs.items() if isinstance(v, np.ndarray)}


def in_reverse(inputs):
    """A view whose base is contiguous, and which is not itself."""
    return inputs | {"m": inputs["m"][::-1]}


def with_wide_gradients(inputs):
    return inputs | {"grads": inputs["grads"].astype(np.float64)}


def with_frozen_gradients(inputs):
    inputs["grads"].flags.writeable = False
    return inputs


@pytest.mark.parametrize("change", [strided, in_reverse, with_wide_gradients, with_frozen_gradients])
@pytest.mark.parametrize("op", OPTIMIZERS)
def test_what_an_optimizer_kernel_cannot_take_gets_the_definition(op, change, kernel_calls):
    def changed():
        example = OPTIMIZERS[op].example(np.random.default_rng(0), 9, np.float32)
        return change(example | OPTIONS | ({"variant": "keras"} if op == "nadam" else {}))

    actual, expected = changed(), changed()
    getattr(Backend("numba"), op).step(**actual)
    OPTIMIZERS[op].step(**expected)
    for key in ("params", "m", "v"):
        assert actual[key].tobytes() == expected[key].tobytes()
    assert kernel_calls == []


@pytest.mark.parametrize("key", ["params", "m", "v"])
@pytest.mark.parametrize("op", OPTIMIZERS)
def test_an_optimizer_twin_refuses_read_only_arrays_and_other_shapes(op, key, twins):
    inputs = OPTIMIZERS[op].example(np.random.default_rng(0), 9)
    with pytest.raises(ValueError, match="broadcast"):
        getattr(twins, op).step(**copies(inputs) | {key: np.zeros(4)})
    inputs[key].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        getattr(twins, op).step(**inputs)


# --- GRU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNEL_FOLDERS)
def test_an_embeddings_row_that_no_id_names_does_not_matter(kernels):
    """Products over the whole table would carry its NaN or ∞ into dW, by way of 0 · ∞."""
    inputs = embedded_gru.example(np.random.default_rng(0), V=5, T=9)
    inputs["ids"] %= 4
    results = []
    for last in (1.0, np.inf, np.nan):
        inputs["table"][4] = last
        y, cache = Backend(kernels).embedded_gru.forward(**inputs)
        results.append([y, *Backend(kernels).embedded_gru.backward(np.ones_like(y), cache)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is b is None or np.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_gru_layer_multiplies_each_token_of_the_vocabulary_once(dtype, twins, monkeypatch):
    sizes = []
    right = _recurrence.steps
    monkeypatch.setattr(
        _recurrence, "steps", lambda gates, *rest: sizes.append(len(gates)) or right(gates, *rest)
    )
    for V, rows in ((13, 13), (14, 27)):  # at most half of 27 tokens, and more
        inputs = embedded_gru.example(np.random.default_rng(0), V=V, T=9, dtype=dtype)
        twins.embedded_gru.forward(**inputs)
        assert sizes.pop() == rows


@pytest.mark.parametrize("T", [1, 2, 5])
def test_a_first_state_of_zeros_is_as_one_that_is_given(T, twins):
    """The twin does not multiply it. Enough sequences for the kernel, for a single step too."""
    inputs = gru.example(np.random.default_rng(0), T=T, B=20, h0=False)
    results = []
    for h0 in (None, np.zeros((20, 6))):
        y, cache = twins.gru.forward(**inputs | {"h0": h0})
        results.append([y, *twins.gru.backward(np.ones_like(y), cache)])
    assert results[0][2] is None
    for i in (0, 1, 3, 4, 5, 6):
        np.testing.assert_allclose(results[0][i], results[1][i], rtol=0, atol=1e-13)


def test_recurrent_weights_too_large_for_the_caches_give_the_same_values(twins):
    """Their panels are fetched ahead of time, in a tile of its own."""
    H = 840
    assert 3 * H * H * 4 > _product._FAR
    inputs = gru.example(np.random.default_rng(0), T=2, B=20, H=H, dtype=np.float32)
    for name in ("weight_ih", "weight_hh"):
        inputs[name] /= 32
    y, cache = twins.gru.forward(**inputs)
    expected, _ = gru.forward(**inputs)
    assert_close(y, expected, 4)
    dy = np.ones_like(y)
    for actual, true in zip(twins.gru.backward(dy, cache), gru.backward(dy, cache), strict=True):
        assert_close(actual, true, 8 * np.maximum(1, np.abs(true).max()))


# --- embedding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("N", "V", "E"), [(1, 1, 1), (1, 3, 1151), (1151, 7, 1), (1151, 1151, 5), (40, 9, 33)]
)
def test_the_embedding_twin_adds_what_the_definition_adds(N, V, E, dtype, twins, kernel_calls):
    rng = np.random.default_rng(N)
    dy, ids = rng.standard_normal((N, E)).astype(dtype), rng.integers(0, V, N)
    before = dy.tobytes(), ids.tobytes()
    none, dweight = twins.embedding.backward(dy, (ids, V))
    assert none is None
    assert kernel_calls == ["_add_rows"]
    assert (dy.tobytes(), ids.tobytes()) == before
    size = embedding.backward(np.abs(dy), (ids, V))[1]
    assert_close(dweight, embedding.backward(dy, (ids, V))[1], size)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.uint64])
def test_the_embedding_twin_takes_all_integers_leading_axes_and_views(kind, twins, kernel_calls):
    ids = np.array([[2, 0, 2], [1, 0, 2]], kind)
    ids.flags.writeable = False
    dy = np.broadcast_to(np.arange(6.0).reshape(2, 3, 1), (2, 3, 4))  # strided and read-only
    _, dweight = twins.embedding.backward(dy, (ids, 4))
    assert dweight.tolist() == [[5.0] * 4, [3.0] * 4, [7.0] * 4, [0.0] * 4]
    assert kernel_calls == ["_add_rows"]


@pytest.mark.parametrize(
    ("ids", "dtype"), [([0, -1, 2], "f8"), ([], "f8"), ([0, 2, 0], "f2"), ([0, 2, 0], ">f4")]
)
def test_what_the_embedding_kernel_cannot_take_gets_the_definition(ids, dtype, twins, kernel_calls):
    ids = np.array(ids, np.int64)
    dy = np.arange(2.0 * len(ids)).reshape(-1, 2).astype(dtype)
    expected = embedding.backward(dy, (ids, 3))[1]
    assert twins.embedding.backward(dy, (ids, 3))[1].tobytes() == expected.tobytes()
    assert kernel_calls == []


@pytest.mark.parametrize("ids", [[0, 3], [-4, 0], [0.0, 1.0]])
def test_the_embedding_twin_refuses_what_the_definition_refuses(ids, twins):
    for functions in (embedding, twins.embedding):
        with pytest.raises(IndexError):
            functions.backward(np.ones((2, 2)), (np.array(ids), 3))


# --- cross-entropy ----------------------------------------------------------------------------------------


def both_ways(forward, backward, inputs):
    """Loss, gradient of the logits and cache, for a cotangent that is the same for the same inputs."""
    loss, cache = forward(**inputs)
    dloss = np.random.default_rng(5).standard_normal(loss.shape).astype(loss.dtype)
    dlogits, none = backward(dloss, cache)
    assert none is None
    return loss, dlogits, cache


def assert_twin_agrees(inputs):
    """Values, gradients and caches, with forward and backward from either side (which bisects bugs)."""
    twin, before = Backend("numba").cross_entropy, copies(inputs)
    with np.errstate(all="ignore"):
        loss, dlogits, cache = both_ways(cross_entropy.forward, cross_entropy.backward, inputs)
        for forward in (cross_entropy.forward, twin.forward):
            for backward in (cross_entropy.backward, twin.backward):
                actual = both_ways(forward, backward, inputs)
                assert_close(actual[0], loss)
                assert_close(actual[1], dlogits)
                assert_close(actual[2][0], cache[0])
                assert actual[2][1] is inputs["targets"]
                assert actual[2][2:] == cache[2:]
    assert inputs["logits"].tobytes() == before["logits"].tobytes()
    assert inputs["targets"].tobytes() == before["targets"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("N", "V", "padding"), [(1, 1, 0), (2, 1, 1), (1, 1151, 1), (1151, 5, 3), (33, 100, 28)]
)
def test_the_cross_entropy_twin_agrees(N, V, padding, label_smoothing, dtype, kernel_calls):
    rng = np.random.default_rng(N)
    assert_twin_agrees(cross_entropy.example(rng, N, V, padding, label_smoothing, dtype))
    assert kernel_calls == ["_softmax_minus_target", "_log_softmax", "_log_softmax", "_softmax_minus_target"]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_cross_entropy_twin_takes_logits_stored_in_fp16(label_smoothing, kernel_calls):
    inputs = cross_entropy.example(np.random.default_rng(0), 9, 11, 2, label_smoothing, np.float16)
    assert_twin_agrees(inputs)
    assert Backend("numba").cross_entropy.forward(**inputs)[0].dtype == np.float32
    assert "_log_softmax" in kernel_calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_the_cross_entropy_twin_keeps_infinity_nan_and_extremes(label_smoothing, dtype):
    """−∞ masks a token; a row with NaN or ∞ is NaN, even one that is ignored, so that it is found."""
    z = np.array(
        [
            [0, -np.inf, 1, 2],
            [0, 1, np.nan, 2],
            [0, np.inf, 1, 2],
            [-np.inf, -np.inf, -np.inf, -np.inf],
            [1e4, -1e4, 0, 1e4],
            [3e38, -3e38, 0, 1],
            [0, 1, 2, np.nan],
        ],
        dtype,
    )
    targets = np.array([2, 0, 0, 0, 1, 1, IGNORE])
    assert_twin_agrees({"logits": z, "targets": targets, "label_smoothing": label_smoothing})


def test_the_cross_entropy_twin_takes_views_and_any_integers():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((20, 12)).astype(np.float32)
    for logits in (z.T[:, :9], z[:12, ::-1], z[::2][:6], np.broadcast_to(z[0], (4, 12))):
        for kind in (np.int8, np.int64, np.uint16):
            targets = rng.integers(0, 9, len(logits)).astype(kind)
            targets.flags.writeable = False
            assert_twin_agrees({"logits": logits, "targets": targets, "vocab_size": 9})


def test_the_cross_entropy_twin_sums_a_large_vocabulary_in_float64():
    """One by one in float32, 50,257 terms would cost about 20 units in the loss's last place."""
    z = np.random.default_rng(0).standard_normal((8, 50_257)).astype(np.float32)
    targets = np.arange(8)
    loss, _ = Backend("numba").cross_entropy.forward(z, targets)
    exact, _ = cross_entropy.forward(z.astype(np.float64), targets)
    assert np.max(np.abs(loss - exact) / np.spacing(loss)) < 2


@pytest.mark.parametrize("targets", [[0, 5], [-2, 0]])
def test_the_cross_entropy_twin_refuses_targets_outside_the_vocabulary(targets, twins):
    with pytest.raises(ValueError, match=r"targets must lie in 0…4 or be -1 \(ignored\)"):
        twins.cross_entropy.forward(np.zeros((2, 7)), np.array(targets), vocab_size=5)


def test_no_rows_are_no_losses(twins):
    loss, cache = twins.cross_entropy.forward(np.zeros((0, 3)), np.zeros(0, np.int64))
    assert loss.shape == (0,)
    assert twins.cross_entropy.backward(loss, cache)[0].shape == (0, 3)


WRONG_SHAPES = {
    "gru": {"T": 4, "B": 20, "I": 17, "H": 17},
    "embedded_gru": {"T": 4, "B": 20, "E": 17, "H": 17, "V": 30},
    "layer_norm": {},
    "linear": {},
    "gelu": {},
    "attention_blocked": {"T": 5, "S": 5},
    "cross_entropy": {},
    "dropout": {},
    "matmul": {},
}


def outcome(backend, op, change):
    """What a forward and backward pass give, or the kind of their error."""
    inputs = getattr(backend, op).example(np.random.default_rng(0), **WRONG_SHAPES[op], dtype=np.float32)
    name, resized = change
    try:
        y, cache = getattr(backend, op).forward(
            **inputs | ({name: resized(inputs[name])} if name != "dy" else {})
        )
        dy = np.ones_like(y)
        return [y, *getattr(backend, op).backward(resized(dy) if name == "dy" else dy, cache)]
    except (ValueError, IndexError) as error:
        return [type(error)]


@pytest.mark.parametrize("more", [-1, 1])
@pytest.mark.parametrize("op", WRONG_SHAPES)
def test_no_twin_reads_beyond_an_array_of_another_shape(op, more):
    """What does not fit is the definition's to refuse, or to broadcast."""
    example = getattr(ops, op).example(np.random.default_rng(0), **WRONG_SHAPES[op])
    arrays = {name: a.ndim for name, a in example.items() if isinstance(a, np.ndarray)}
    for name, ndim in {**arrays, "dy": np.ndim(getattr(ops, op).forward(**example)[0])}.items():
        for axis in range(ndim):
            change = name, lambda a, axis=axis: np.take(a, range(a.shape[axis] + more), axis, mode="wrap")
            expected, actual = (outcome(Backend(kernels), op, change) for kernels in KERNEL_FOLDERS)
            assert len(actual) == len(expected), (name, axis)
            for a, b in zip(actual, expected, strict=True):
                if isinstance(b, np.ndarray):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=f"{name} {axis}")
                else:
                    assert a is b, (name, axis)


@pytest.mark.parametrize("op", ["gru", "embedded_gru"])
def test_a_gru_twin_refuses_a_last_states_gradient_of_another_shape(op, twins):
    inputs = getattr(ops, op).example(np.random.default_rng(0), **WRONG_SHAPES[op])
    y, cache = getattr(twins, op).forward(**inputs)
    with pytest.raises(ValueError, match="shape"):
        getattr(twins, op).backward(np.ones_like(y), cache, np.ones((19, 17)))


@pytest.mark.parametrize("shape", [(5, 4), (6, 3)])
def test_the_embedding_twin_refuses_a_total_of_another_shape(shape, twins):
    inputs = embedding.example(np.random.default_rng(0), V=6, E=4)
    y, cache = twins.embedding.forward(**inputs)
    with pytest.raises((ValueError, IndexError)):
        embedding.backward(np.ones_like(y), cache, np.zeros(shape))
    with pytest.raises((ValueError, IndexError)):
        twins.embedding.backward(np.ones_like(y), cache, np.zeros(shape))


def test_a_query_alone_refuses_keys_and_values_of_other_shapes(twins):
    inputs = ops.attention_blocked.example(np.random.default_rng(0), T=1, S=5) | {"offset": 4}
    with pytest.raises(ValueError, match="mismatch"):
        twins.attention_blocked.forward(**inputs | {"k": inputs["k"][..., :-1].copy()})


def test_a_gru_backward_takes_weights_of_another_dtype_as_the_definition_does(twins):
    inputs = gru.example(np.random.default_rng(0), T=4, B=20, I=17, H=17, dtype=np.float32)
    inputs["weight_hh"] = inputs["weight_hh"].astype(np.float64)
    results = []
    for one in (gru, twins.gru):
        y, cache = one.forward(**inputs)
        results.append(one.backward(np.ones_like(y), cache))
    for actual, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
