"""`gru-ref golden`: what is in the file, that it can be computed again, and that the page's example runs."""

import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gru_ref import cli, ops
from gru_ref.errors import UsageError
from gru_ref.interop.golden import DTYPES, cases, golden, write_golden

DIFFERENTIABLE = [name for name in ops.names() if hasattr(getattr(ops, name), "backward")]
OTHERS = [name for name in ops.names() if name not in DIFFERENTIABLE]
DOCS = Path(__file__).resolve().parent.parent / "docs"


def read(path):
    """Arrays and metadata as the page tells people to read them."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "__metadata__"}
        return arrays, json.loads(bytes(file["__metadata__"]))


def part(arrays, case, dtype, role):
    """Name: array of one case, dtype and role."""
    prefix = f"{case}/{dtype}/{role}/"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


@pytest.mark.parametrize("op", ops.names())
def test_every_operation_and_case_is_there_in_both_dtypes(tmp_path, op):
    path = tmp_path / "golden.npz"
    write_golden(op, path)
    arrays, metadata = read(path)
    assert metadata["cases"].keys() == cases(op).keys()
    assert len(cases(op)) == len(getattr(getattr(ops, op), "CASES", {"example": {}}))
    assert all(
        np.isfinite(a).all() for name, a in arrays.items() if "/cache/" not in name and a.dtype.kind == "f"
    )
    for case in cases(op):
        for dtype in DTYPES:
            inputs, outputs = (part(arrays, case, dtype, role) for role in ("input", "output"))
            assert inputs
            assert outputs
            floats = [a.dtype for a in (*inputs.values(), *outputs.values()) if a.dtype.kind == "f"]
            assert set(floats) == {np.dtype(dtype)} | ({np.dtype(float)} if op == "clip" else set())


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_the_values_are_those_of_the_definition(op):
    """Computed again from what the file holds alone, options in the metadata included."""
    arrays, metadata = golden(op, seed=5)
    definition = getattr(ops, op)
    for case, described in metadata["cases"].items():
        others = described["not_arrays"]
        for dtype in DTYPES:
            options = {k.removeprefix("input/"): v for k, v in others.items() if k.startswith("input/")}
            inputs = part(arrays, case, dtype, "input")
            y, cache = definition.forward(**inputs, **options)
            assert np.array_equal(y, arrays[f"{case}/{dtype}/output/y"])
            for i, value in enumerate(cache):
                if isinstance(value, np.ndarray):
                    assert np.array_equal(value, arrays[f"{case}/{dtype}/cache/{i}"])
                else:
                    assert others[f"cache/{i}"] == (repr(value) if isinstance(value, tuple) else value)
            dy, *extra = part(arrays, case, dtype, "cotangent").values()
            gradients = part(arrays, case, dtype, "gradient")
            again = [g for g in definition.backward(dy, cache, *extra) if g is not None]
            assert all(np.array_equal(a, b) for a, b in zip(again, gradients.values(), strict=True))
            # each gradient has the name and the shape of its input
            assert {name: g.shape for name, g in gradients.items()} == {
                f"d{name}": inputs[name].shape for name in (n.removeprefix("d") for n in gradients)
            }


@pytest.mark.parametrize("op", OTHERS)
def test_what_a_step_changed_or_returned_is_the_output(op):
    arrays, _ = golden(op)
    for case, dtype in itertools.product(cases(op), DTYPES):
        inputs, outputs = (part(arrays, case, dtype, role) for role in ("input", "output"))
        known = {"clip": {"global_norm"}, "accumulate": {"total"}}
        assert outputs.keys() == known.get(op, {"params", "m", "v"})
        assert all(not np.array_equal(outputs[name], inputs.get(name)) for name in outputs)


@pytest.mark.parametrize("op", ["adamw", "nadam"])
def test_a_step_can_be_computed_from_its_file_alone(op):
    """β, ε and the variant were left out where they had their defaults, which only the source tells."""
    arrays, metadata = golden(op)
    step = getattr(ops, op).step
    assert len(cases(op)) >= 3
    for case, dtype in itertools.product(cases(op), DTYPES):
        described = metadata["cases"][case]["not_arrays"]
        numbers = {k.removeprefix("input/"): v for k, v in described.items() if k.startswith("input/")}
        inputs = {name: array.copy() for name, array in part(arrays, case, dtype, "input").items()}
        assert inputs.keys() | numbers.keys() == inspect.signature(step).parameters.keys()
        step(**inputs, **numbers)
        outputs = part(arrays, case, dtype, "output")
        assert all(np.array_equal(inputs[name], output) for name, output in outputs.items())


@pytest.mark.parametrize("op", ops.names())
def test_both_dtypes_start_from_equal_numbers_and_agree(op):
    """The float32 values are those of float64 up to rounding: neither was computed in the other's dtype."""
    arrays, _ = golden(op)
    compared = 0
    for case in cases(op):
        for role in ("input", "cotangent", "output", "gradient"):
            wide, narrow = (part(arrays, case, dtype, role) for dtype in DTYPES)
            assert wide.keys() == narrow.keys()
            for name, a in wide.items():
                if role in ("input", "cotangent"):
                    assert np.array_equal(a, narrow[name])
                    continue
                assert np.abs(a - narrow[name]).max(initial=0) <= 1e-5 * max(1, np.abs(a).max(initial=0))
                compared += a.dtype.kind == "f" and not np.array_equal(a, narrow[name])
    assert compared or op in ("clip", "embedding", "dropout", "linear")


