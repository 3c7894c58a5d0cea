"""`gru-ref diff`: figures worked by hand, every mixture of files, and the verdict."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gru_ref import cli
from gru_ref.checkpoint import load_checkpoint, save_checkpoint
from gru_ref.checkpoint.layout import SCALARS, Checkpoint
from gru_ref.config import Config
from gru_ref.errors import UsageError
from gru_ref.interop.compare import compare
from gru_ref.interop.exchange import export_checkpoint
from gru_ref.interop.tensor_files import write_tensors
from gru_ref.models.gru_lm import GRULM

pytest.importorskip("safetensors")
TRAINER = {path.removeprefix("/trainer/"): 0 for path in SCALARS if path.startswith("/trainer/")}


def write(path, **arrays):
    np.savez(path, **{name: np.asarray(array) for name, array in arrays.items()})
    return path


def diff(capsys, *args):
    """Exit code, and the JSON that the command prints."""
    code = cli.run(["diff", *map(str, args), "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def save(path, step=0, seed=3, **model):
    config = Config().replace("data", tokenizer="ids").replace("train", seed=seed)
    shape = {"layers": 1, "hidden": 6, "embedding": 4, "vocab_size": 11, **model}
    config = config.replace("model", **shape)
    arena = GRULM(config.model, seed=3)
    arena.initialise()
    arena = arena.arena
    arena.v[...] = 1e-3
    moments = {"m": arena.views(arena.m), "v": arena.views(arena.v)} if step else {}
    optimizer = {"step": step, "mu_product": 0.5}
    trainer = TRAINER | {"step": step, "micro_step": step, "seed": seed}
    save_checkpoint(path, Checkpoint(config, arena.param, moments, optimizer, trainer))
    return path


@pytest.fixture
def changed(tmp_path):
    """changed(name=function): a checkpoint, and one in which functions were applied to some weights."""

    def make(**changes):
        a = save(tmp_path / "a.h5")
        checkpoint = load_checkpoint(a)
        for name, change in changes.items():
            weights = checkpoint.model[name.replace("_0_", ".0.")]
            weights[...] = change(weights)
        save_checkpoint(tmp_path / "b.h5", checkpoint)
        return a, tmp_path / "b.h5"

    return make


def test_figures_worked_by_hand(tmp_path, capsys):
    a = write(tmp_path / "a.npz", w=[[3.0, 0.0], [0.0, 4.0]], same=[1.0, 2.0])
    b = write(tmp_path / "b.npz", w=[[3.0, 0.0], [0.5, 4.0]], same=[1.0, 2.0])
    code, report = diff(capsys, a, b)
    w, same = report["tensors"]
    assert code == 1
    assert w["relative"] == pytest.approx(0.5 / 25.25**0.5, rel=1e-14)
    assert (w["largest"], w["where"], w["within"]) == (0.5, [1, 0], False)
    assert (same["relative"], same["largest"], same["where"], same["within"]) == (0, 0, None, True)
    assert report["relative"] == pytest.approx(0.5 / 30.25**0.5, rel=1e-14)
    assert (report["largest"], report["ok"], report["identical"]) == (0.5, False, False)


@pytest.mark.parametrize(("tolerance", "code"), [("0", 1), ("0.099", 1), ("0.1", 0), ("1", 0)])
def test_the_tolerance_decides(tmp_path, capsys, tolerance, code):
    a, b = write(tmp_path / "a.npz", w=[10.0]), write(tmp_path / "b.npz", w=[9.0])
    assert diff(capsys, a, b, "--tolerance", tolerance)[0] == code
    assert diff(capsys, b, a, "--tolerance", tolerance)[0] == code


def test_a_small_tensor_does_not_hide_behind_a_large_one(tmp_path, capsys):
    a = write(tmp_path / "a.npz", large=np.full(1000, 100.0), small=[1e-3])
    b = write(tmp_path / "b.npz", large=np.full(1000, 100.0), small=[2e-3])
    code, report = diff(capsys, a, b, "--tolerance", "0.01")
    assert report["relative"] < 1e-6
    assert code == 1


@pytest.mark.parametrize(
    ("a", "b", "relative"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1e-30], 1.0),
        ([1.0], [-1.0], 2.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([np.inf], [np.inf], 0.0),
        ([np.nan, 1.0], [1.0, 1.0], None),
        ([np.inf], [-np.inf], None),
        ([0.0], [np.nan], None),
        ([], [], 0.0),
        ([True, False], [True, True], 1 / 2**0.5),
        ([2, 3], [2.0, 3.0], 0.0),
    ],
)
def test_zeros_nan_infinity_and_other_types(tmp_path, capsys, a, b, relative):
    """The figures are valid JSON always; what is not finite in one of them only is beyond every tolerance."""
    left, right = write(tmp_path / "a.npz", w=a), write(tmp_path / "b.npz", w=b)
    code, report = diff(capsys, left, right, "--tolerance", "1e300")
    assert report["tensors"][0]["relative"] == (None if relative is None else pytest.approx(relative))
    assert code == (relative is None)


def test_an_equal_infinity_hides_no_other_difference(tmp_path, capsys):
    """Neither in its own tensor nor in the overall figures: it adds nothing to a norm."""
    a = write(tmp_path / "a.npz", x=[np.inf, 1.0], y=[3.0, 4.0], z=[np.nan, 2.0])
    b = write(tmp_path / "b.npz", x=[np.inf, 1e6], y=[3.0, 5.0], z=[np.nan, 2.0])
    code, report = diff(capsys, a, b, "--tolerance", "1e-9")
    x, y, z = report["tensors"]
    assert code == 1
    assert (x["relative"], x["largest"], x["within"]) == ((1e6 - 1) / 1e6, 1e6 - 1, False)
    assert y["relative"] == pytest.approx(1 / 34**0.5, rel=1e-14)
    assert (z["relative"], z["within"]) == (0, True)
    assert report["relative"] == pytest.approx((1e6 - 1) / 1e6, rel=1e-9)
    assert cli.run(["diff", str(a), str(b), "--tolerance", "1e-9"]) == 1
    assert "BEYOND 1e-09: 2 of 3 tensors; L2-relative 1, largest 1e+06 over all" in capsys.readouterr().out


def test_an_infinity_in_one_of_them_leaves_no_overall_figure(tmp_path, capsys):
    a = write(tmp_path / "a.npz", x=[np.inf, 1.0], y=[3.0])
    b = write(tmp_path / "b.npz", x=[2.0, 1.0], y=[3.0])
    code, report = diff(capsys, a, b, "--tolerance", "1e300")
    assert (code, report["relative"], report["largest"]) == (1, None, None)
    assert [tensor["within"] for tensor in report["tensors"]] == [False, True]


@pytest.mark.parametrize("exponent", [-1000, -500, 0, 500, 1000])
def test_the_figure_is_the_same_at_every_scale(tmp_path, exponent):
    """No square overflows, which would pass for no difference, or vanishes."""
    a, b = np.ldexp([3.0, 4.0], exponent), np.ldexp([3.0, 4.5], exponent)
    result = compare(write(tmp_path / "a.npz", w=a), write(tmp_path / "b.npz", w=b), tolerance=0.09)
    assert result.relative == result.tensors[0].relative == pytest.approx(0.5 / 29.25**0.5, rel=1e-14)
    assert (result.largest, result.ok) == (np.ldexp(0.5, exponent), False)


def whole(dtype):
    """Numbers of this type, most of them near its ends."""
    if dtype == "?":
        return st.integers(0, 1)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return st.integers(high - 1, high) | st.integers(low, low + 1) | st.integers(low, high)


@pytest.mark.parametrize(
    ("left", "right"), [("i8", "i8"), ("u8", "u8"), ("i8", "u8"), ("u8", "i8"), ("?", "i8"), ("u1", "i4")]
)
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_integers_and_booleans_are_compared_exactly(tmp_path, left, right, data):
    """Against Python's integers; neighbours above 2^53 too."""
    x, y = data.draw(whole(left)), data.draw(whole(right))
    a = write(tmp_path / "a.npz", n=np.array([x], left))
    b = write(tmp_path / "b.npz", n=np.array([y], right))
    result = compare(a, b)
    assert result.identical is result.ok is (x == y)
    assert result.largest == float(abs(x - y))


