"""The gradient checker: every backward passes it, and it fails for every gradient that is made wrong."""

import functools
import json

import numpy as np
import pytest
from click.testing import CliRunner

import gru_ref
from gru_ref import cli, gradient_check, models, ops
from gru_ref.backend import KERNEL_FOLDERS, Backend
from gru_ref.cli.gradcheck import command
from gru_ref.errors import GruRefError, UsageError
from gru_ref.gradient_check import MODELS, checkable, gradcheck
from gru_ref.models.gru_lm import GRULM

OPS = [name for name in checkable() if name not in MODELS]
SMALL = {"gru": {"T": 3, "B": 2, "I": 2, "H": 3}, "matmul": {"M": 2, "K": 3, "N": 2}}


def float_inputs(op, case):
    """Names of the inputs that have a gradient, and their positions among backward's results."""
    inputs = getattr(ops, op).example(np.random.default_rng(0), **getattr(ops, op).CASES[case])
    arrays = [(key, x) for key, x in inputs.items() if x is None or isinstance(x, np.ndarray)]
    return [
        (i, key) for i, (key, x) in enumerate(arrays) if x is not None and np.issubdtype(x.dtype, np.floating)
    ]


GRADIENTS = [
    pytest.param(op, case, position, key, id=f"{op}-{case}-{key}")
    for op in OPS
    for case in getattr(ops, op).CASES
    for position, key in float_inputs(op, case)
]
PARAMETERS = [
    pytest.param(kind, case, name, id=f"{kind}-{case}-{name}")
    for kind, cases in MODELS.items()
    for case, config in cases.items()
    if case in ("reset_after", "reset_before, tied")  # both forms, tied and not
    for name in models.parameter_shapes(config)
]


def only(monkeypatch, op, case):
    """Leave one case of an operation, at a size that takes a few milliseconds."""
    definition = getattr(ops, op)
    options = definition.CASES[case]
    small = {key: value for key, value in SMALL.get(op, {}).items() if key not in options}
    monkeypatch.setattr(definition, "CASES", {case: options | small})


def plant(monkeypatch, op, change):
    """Pass the gradients of an operation's backward through `change`, which may replace them in a list."""
    right = getattr(ops, op).backward

    @functools.wraps(right)
    def wrong(*args, **kwargs):
        gradients = [None if g is None else g.copy() for g in right(*args, **kwargs)]
        change(gradients)
        return tuple(gradients)

    monkeypatch.setattr(getattr(ops, op), "backward", wrong)


def wrong_inputs(results):
    return {r.input for r in results if not r.ok}


@pytest.fixture(scope="module")
def everything():
    """All operations and models on the definitions."""
    return gradcheck(tolerance=1e-8)


def test_every_gradient_is_right_to_1e_8(everything):
    """N02 among them: L = 2, loss on every step, non-zero state, dropout that differs from step to step."""
    assert [r for r in everything if not r.ok] == []


@pytest.mark.parametrize("backend", [name for name in KERNEL_FOLDERS if name != "numpy"])
def test_every_gradient_of_the_twins_is_right_to_1e_8(backend):
    assert [r for r in gradcheck(tolerance=1e-8, backend=backend) if not r.ok] == []


def test_the_package_has_the_function_whatever_was_imported_before():
    """A file of the same name would be bound over it by the first import."""
    assert gru_ref.gradcheck("linear") == gru_ref.gradcheck("linear") == gradcheck("linear")


def test_another_seed_draws_other_numbers_and_the_same_seed_the_same():
    assert gradcheck("linear", seed=2) == gradcheck("linear", seed=2)
    errors = [[r.worst for r in gradcheck("linear", seed=seed)] for seed in (2, 3, 2**64 - 1)]
    assert errors[0] != errors[1] != errors[2]


def test_every_float_input_of_every_case_is_checked_at_every_element(everything):
    expected = {}
    for op in OPS:
        for case, options in getattr(ops, op).CASES.items():
            inputs = getattr(ops, op).example(np.random.default_rng(0), **options)
            expected |= {(op, case, key): inputs[key].size for _, key in float_inputs(op, case)}
    assert {(r.name, r.case, r.input): r.checked for r in everything if r.name in OPS} == expected


def test_every_parameter_of_every_model_is_checked(everything):
    assert {(r.name, r.case, r.input) for r in everything if r.name in MODELS} == {
        (kind, case, name)
        for kind, cases in MODELS.items()
        for case, config in cases.items()
        for name in models.parameter_shapes(config)
    }


def test_operations_and_models_are_found_by_themselves():
    assert {"cross_entropy", "dropout", "embedding", "gru", "gru-lm", "linear", "matmul"} <= set(checkable())
    results = gradcheck(["matmul", "linear", "matmul"])
    assert [r.name for r in results] == ["matmul"] * 6 + ["linear"] * 8  # as asked, each once