def test_the_values_of_seed_0_do_not_change_with_a_version_of_numpy():
    """Pinned: the first input of the GRU is what it was when this was written."""
    arrays, metadata = golden("gru")
    assert arrays["reset_after/float64/input/x"].ravel()[:3].tolist() == PINNED
    assert metadata["numpy"] == np.__version__


PINNED = [0.1592954695224762, -1.77418851852417, 1.3265118598937988]


def test_a_file_is_the_same_for_the_same_seed_only(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_golden("gru", tmp_path / f"{name}.npz", seed=seed)
    a, b, c = ((tmp_path / f"{name}.npz").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_the_metadata_holds_source_seed_versions_and_equations(tmp_path):
    write_golden("gru", tmp_path / "gru.npz", seed=2**64 - 1)
    _, metadata = read(tmp_path / "gru.npz")
    assert metadata["format"] == "gru-ref golden"
    assert (metadata["op"], metadata["seed"]) == ("gru", 2**64 - 1)
    assert metadata["source"] == "gru_ref/ops/gru.py"
    assert "h′ = (1 − z) ⊙ n + z ⊙ h" in metadata["equations"]
    case = metadata["cases"]["reset_before_no_h0"]
    assert case["not_arrays"]["input/reset_after"] is False
    assert case["not_arrays"]["input/h0"] is None
    assert "cache = (x, h" in case["functions"]["forward"]


def test_the_command_lists_and_writes(tmp_path, capsys):
    assert cli.run(["golden", "--list"]) == 0
    listed = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert list(listed) == ops.names()
    assert listed["gru"].split(", ") == list(cases("gru"))
    path = str(tmp_path / "gru.npz")
    assert cli.run(["golden", "--op", "gru", "-o", path, "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {path}: gru, reset_after, ")
    assert cli.run(["golden", "--op", "gru", "-o", path]) == 2
    assert "already exists" in capsys.readouterr().err
    assert cli.run(["golden", "--op", "gru", "-o", path, "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--op", "grus", "-o", "x.npz"], "there is no operation 'grus'; known: accumulate, adamw, "),
        (["--op", "gru", "-o", "x.h5"], "x.h5: golden values are written as .npz"),
        (["--op", "gru"], "golden needs --op and -o"),
        (["--op", "gru", "-o", "x.npz", "--seed", "-1"], "--seed -1: must lie in"),
        (["--op", "gru", "-o", "none/x.npz"], "none/x.npz: cannot be written: No such file"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, capsys, monkeypatch, arguments, reason):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["golden", *arguments]) in (1, 2)
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_unknown_operation_is_named():
    with pytest.raises(UsageError, match="there is no operation"):
        golden("nothing")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def test_the_example_of_the_page_runs(tmp_path):
    """docs/golden.md: its commands, then its programs, in its order."""
    (shell,) = [block for block in blocks("golden.md", "sh") if "gru-ref golden --op gru" in block]
    write_golden("gru", tmp_path / "gru.npz")
    assert "gru-ref golden --op gru -o gru.npz" in shell
    for program in blocks("golden.md", "python"):
        done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert (
        cli.run(["diff", str(tmp_path / "gru.npz"), str(tmp_path / "mine.npz"), "--tolerance", "1e-12"]) == 0
    )