def test_neighbours_that_float64_cannot_tell_apart_differ(tmp_path, capsys):
    a = write(tmp_path / "a.npz", n=np.array([2**62, 2**62 + 1]))
    b = write(tmp_path / "b.npz", n=np.array([2**62, 2**62 + 2]))
    code, report = diff(capsys, a, b)
    assert (code, report["identical"], report["largest"]) == (1, False, 1.0)
    assert report["tensors"][0]["where"] == [1]


def test_where_nothing_can_be_compared_there_is_no_figure(tmp_path, capsys):
    a = write(tmp_path / "a.npz", mine=[1.0], shape=np.zeros((2, 3)))
    b = write(tmp_path / "b.npz", yours=[1.0], shape=np.zeros((3, 2)))
    code, report = diff(capsys, a, b)
    assert (code, report["relative"], report["largest"]) == (1, None, None)
    assert cli.run(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "BEYOND 0: 1 of 1 tensors, 2 in one of them only; nothing compared" in out
    assert "largest 0" not in out


def test_without_a_tolerance_the_smallest_difference_counts(tmp_path, capsys):
    """The square of 1e-200 is 0."""
    a, b = write(tmp_path / "a.npz", w=[0.0, 1.0]), write(tmp_path / "b.npz", w=[1e-200, 1.0])
    code, report = diff(capsys, a, b)
    assert (code, report["identical"], report["largest"]) == (1, False, 1e-200)


def test_the_largest_difference_is_found_across_blocks(tmp_path):
    w = np.zeros((3, 700_000), np.float32)
    other = w.copy()
    other[0, 5], other[2, 123_456] = 1, -2
    result = compare(write(tmp_path / "a.npz", w=w), write(tmp_path / "b.npz", w=other))
    assert (result.largest, result.tensors[0].where) == (2.0, (2, 123_456))


def test_missing_tensors_and_other_shapes_are_beyond_every_tolerance(tmp_path, capsys):
    a = write(tmp_path / "a.npz", both=[1.0], mine=[1.0], shape=np.zeros((2, 3)))
    b = write(tmp_path / "b.npz", both=[1.0], yours=[1.0], shape=np.zeros((3, 2)))
    code, report = diff(capsys, a, b, "--tolerance", "100")
    assert code == 1
    assert (report["only_a"], report["only_b"]) == (["mine"], ["yours"])
    (shape,) = (tensor for tensor in report["tensors"] if tensor["name"] == "shape")
    assert (shape["shapes"], shape["within"]) == ([[2, 3], [3, 2]], False)
    assert cli.run(["diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert f"only in {a}: mine" in out
    assert f"only in {b}: yours" in out
    assert "2x3 -> 3x2" in out
    assert (
        "BEYOND 0: 1 of 2 tensors, 2 in one of them only; L2-relative 0, largest 0 over the 1 of equal" in out
    )


@pytest.mark.parametrize("to", ["torch", "keras", "safetensors", "npz"])
@pytest.mark.parametrize("padding", [1, 8])
def test_a_checkpoint_equals_its_own_exports(tmp_path, capsys, to, padding):
    a = save(tmp_path / "a.h5", vocab_padding=padding)
    file = tmp_path / ("a.npz" if to in ("keras", "npz") else "a.safetensors")
    export_checkpoint(a, to, file)
    for pair in ((a, file), (file, a), (file, file)):
        code, report = diff(capsys, *pair)
        assert code == 0
        assert report["identical"] is True
        assert [tensor["name"] for tensor in report["tensors"]] == list(load_checkpoint(a).model)


def test_one_changed_weight_is_named_across_formats(changed, tmp_path, capsys):
    def change(w):
        w[7, 2] += 0.25
        return w

    a, b = changed(gru_0_weight_hh=change)
    export_checkpoint(b, "keras", tmp_path / "b.npz")
    for other in (b, tmp_path / "b.npz"):
        code, report = diff(capsys, a, other)
        beyond = [tensor for tensor in report["tensors"] if not tensor["within"]]
        assert code == 1
        assert [(t["name"], t["where"]) for t in beyond] == [("gru.0.weight_hh", [7, 2])]
        assert beyond[0]["largest"] == pytest.approx(0.25, abs=1e-6)


def test_settings_that_differ_are_shown_and_decide_nothing(tmp_path, capsys):
    a, b = save(tmp_path / "a.h5"), save(tmp_path / "b.h5", seed=4)
    code, report = diff(capsys, a, b)
    assert code == 0
    assert report["settings"] == {"/trainer/seed": [3, 4], "train.seed": [3, 4]}
    assert cli.run(["diff", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "setting train.seed: 3 -> 4" in out
    assert "equal: all 7 tensors have the same values" in out


def test_moments_are_compared_where_both_have_them(tmp_path, capsys):
    a, b = save(tmp_path / "a.h5", step=1), save(tmp_path / "b.h5", step=1)
    checkpoint = load_checkpoint(b)
    checkpoint.moments["v"]["classifier.bias"][3] = 0.5
    save_checkpoint(b, checkpoint)
    code, report = diff(capsys, a, b)
    assert code == 1
    assert [t["name"] for t in report["tensors"] if not t["within"]] == ["/optimizer/v/classifier.bias"]
    export_checkpoint(b, "npz", tmp_path / "b.npz")
    code, report = diff(capsys, a, tmp_path / "b.npz")
    assert code == 0
    assert "/optimizer/m: only one of them has it; not compared" in report["notes"]


def test_a_run_stands_for_its_newest_checkpoint(tmp_path, capsys):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    save(folder / "step-00000000.h5", seed=4)
    save(folder / "step-00000002.h5", step=2)
    code, report = diff(capsys, tmp_path / "run", save(tmp_path / "a.h5", step=2))
    assert (code, report["settings"]) == (0, {})


def test_names_that_no_layout_knows_are_compared_as_they_are(tmp_path, capsys):
    write_tensors(tmp_path / "a.safetensors", {"q": np.ones(2, "f4")}, {"x": {"y": 1}})
    write_tensors(tmp_path / "b.npz", {"q": np.ones(2)}, {"x": {"y": 2}})
    code, report = diff(capsys, tmp_path / "a.safetensors", tmp_path / "b.npz")
    assert code == 0
    assert report["settings"] == {"x.y": [1, 2]}
    assert report["tensors"][0]["dtypes"] == ["float32", "float64"]
    assert "compared under the names in the file" in report["notes"][0]


def test_a_known_layout_that_is_not_whole_is_compared_under_its_own_names(tmp_path, capsys):
    export_checkpoint(save(tmp_path / "a.h5"), "keras", tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as file:
        arrays = {name: file[name] for name in file.files if name != "classifier.bias"}
    code, report = diff(capsys, write(tmp_path / "b.npz", **arrays), tmp_path / "b.npz")
    assert code == 0
    assert "under the names in the file: missing classifier.bias;" in report["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["a.npz", "none.npz"], 2, "none.npz: no such file"),
        (["a.npz", "none.h5"], 2, "none.h5: does not exist"),
        (["a.npz", "folder"], 2, "folder: holds no checkpoints/step-*.h5"),
        (["a.npz", "text.txt"], 2, "text.txt: neither a safetensors nor an npz file"),
        (["a.npz", "bad.h5"], 1, "bad.h5: not a checkpoint"),
        (["a.npz", "a.npz", "--tolerance", "-1"], 2, "--tolerance -1.0: must be a number of 0 or more"),
        (["a.npz", "a.npz", "--tolerance", "nan"], 2, "--tolerance nan: must be a number of 0 or more"),
        (["a.npz"], 2, "Missing argument 'B'"),
    ],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, capsys, monkeypatch, arguments, code, reason):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.npz", w=[1.0])
    (tmp_path / "folder").mkdir()
    for name in ("text.txt", "bad.h5"):
        (tmp_path / name).write_bytes(b"only text, and quite a lot of it for a header")
    assert cli.run(["diff", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gru-ref: error: ")
    assert reason in err
    assert err.count("\n") == 1


def test_a_name_cannot_steer_the_terminal(tmp_path):
    file = write(tmp_path / "a.npz", **{"w\x1b[2J": [1.0]})
    with pytest.raises(UsageError, match="control characters"):
        compare(file, file)