@pytest.mark.parametrize(("op", "case", "position", "key"), GRADIENTS)
def test_a_gradient_off_by_one_part_in_ten_thousand_is_caught_and_named(monkeypatch, op, case, position, key):
    only(monkeypatch, op, case)

    def change(gradients):
        gradients[position] *= 1 + 1e-4

    plant(monkeypatch, op, change)
    results = gradcheck(op)
    assert wrong_inputs(results) == {key}
    (worst,) = (r.worst for r in results if r.input == key)
    assert worst == pytest.approx(1e-4 / (1 + 1e-4), rel=1e-4)


@pytest.mark.parametrize(("op", "case", "position", "key"), GRADIENTS)
def test_one_wrong_element_is_caught_and_located(monkeypatch, op, case, position, key):
    only(monkeypatch, op, case)
    places = []

    def change(gradients):
        g = gradients[position]
        where = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(g)), g.shape))
        places.append(where)
        g[where] = 0

    plant(monkeypatch, op, change)
    results = gradcheck(op)
    assert wrong_inputs(results) == {key}
    (result,) = (r for r in results if r.input == key)
    assert (result.where, result.worst) == (places[0], pytest.approx(1))


@pytest.mark.parametrize(("kind", "case", "name"), PARAMETERS)
def test_a_wrong_gradient_of_one_parameter_of_a_model_is_caught(monkeypatch, kind, case, name):
    monkeypatch.setitem(MODELS, kind, {case: MODELS[kind][case]})
    monkeypatch.setattr(gradient_check, "DIRECTIONS", 1)
    model = models.family(kind).Model
    right = model.backward

    def wrong(self, dlogits, cache):
        right(self, dlogits, cache)
        self.arena.grad[name][...] *= 1 + 1e-4

    monkeypatch.setattr(model, "backward", wrong)
    assert wrong_inputs(gradcheck(kind)) == {name}


def test_swapped_biases_of_the_gru_are_caught(monkeypatch):
    """db_hn = Σ dq is not db_in = Σ da_n: the two differ where the reset gate comes after the product."""
    only(monkeypatch, "gru", "reset_after")

    def swap(gradients):
        gradients[4], gradients[5] = gradients[5], gradients[4]

    plant(monkeypatch, "gru", swap)
    assert wrong_inputs(gradcheck("gru")) == {"bias_ih", "bias_hh"}


@pytest.mark.parametrize("case", ["reset_after", "reset_before"])
def test_a_last_state_whose_gradient_is_dropped_is_caught(monkeypatch, case):
    only(monkeypatch, "gru", case)
    right = ops.gru.backward

    @functools.wraps(right)
    def wrong(dy, cache, dh_T=None):
        return right(dy, cache)

    monkeypatch.setattr(ops.gru, "backward", wrong)
    assert wrong_inputs(gradcheck("gru")) == {"x", "h0", "weight_ih", "weight_hh", "bias_ih", "bias_hh"}


def test_the_backend_that_is_named_is_the_one_that_is_checked(monkeypatch):
    """A twin with a wrong backward fails as an operation and inside the models; the definition passes."""
    only(monkeypatch, "linear", "bias")
    monkeypatch.setitem(MODELS, "gru-lm", {"tied": MODELS["gru-lm"]["reset_after, tied"]})

    def doubled(dy, cache, out=None):
        dx, dweight, dbias = ops.linear.backward(dy, cache)
        return dx, dweight, 2 * dbias

    monkeypatch.setattr(
        Backend,
        "twins",
        lambda self, op: {"backward": doubled} if (self.name, op) == ("numba", "linear") else {},
    )
    names = ["linear", "gru-lm"]
    assert wrong_inputs(gradcheck(names, backend="numba")) == {"bias", "classifier.bias"}
    assert wrong_inputs(gradcheck(names, backend="numpy")) == set()


def test_repeated_ids_that_count_once_are_caught(monkeypatch):
    """N03: the fancy `dW[ids] += dy`."""
    right = ops.embedding.backward

    @functools.wraps(right)
    def wrong(dy, cache):
        ids, vocab_size = cache
        dweight = np.zeros((vocab_size, dy.shape[-1]))
        dweight[ids] += dy
        return None, dweight

    monkeypatch.setattr(ops.embedding, "backward", wrong)
    assert wrong_inputs(gradcheck("embedding")) == {"weight"}


def test_a_tied_matrix_that_lacks_one_use_is_caught(monkeypatch):
    """N03: gradient of the classifier's use alone."""
    monkeypatch.setitem(MODELS, "gru-lm", {"tied": MODELS["gru-lm"]["reset_after, tied"]})
    right = ops.embedding.backward

    @functools.wraps(right)
    def wrong(dy, cache, total=None):
        return (None, 0 * right(dy, cache)[1]) if total is None else (None, total)

    monkeypatch.setattr(ops.embedding, "backward", wrong)
    assert wrong_inputs(gradcheck("gru-lm")) == {"embedding.weight"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_wrong(monkeypatch, value):
    def change(gradients):
        gradients[1][0, 2] = value

    plant(monkeypatch, "linear", change)
    for result in gradcheck("linear"):
        assert result.ok == (result.input != "weight")
        if result.input == "weight":
            assert (result.worst, result.where) == (np.inf, (0, 2))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", OPS)
def test_an_operation_that_changes_an_argument_in_place_is_an_error(monkeypatch, op, direction):
    right = getattr(getattr(ops, op), direction)

    @functools.wraps(right)
    def careless(*args, **kwargs):
        result = right(*args, **kwargs)
        arrays = [a for a in (*args, *kwargs.values()) if isinstance(a, np.ndarray)]
        arrays[-1].reshape(-1)[0] += 1
        return result

    monkeypatch.setattr(getattr(ops, op), direction, careless)
    with pytest.raises(GruRefError, match=rf"^{op} \(.+\): {direction} changed '\w+' in place"):
        gradcheck(op)


def test_a_model_that_changes_the_carried_state_is_an_error(monkeypatch):
    right = GRULM.forward

    def careless(self, ids, state=None, **kwargs):
        if state is not None:
            state[0, 0, 0] += 1e-3
        return right(self, ids, state, **kwargs)

    monkeypatch.setattr(GRULM, "forward", careless)
    with pytest.raises(GruRefError, match=r"^gru-lm \(.+\) changed 'state' in place"):
        gradcheck("gru-lm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.pop(), "backward gave 2 gradients for inputs x, weight, bias"),
        (lambda g: g.__setitem__(0, None), "must give a gradient for x"),
        (lambda g: g.__setitem__(1, g[1].T), r"gradient of weight has shape \(5, 4\), not \(4, 5\)"),
        (lambda g: g.__setitem__(2, np.zeros(())), r"gradient of bias has shape \(\), not \(4,\)"),
    ],
)
def test_a_backward_that_breaks_its_contract_is_an_error(monkeypatch, change, message):
    plant(monkeypatch, "linear", change)
    with pytest.raises(GruRefError, match=message):
        gradcheck("linear")


def test_a_gradient_for_integers_is_an_error(monkeypatch):
    plant(monkeypatch, "embedding", lambda g: g.__setitem__(0, np.zeros(9)))
    with pytest.raises(GruRefError, match="must give None for ids"):
        gradcheck("embedding")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gur", "unknown operation or model 'gur'; did you mean 'gru'"),
        ("gru_lm", "did you mean 'gru-lm'"),
        ("crossentropy", "did you mean 'cross_entropy'"),
        ("???", "known: attention, .*, gru-lm"),
        ("nadam", "'nadam' has no backward to check; choose from attention"),
    ],
)
def test_a_name_that_cannot_be_checked_is_a_usage_error_with_the_nearest_one(name, message):
    with pytest.raises(UsageError, match=message):
        gradcheck(["linear", name])


def test_the_command_prints_every_result_whole_and_without_control_characters(monkeypatch, everything):
    monkeypatch.setattr(gradient_check, "gradcheck", lambda *args, **kwargs: everything)
    result = CliRunner(env={"COLUMNS": "20"}).invoke(command, [])
    assert result.exit_code == 0
    assert not set(result.output) & ({chr(i) for i in range(32)} - {"\n"})
    *table, verdict = result.output.splitlines()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in table if line.startswith("│")]
    assert rows == [
        [r.name, r.case, r.input, str(r.checked), f"{r.worst:.1e}", ",".join(map(str, r.where)), "ok"]
        for r in everything
    ]
    assert verdict.startswith(f"all {len(everything)} gradients are right: worst relative error")


def test_the_command_ends_with_1_and_names_the_wrong_gradient(monkeypatch):
    plant(monkeypatch, "matmul", lambda g: g[1].__imul__(2))
    result = CliRunner().invoke(command, ["matmul", "linear"])
    assert result.exit_code == 1
    verdict = result.output.splitlines()[-1]
    assert verdict.startswith("3 of 14 gradients are wrong by more than 1e-06: matmul (2-D) b; ")
    assert result.output.count("WRONG") == 3


def test_the_command_writes_valid_json_even_where_a_gradient_is_nan(monkeypatch):
    plant(monkeypatch, "matmul", lambda g: g[0].fill(np.nan))
    result = CliRunner().invoke(command, ["matmul", "--json", "--seed", "5"])
    assert result.exit_code == 1
    report = json.loads(result.output, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (report["ok"], report["seed"], report["tolerance"]) == (False, 5, 1e-6)
    rows = {(row["case"], row["input"]): row for row in report["results"]}
    wrong = rows["2-D", "a"]
    assert (wrong["worst"], wrong["where"], wrong["checked"], wrong["ok"]) == (None, [0, 0], 35, False)
    assert rows["2-D", "b"]["worst"] < 1e-10


def test_the_command_refuses_a_seed_and_a_kernel_set_that_do_not_exist():
    for arguments in (["--seed", "-1"], ["--seed", str(2**64)], ["--kernels", "cuda"]):
        result = CliRunner().invoke(command, ["linear", *arguments])
        assert result.exit_code == 2
        assert arguments[0] in result.output


def test_the_command_line_ends_with_2_and_the_nearest_name(capsys):
    assert cli.run(["gradcheck", "gur"]) == 2
    assert capsys.readouterr().err == (
        "gru-ref: error: unknown operation or model 'gur'; did you mean 'gru'?\n"
    )
    assert cli.run(["gradcheck", "embedding"]) == 0
