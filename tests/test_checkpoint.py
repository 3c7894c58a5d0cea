"""Checkpoints: exact round trips, atomic saves, and a reader that lets no damage through (cases C01–C13)."""

import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gru_ref.checkpoint import (
    Checkpoint,
    layout,
    load_checkpoint,
    remove_stale_temporaries,
    save_checkpoint,
    verify_checkpoint,
    write,
)
from gru_ref.checkpoint.restore import restore_tokenizer
from gru_ref.checkpoint.verify import statistics
from gru_ref.config import Config
from gru_ref.data.bpe import ALPHABET
from gru_ref.errors import CheckpointError, RunError, UsageError
from gru_ref.models import parameter_shapes
from gru_ref.types import Array

WEIGHT = "/model/gru.0.weight_hh"
BIAS = "/model/classifier.bias"


def make(
    step: int = 3, *, optimizer: str = "adamw", carry: bool = False, dtype: str = "<f4", **model: Any
) -> Checkpoint:
    """A small checkpoint with random values; `model` overrides the shape."""
    shape = {"layers": 1, "hidden": 4, "embedding": 3, "vocab_size": 7} | model
    config = Config().replace("model", **shape).replace("optimizer", name=optimizer)
    config = config.replace("train", carry_state=carry, batch_size=2, accumulation=3, seed=2**64 - 1)
    rng = np.random.default_rng(step)

    def tensors() -> dict[str, Array]:
        return {k: rng.standard_normal(s).astype(dtype) for k, s in parameter_shapes(config.model).items()}

    moments = {"m": tensors(), "v": {k: a * a for k, a in tensors().items()}} if step else {}
    scalars = {"step": step, "tokens": 640, "epoch": 1, "cursor": 18, "micro_step": step + 6}
    scalars |= {"seed": 2**64 - 1, "skipped": 2, "skipped_in_a_row": 1}
    hidden = rng.uniform(-1, 1, (config.model.layers, 6, 4)).astype(dtype) if carry and step else None
    return Checkpoint(
        config=config,
        model=tensors(),
        moments=moments,
        optimizer={"step": step} | ({"mu_product": 0.73} if optimizer == "nadam" else {}),
        trainer=scalars | ({"best_loss": 1.25, "best_step": step} if step else {}),
        hidden=hidden,
        data={"fingerprint": "5d41", "sources": [{"file": "é\n", "bytes": 5, "share": 0.1, "note": None}]},
    )


def assert_same(a: Checkpoint, b: Checkpoint) -> None:
    assert (a.config, a.optimizer, a.trainer, a.data) == (b.config, b.optimizer, b.trainer, b.data)
    assert list(a.moments) == list(b.moments)
    for x, y in [(a.model, b.model)] + [(a.moments[k], b.moments[k]) for k in a.moments]:
        assert list(x) == list(y)
        for name in x:
            assert x[name].dtype == y[name].dtype
            np.testing.assert_array_equal(x[name], y[name], strict=True)
    assert (a.hidden is None) == (b.hidden is None)
    if a.hidden is not None:
        np.testing.assert_array_equal(a.hidden, b.hidden, strict=True)


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_checkpoint(folder / "good.h5", make())
    return folder


@pytest.fixture
def path(good_folder: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint with its sidecar, alone in a folder."""
    shutil.copytree(good_folder, tmp_path, dirs_exist_ok=True)
    return tmp_path / "good.h5"


def edit(path: Path, change: Callable[[h5py.File], None], *, reseal: bool = False) -> None:
    """Change a checkpoint through HDF5; `reseal` makes the manifest agree with what it then holds."""
    layout.sidecar_path(path).unlink(missing_ok=True)
    with h5py.File(path, "r+", libver=("v110", "v110")) as file:
        change(file)
        if reseal:
            datasets: dict[str, Array] = {}
            file.visititems(
                lambda _, x: datasets.update({x.name: x[()]}) if isinstance(x, h5py.Dataset) else None
            )
            del datasets["/manifest"], file["manifest"]
            manifest = layout.manifest_dataset({k: np.asarray(datasets[k]) for k in sorted(datasets)})
            put(file, "/manifest", manifest)
            value = layout.md5(manifest)
            file.attrs.create("manifest_md5", value.encode(), dtype=h5py.string_dtype("utf-8", len(value)))


def put(file: h5py.File, name: str, array: Array) -> None:
    """Replace a dataset; a text as the writer stores it."""
    if name in file:
        del file[name]
    if array.dtype.kind == "S":
        array = array.astype(h5py.string_dtype("utf-8", array.dtype.itemsize))
    file.create_dataset(name, data=array)


def refusal(path: Path) -> str:
    """The first problem, which verify and load agree on and load raises as one line with the file's name."""
    report = verify_checkpoint(path)
    assert not report.ok
    assert all(problem.isprintable() for problem in report.problems)
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint(path)
    text = str(raised.value)
    assert "\n" not in text
    assert text == f"{path}: {report.problems[0]}"
    return report.problems[0]


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    "checkpoint",
    [
        make(0),
        make(0, optimizer="nadam", carry=True),
        make(8000, optimizer="nadam", carry=True, layers=2),
        make(5, tied=True, embedding=0, vocab_size=10, vocab_padding=8),
        make(5, dtype="<f8", carry=True),
    ],
    ids=["step-0", "step-0-carry", "nadam-carry", "tied-padded", "float64"],
)
def test_a_round_trip_gives_back_every_bit(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """R01: saving what was loaded gives the same file, so a resume starts from what was saved."""
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    assert save_checkpoint(a, checkpoint) == a.stat().st_size
    loaded = load_checkpoint(a)
    assert_same(loaded, checkpoint)
    save_checkpoint(b, loaded)
    assert a.read_bytes() == b.read_bytes()
    report = verify_checkpoint(a)
    assert report.ok
    assert report.notes == []
    assert (report.step, report.format_version) == (checkpoint.trainer["step"], layout.FORMAT_VERSION)
    assert report.n_parameters == sum(w.size for w in checkpoint.model.values())


def test_two_processes_write_identical_bytes_whatever_the_order_of_names(path: Path) -> None:
    code = """
        import sys; sys.path.insert(0, sys.argv[2])
        from test_checkpoint import make, save_checkpoint
        checkpoint = make()
        checkpoint.model = dict(reversed(checkpoint.model.items()))
        save_checkpoint(sys.argv[1], checkpoint)
    """
    other = path.with_name("other.h5")
    environment = os.environ | {"MALLOC_PERTURB_": "85"}  # unset memory would show
    command = [sys.executable, "-c", textwrap.dedent(code), str(other), str(Path(__file__).parent)]
    subprocess.run(command, check=True, env=environment)
    assert other.read_bytes() == path.read_bytes()


def test_400_layers_and_a_long_config_string_are_saved(tmp_path: Path) -> None:
    """C08: nothing large stands in an attribute."""
    checkpoint = make(0, layers=400, hidden=1, embedding=1)
    checkpoint.config = checkpoint.config.replace("data", files=("x" * 200_000, "\udcff"))
    save_checkpoint(tmp_path / "big.h5", checkpoint)
    assert_same(load_checkpoint(tmp_path / "big.h5"), checkpoint)


def test_weights_only_leaves_the_moments_unread(path: Path) -> None:
    edit(path, lambda file: file["/optimizer/m/classifier.bias"].write_direct(np.zeros(7, "f4")))
    assert "/optimizer/m/classifier.bias: md5" in refusal(path)
    loaded = load_checkpoint(path, weights_only=True)
    assert loaded.moments == {}
    np.testing.assert_array_equal(loaded.model["classifier.bias"], make().model["classifier.bias"])


def test_importing_the_package_imports_no_h5py() -> None:
    code = (
        "import sys, gru_ref.checkpoint as c; assert 'h5py' not in sys.modules; c.save_checkpoint; c.missing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no attribute 'missing'" in done.stderr


# ---------------------------------------------------------------- what is not saved


def _change(**parts: Any) -> Callable[[Checkpoint], None]:
    def change(checkpoint: Checkpoint) -> None:
        for part, value in parts.items():
            if isinstance(value, dict) and part != "data":
                getattr(checkpoint, part).update(value)
            else:
                setattr(checkpoint, part, value)

    return change


UNSAVABLE = {
    "nan weight": (_change(model={"classifier.bias": np.full(7, np.nan, "f4")}), f"{BIAS}: 7 NaN and 0 Inf"),
    "transposed": (_change(model={"gru.0.weight_ih": np.zeros((3, 12), "f4")}), "float32 (3, 12), expected"),
    "broadcastable": (_change(model={"classifier.bias": np.zeros(1, "f4")}), "expected float32 (7,)"),
    "0-d": (_change(model={"classifier.bias": np.float32(0)}), "found float32 scalar, expected"),
    "big-endian": (_change(model={"classifier.bias": np.zeros(7, ">f4")}), "found big-endian float32 (7,)"),
    "mixed": (_change(model={"classifier.bias": np.zeros(7)}), "found float64 (7,), expected float32"),
    "extra": (_change(model={"zzz": np.zeros(7, "f4")}), "/model/zzz: float32 (7,), not explained"),
    "no moments": (_change(moments={"m": {}}), "/optimizer/m/embedding.weight: missing"),
    "hidden": (
        _change(hidden=np.zeros((1, 6, 4), "f4")),
        "/trainer/hidden: float32 (1, 6, 4), not explained",
    ),
    "negative v": (
        lambda c: c.moments["v"].update({"classifier.bias": -np.ones(7, "f4")}),
        "/optimizer/v/classifier.bias: 7 negative second moments, the first at [0]",
    ),
    "unknown scalar": (_change(trainer={"scale": 1}), "/trainer/scale: float64 scalar, not explained"),
    "seed": (_change(trainer={"seed": 2**64}), "/trainer/seed: 18446744073709551616 does not fit"),
    "type": (_change(trainer={"tokens": 1.0}), "/trainer/tokens: 1.0, expected int64"),
    "steps differ": (_change(optimizer={"step": 4}), "/optimizer/step: 4, expected 3 as in /trainer/step"),
    "best without step": (lambda c: c.trainer.pop("best_step"), "/trainer/best_step: missing"),
    "nan best": (_change(trainer={"best_loss": float("nan")}), "/trainer/best_loss: nan, expected a finite"),
    "nan data": (_change(data={"x": float("nan")}), "/data: not JSON"),
    "lossy data": (_change(data={1: "x"}), "/data: not a JSON object"),
    "list data": (_change(data=[]), "/data: not a JSON object"),
    "vocabulary": (
        lambda c: setattr(c, "config", c.config.replace("model", vocab_size=0)),
        "model.vocab_size",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_the_config_does_not_explain_never_replaces_a_file(path: Path, name: str) -> None:
    """C09: NaN is never written over the good file; nor is anything else that could not be read again."""
    change, message = UNSAVABLE[name]
    before = path.read_bytes()
    checkpoint = make()
    change(checkpoint)
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(path, checkpoint)
    assert str(raised.value).startswith(f"{path}: not written: ")
    assert message in str(raised.value)
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["good.h5", "good.h5.md5"]


def test_nadam_product_may_underflow_but_not_grow(tmp_path: Path) -> None:
    """The product of 8,000 factors of about 0.9 is 0 in float64: an honest run, not damage."""
    checkpoint = make(8000, optimizer="nadam")
    checkpoint.optimizer["mu_product"] = 0.0
    save_checkpoint(tmp_path / "a.h5", checkpoint)
    for wrong in (1.5, -0.1, float("inf")):
        checkpoint.optimizer["mu_product"] = wrong
        with pytest.raises(CheckpointError, match="/optimizer/mu_product"):
            save_checkpoint(tmp_path / "a.h5", checkpoint)


# ---------------------------------------------------------------- atomic saves


def test_a_full_disk_leaves_the_old_file_and_no_other(path: Path) -> None:
    """C12: every limit from nothing to one byte too few, in a process that must end without a signal."""
    code = """
        import resource, signal, sys; sys.path.insert(0, sys.argv[2])
        from test_checkpoint import make, save_checkpoint, RunError, h5py
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for limit in map(int, sys.argv[3:]):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                save_checkpoint(sys.argv[1], make(4))
            except RunError as error:
                print(error, h5py.h5f.get_obj_count(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE))
    """
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    size = len(before["good.h5"])
    limits = [1, 30, 96, 2048, size // 2, size - 600, size - 1]
    command = [sys.executable, "-c", textwrap.dedent(code), str(path), str(Path(__file__).parent)]
    done = subprocess.run([*command, *map(str, limits)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    expected = f"{path}: the checkpoint cannot be written: File too large 0"
    assert done.stdout.splitlines() == [expected] * len(limits)
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before


@pytest.mark.parametrize("call", ["pwrite", "ftruncate", "fsync", "replace"])
def test_ctrl_c_inside_a_save_leaves_the_old_file(
    path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = path.read_bytes()
    monkeypatch.setattr(os, call, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, make(4))
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert verify_checkpoint(path).ok
    assert [p for p in path.parent.iterdir() if p.suffix == ".tmp"] == []
    save_checkpoint(path, make(4))
    assert load_checkpoint(path).trainer["step"] == 4


@pytest.mark.parametrize("killed_at", [1, 2])
def test_a_kill_between_the_renames_leaves_files_that_verify(
    path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10: a sidecar of the old file must not stand beside the new one."""
    pid, status = os.fork(), 0
    if pid == 0:
        replace, calls = os.replace, [0]

        def kill(source: Any, target: Any) -> None:
            calls[0] += 1
            if calls[0] == killed_at:
                os._exit(9)
            replace(source, target)

        monkeypatch.setattr(os, "replace", kill)
        save_checkpoint(path, make(4))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 9
    report = verify_checkpoint(path)
    assert (report.ok, report.step) == (True, 3 if killed_at == 1 else 4)
    assert report.notes == ["no .md5 sidecar beside it"]
    assert len(remove_stale_temporaries(path.parent)) == 3 - killed_at
    assert [p.name for p in path.parent.iterdir()] == ["good.h5"]


def test_a_folder_that_is_a_file_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"x\.h5: the checkpoint cannot be written: Not a directory"):
        save_checkpoint(tmp_path / "file" / "x.h5", make(0))


def test_only_temporaries_of_dead_processes_are_removed(tmp_path: Path) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    mine, live, gone = os.getpid(), os.getppid(), int(dead.stdout)
    stale = [f".a.h5.{gone}.tmp", f".a.h5.md5.{gone}.tmp", f".b.h5.{mine}.tmp"]
    kept = [f".a.h5.{live}.tmp", "a.h5", f".notes.{gone}.tmp", f"a.h5.{gone}.tmp"]
    for name in stale + kept:
        (tmp_path / name).write_text("")
    assert sorted(p.name for p in remove_stale_temporaries(tmp_path)) == sorted(stale)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)


@pytest.mark.skipif(shutil.which("md5sum") is None, reason="needs md5sum")
@pytest.mark.parametrize(
    "name",
    ["good.h5", "a b.h5", "-x.h5", "a\\b.h5", "a\nb\rc.h5", "é日.h5", os.fsdecode(b"\xff.h5")],
    ids=ascii,  # a name that is no UTF-8 cannot be reported
)
def test_md5sum_accepts_the_sidecar(tmp_path: Path, name: str) -> None:
    """L04: also for names with escapes, in other scripts or not decodable at all."""
    save_checkpoint(tmp_path / name, make(0))
    done = subprocess.run(["md5sum", "-c", "--", f"{name}.md5"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done
    report = verify_checkpoint(tmp_path / name)
    assert (report.ok, report.notes) == (True, [])
    json.dumps(report.to_dict(), ensure_ascii=False).encode()


def test_a_wrong_sidecar_is_a_problem_and_a_missing_one_a_note(path: Path) -> None:
    sidecar = layout.sidecar_path(path)
    sidecar.write_bytes(write.sidecar_line("0" * 32, path.name))
    (problem,) = verify_checkpoint(path).problems
    assert problem.endswith(f"expected {'0' * 32} as in good.h5.md5")
    sidecar.unlink()
    assert verify_checkpoint(path).notes == ["no .md5 sidecar beside it"]


# ---------------------------------------------------------------- damage


def test_no_flipped_bit_changes_data_in_silence(path: Path) -> None:
    """C01, without the sidecar: a flip is found, or it lies in bytes that mean nothing."""
    good, reference = path.read_bytes(), load_checkpoint(path)
    layout.sidecar_path(path).unlink()
    rng, found = random.Random(1), 0
    for _ in range(150):
        damaged = bytearray(good)
        damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        report = verify_checkpoint(path)
        found += not report.ok
        if report.ok:
            assert_same(load_checkpoint(path), reference)
    assert found > 130  # the others hit padding between pieces of metadata


def test_every_flipped_bit_of_a_tensor_is_named(path: Path) -> None:
    good = path.read_bytes()
    with h5py.File(path) as file:
        start = file[WEIGHT].id.get_offset()
    for bit in range(5, 192 * 8, 211):
        damaged = bytearray(good)
        damaged[start + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert f"{WEIGHT}: md5 " in refusal(path)


@pytest.mark.parametrize("length", [0, 1, 8, 47, 96, 0.5, -1])
def test_a_truncated_file_is_refused(path: Path, length: float) -> None:
    good = path.read_bytes()
    path.write_bytes(good[: int(len(good) * length) if 0 < length < 1 else int(length)])
    assert any(word in refusal(path) for word in ("truncated", "empty", "does not begin"))


def test_appended_junk_is_refused(path: Path) -> None:
    """HDF5 itself opens such a file."""
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * 400)
    assert refusal(path) == f"changed: {size + 400:,} bytes, its superblock says {size:,}"


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    text, other, fifo = tmp_path / "text.h5", tmp_path / "other.h5", tmp_path / "fifo.h5"
    text.write_text("hello " * 100)
    with h5py.File(other, "w", libver="v110") as file:
        file["x"] = 1
    os.mkfifo(fifo)
    assert refusal(text) == "not a checkpoint: it does not begin as an HDF5 file does"
    assert refusal(other) == "not a gru-ref checkpoint: attribute format is missing"
    for path in (fifo, Path("/dev/null"), tmp_path):
        assert refusal(path) == "not a regular file"
    for function in (load_checkpoint, verify_checkpoint):
        with pytest.raises(UsageError, match="no such file"):
            function(tmp_path / "missing.h5")


# ---------------------------------------------------------------- structure


def _replace(name: str, **how: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, **how)

    return change


def _link(name: str, target: Any) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        if name in file:
            del file[name]
        file[name] = file[target] if isinstance(target, str) else target

    return change


def _virtual(file: h5py.File) -> None:
    source = h5py.VirtualLayout((7,), "<f4")
    source[:] = h5py.VirtualSource("fifo", "x", (7,))
    del file[BIAS]
    file.create_virtual_dataset(BIAS, source)


def _nested(file: h5py.File) -> None:
    group = file
    for _ in range(500):
        group = group.create_group("g")


def _committed(file: h5py.File) -> None:
    file["t"] = np.dtype("<f4")
    _replace(BIAS, shape=(7,), dtype=file["t"], data=np.zeros(7, "<f4"))(file)


def _version(value: Any) -> Callable[[h5py.File], None]:
    return lambda file: file.attrs.__setitem__("format_version", value)


STRUCTURES = {
    "missing": (lambda f: f.__delitem__(BIAS), f"{BIAS}: missing, expected float32 (7,)"),
    "extra": (
        _link("/model/zzz", np.zeros(3, "<f4")),
        "/model/zzz: float32 (3,), not explained by the config",
    ),
    "mis-shaped": (_link(BIAS, np.zeros(1, "<f4")), f"{BIAS}: found float32 (1,), expected float32 (7,)"),
    "scalar": (_link(BIAS, np.float32(1)), f"{BIAS}: found float32 scalar, expected float32 (7,)"),
    "no elements": (_link(BIAS, np.zeros(0, "<f4")), f"{BIAS}: no elements"),
    "transposed": (
        _link("/model/gru.0.weight_ih", np.zeros((3, 12), "<f4")),
        "/model/gru.0.weight_ih: found float32 (3, 12), expected float32 (12, 3)",
    ),
    "float64": (_link(BIAS, np.zeros(7, "<f8")), f"{BIAS}: found float64 (7,), expected float32 (7,)"),
    "big-endian": (_link(BIAS, np.zeros(7, ">f4")), f"{BIAS}: found big-endian float32 (7,)"),
    "integer": (_link(BIAS, np.zeros(7, "<i4")), f"{BIAS}: found type int32 (7,)"),
    "complex": (_link(BIAS, np.zeros(7, "c8")), f"{BIAS}: found type complex64 (7,)"),
    "text": (_link(BIAS, np.array("text", object)), f"{BIAS}: found type object scalar"),
    "opaque": (_link(BIAS, np.void(b"cos\nsystem")), f"{BIAS}: found type |V10 scalar"),
    "reference": (_replace(BIAS, shape=(7,), dtype=h5py.ref_dtype), f"{BIAS}: found type object (7,)"),
    "empty": (_link(BIAS, h5py.Empty("<f4")), f"{BIAS}: no value"),
    "compressed": (_replace(BIAS, data=np.zeros(7, "<f4"), compression="gzip"), f"{BIAS}: chunked, compact"),
    "unwritten": (_replace(BIAS, shape=(7,), dtype="<f4"), f"{BIAS}: 0 bytes stored, expected 28"),
    "virtual": (_virtual, f"{BIAS}: a virtual dataset, expected its own data; not followed"),
    "external": (
        _replace(BIAS, shape=(7,), dtype="<f4", external=[("fifo", 0, 28)]),
        f"{BIAS}: external storage",
    ),
    "committed": (_committed, "/t: a committed datatype"),
    "external link": (_link(BIAS, h5py.ExternalLink("fifo", "/x")), f"{BIAS}: an external link"),
    "linked group": (_link("/model", h5py.ExternalLink("fifo", "/model")), "/model: an external link"),
    "soft link": (_link(BIAS, h5py.SoftLink("/optimizer/m/classifier.bias")), f"{BIAS}: a soft link"),
    "dangling loop": (_link("/a", h5py.SoftLink("/a")), "/a: a soft link"),
    "hard link": (_link(BIAS, "/optimizer/m/classifier.bias"), ": the same object as"),
    "cycle": (_link("/model/self", "/model"), "/model/self: the same object as /model"),
    "cycle to the root": (_link("/optimizer/m", "/"), "/optimizer/m: the same object as /"),
    "nested": (_nested, "/g: an unexpected group"),
    "empty group": (lambda f: f["/trainer"].clear(), "/trainer: 0 objects"),
    "attribute": (lambda f: f[BIAS].attrs.__setitem__("x", 1), f"{BIAS}: unexpected attributes"),
    "group attribute": (lambda f: f["/model"].attrs.__setitem__("x", 1), "/model: unexpected attributes"),
    "root attribute": (lambda f: f.attrs.__setitem__("x", 1), "unexpected attribute x"),
    "control characters": (_link("/model/\x1b\n", np.zeros(3, "<f4")), "/model/\\x1b\\n: float32 (3,), not"),
    "no config": (lambda f: f.__delitem__("config"), "/config: missing"),
    "numeric config": (
        _link("/config", np.float32(1)),
        "/config: found float32 scalar, expected a text scalar",
    ),
    "no manifest": (lambda f: f.__delitem__("manifest"), "/manifest: missing"),
    "other manifest": (lambda f: put(f, "/manifest", np.array(b"[]")), "/manifest: md5 "),
    "no step": (lambda f: f.__delitem__("/trainer/step"), "/trainer/step: missing, expected int64 scalar"),
    "newer": (_version(np.int64(999)), "made by a newer gru-ref (format version 999): upgrade"),
    "version 0": (_version(np.int64(0)), "format version 0 does not exist"),
    "version text": (_version("1.0"), "attribute format_version: type object scalar, expected int64"),
    "no version": (lambda f: f.attrs.__delitem__("format_version"), "attribute format_version is missing"),
    "other format": (
        lambda f: f.attrs.__setitem__("format", np.bytes_(b"x")),
        "attribute format: another kind",
    ),
    "incomplete": (lambda f: f.attrs.__delitem__("complete"), "not complete: attribute complete"),
    "no md5": (lambda f: f.attrs.__delitem__("manifest_md5"), "attribute manifest_md5 is missing"),
}


def make_bpe(*special: str) -> Checkpoint:
    """A checkpoint with a vocabulary of its own: the bytes, and what else is given."""
    checkpoint = make(vocab_size=256 + len(special))
    checkpoint.config = checkpoint.config.replace("data", tokenizer="bpe")
    checkpoint.tokenizer = {"tokens": [*ALPHABET, *special], "merges": []}
    return checkpoint


def test_the_vocabulary_of_bpe_comes_back(tmp_path: Path) -> None:
    """What decodes samples is in the checkpoint, and read with the weights alone too."""
    path = tmp_path / "a.h5"
    save_checkpoint(path, make_bpe("<|endoftext|>"))
    for weights_only in (False, True):
        loaded = load_checkpoint(path, weights_only=weights_only)
        assert loaded.tokenizer == make_bpe("<|endoftext|>").tokenizer
        assert restore_tokenizer(loaded).decode([68]) == b"D"
    assert verify_checkpoint(path).ok
    assert load_checkpoint(path).config.data.tokenizer == "bpe"


def test_a_vocabulary_that_the_config_does_not_explain_is_not_written(tmp_path: Path) -> None:
    without, needless = make_bpe(), make()
    without.tokenizer = None
    needless.tokenizer = make_bpe().tokenizer
    for checkpoint, reason in ((without, "/tokenizer: missing"), (needless, "/tokenizer: not explained")):
        with pytest.raises(CheckpointError, match=reason):
            save_checkpoint(tmp_path / "a.h5", checkpoint)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.__delitem__("tokenizer"), "/tokenizer: missing, expected for tokenizer 'bpe'"),
        (lambda f: put(f, "/tokenizer", np.array(b"[]")), "/tokenizer: the vocabulary is not an object"),
        (lambda f: put(f, "/tokenizer", np.array(b"{")), "/tokenizer: not valid JSON"),
        (_link("/tokenizer", np.float32(1)), "/tokenizer: found float32 scalar, expected a text scalar"),
        (_link("/tokenizer", h5py.SoftLink("/config")), "/tokenizer: a soft link"),
        (
            lambda f: put(f, "/tokenizer", np.array(layout.to_json(make_bpe("<a>").tokenizer).encode())),
            "/tokenizer: model.vocab_size 256 is not the 257",
        ),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[h5py.File], None], message: str
) -> None:
    """C02: weights for another vocabulary."""
    path = tmp_path / "a.h5"
    save_checkpoint(path, make_bpe())
    edit(path, change, reseal="soft" not in message)
    assert message in refusal(path)


@pytest.mark.parametrize("version", range(1, layout.FORMAT_VERSION))
def test_a_file_of_an_earlier_format_version_is_read(path: Path, version: int) -> None:
    """C13: what a later version added has its default there; any other missing key is an error."""
    added = [key for since, keys in layout.ADDED_KEYS.items() if since > version for key in keys]

    def as_it_was(file: h5py.File) -> None:
        _version(np.int64(version))(file)
        tables = json.loads(file["config"][()])
        for key in added:
            table, name = key.split(".")
            del tables[table][name]
        put(file, "/config", np.array(layout.to_json(tables).encode()))

    before = load_checkpoint(path)
    edit(path, as_it_was, reseal=True)
    assert_same(load_checkpoint(path), before)
    assert verify_checkpoint(path).format_version == version
    edit(path, _version(np.int64(layout.FORMAT_VERSION)))
    with pytest.raises(CheckpointError, match=f"/config: key {min(added)} is missing"):
        load_checkpoint(path)


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_that_the_writer_does_not_make_is_refused(path: Path, name: str) -> None:
    """C02, C03, C04, C06, C13. A target that was opened would hang: it is a FIFO that no one writes to."""
    os.mkfifo(path.with_name("fifo"))
    change, message = STRUCTURES[name]
    edit(path, change)
    assert message in refusal(path)


def test_a_transposed_square_matrix_is_found_by_its_md5(path: Path, tmp_path: Path) -> None:
    """C02: its shape is right."""
    save_checkpoint(path, make(vocab_size=4))

    def transpose(file: h5py.File) -> None:
        name = "/model/classifier.weight"
        put(file, name, np.ascontiguousarray(file[name][()].T))

    edit(path, transpose)
    assert "/model/classifier.weight: md5 " in refusal(path)


def _text(name: str, change: Callable[[Any], Any]) -> Callable[[h5py.File], None]:
    def apply(file: h5py.File) -> None:
        put(file, name, np.array(change(file[name][()])))

    return apply


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[h5py.File], None]:
    def apply(text: bytes) -> bytes:
        tables = json.loads(text)
        change(tables)
        return json.dumps(tables).encode()

    return _text("/config", apply)


VALUES = {
    "nan moment": (_link("/optimizer/m/classifier.bias", np.array([0, 0, 0, np.nan, 0, np.inf, 0], "<f4")),
                   "/optimizer/m/classifier.bias: 1 NaN and 1 Inf, the first at [3]"),
    "negative v": (_link("/optimizer/v/classifier.bias", -np.eye(7, dtype="<f4")[2]),
                   "/optimizer/v/classifier.bias: 1 negative second moments, the first at [2]"),
    "nan weight": (_link(WEIGHT, np.full((12, 4), np.nan, "<f4")), f"{WEIGHT}: 48 NaN and 0 Inf"),
    "nan best": (_link("/trainer/best_loss", np.float64(np.nan)), "/trainer/best_loss: nan, expected"),
    "negative": (_link("/trainer/tokens", np.int64(-1)), "/trainer/tokens: -1, expected at least 0"),
    "steps": (_link("/optimizer/step", np.int64(2)), "/optimizer/step: 2, expected 3 as in /trainer/step"),
    "best step": (_link("/trainer/best_step", np.int64(4)), "/trainer/best_step: 4, expected 0 to 3"),
    "skipped": (_link("/trainer/skipped", np.int64(0)), "/trainer/skipped_in_a_row: more than"),
    "step 0": (_link("/trainer/step", np.int64(0)), "/optimizer/m/classifier.bias: float32 (7,), not"),
    "float step": (_link("/trainer/step", np.float64(3)), "/trainer/step: found float64 scalar"),
    "data": (_text("/data", lambda _: b"[1]"), "/data: not a JSON object"),
    "data nan": (_text("/data", lambda _: b'{"x": NaN}'), "/data: not valid JSON: NaN is not JSON"),
    "deep data": (_text("/data", lambda _: b"[" * 100_000), "/data: not valid JSON"),
    "not utf-8": (_text("/data", lambda _: b"\xff\xfe"), "/data: not valid JSON"),
    "unknown key": (_config(lambda c: c["model"].update(zzz=1)), "/config: unknown key 'model.zzz'"),
    "missing key": (_config(lambda c: c["train"].pop("seed")), "/config: key train.seed is missing"),
    "bad value": (_config(lambda c: c["model"].update(hidden=-1)), "/config: model.hidden must be"),
    "other kind": (_config(lambda c: c["model"].update(kind="os")), "/config: model.kind must be one of"),
    "other size": (_config(lambda c: c["model"].update(hidden=2**20)), "expected float32 (3145728, 3)"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_no_run_produces_is_refused_though_every_md5_agrees(path: Path, name: str) -> None:
    """C09, C13: md5 proves what was written, not that it made sense."""
    change, message = VALUES[name]
    edit(path, change, reseal=True)
    assert message in refusal(path)


def test_resealing_alone_is_no_fault(path: Path) -> None:
    """So the refusals above are for what was changed."""
    edit(path, lambda file: None, reseal=True)
    assert verify_checkpoint(path).ok


def test_a_dataset_that_only_the_manifest_knows_is_named(path: Path) -> None:
    extra = json.loads(np.array(layout.manifest_dataset({"/x\n": np.zeros(1)})).item())
    edit(path, _text("/manifest", lambda text: json.dumps(json.loads(text) + extra).encode()))
    with h5py.File(path, "r+") as file:
        value = layout.md5(np.array(file["/manifest"][()]))
        file.attrs.create("manifest_md5", value.encode(), dtype=h5py.string_dtype("utf-8", 32))
    assert refusal(path) == "/x\\n: in the manifest, missing in the file"


# ---------------------------------------------------------------- values and reports


def test_all_problems_are_reported_and_the_report_is_valid_json(path: Path) -> None:
    def damage(file: h5py.File) -> None:
        _link(BIAS, np.full(7, np.inf, "<f4"))(file)
        _link(WEIGHT, np.full((12, 4), np.nan, "<f4"))(file)

    edit(path, damage)
    report = verify_checkpoint(path)
    assert {problem.partition(":")[0] for problem in report.problems} == {BIAS, WEIGHT}
    assert len(report.problems) == 4  # md5 and values, twice
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors[WEIGHT] | {"shape": None} == {
        "name": WEIGHT, "shape": None, "dtype": "float32", "md5_ok": False, "nan": 48, "inf": 0,
        "min": None, "max": None, "mean": None, "std": None, "in_range": False,
    }  # fmt: skip
    assert (found["ok"], found["bytes"], len(tensors)) == (False, path.stat().st_size, 21)


def test_values_of_no_trained_model_are_out_of_range(path: Path) -> None:
    checkpoint = make()
    for name in checkpoint.model:
        checkpoint.model[name] = np.zeros_like(checkpoint.model[name])
    checkpoint.model["gru.0.bias_hh"][0] = 2e3
    save_checkpoint(path, checkpoint)
    problems = verify_checkpoint(path).problems
    assert [problem.partition(":")[0].rpartition("/")[2] for problem in problems] == [
        "embedding.weight", "gru.0.weight_ih", "gru.0.weight_hh", "gru.0.bias_hh", "classifier.weight",
    ]  # fmt: skip
    assert problems[2] == (
        f"{WEIGHT}: out of range for a trained recurrent matrix: "
        "largest |x| 0 and std 0, expected at most 100 and 1e-05 to 10"
    )
    load_checkpoint(path)  # unusual, and what was written


def test_one_element_matrices_have_no_spread_and_pass(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.h5", make(0, vocab_size=1, embedding=1))
    assert verify_checkpoint(tmp_path / "a.h5").ok


def test_statistics_are_summed_in_float64_over_all_blocks() -> None:
    x = (np.random.default_rng(0).standard_normal((1 << 20) + 17) * 1e-3 + 5e3).astype("f4")
    low, high, mean, std = statistics(x)
    assert (low, high) == (x.min(), x.max())
    assert mean == pytest.approx(x.astype("f8").mean(), rel=1e-14)
    assert std == pytest.approx(x.astype("f8").std(), rel=1e-10)


# ---------------------------------------------------------------- access


def _as_nobody(function: Callable[[], object]) -> None:
    """Run it in a child without root's rights; fail with what it raises."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(65534, 65534, 65534)
                os.setresuid(65534, 65534, 65534)
            function()
        except BaseException as error:  # noqa: BLE001 - pytest's failures too; the parent reports it
            os.write(writer, repr(error).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        raised = pipe.read().decode()
    os.waitpid(pid, 0)
    assert raised == ""


def test_reading_needs_read_permission_only(path: Path) -> None:
    """C12: a file of mode 0444 in a folder of mode 0555, and one of mode 000."""
    folder, secret = path.parent, path.with_name("secret.h5")
    shutil.copy(path, secret)
    path.chmod(0o444)
    secret.chmod(0)
    folder.chmod(0o555)
    os.chdir(folder)  # the folders above belong to the user who runs the tests

    def read() -> None:
        load_checkpoint("good.h5")
        assert verify_checkpoint("good.h5").ok
        assert refusal(Path("secret.h5")) == "cannot be read: Permission denied"
        with pytest.raises(RunError, match="Permission denied"):
            save_checkpoint("good.h5", make(4))

    try:
        _as_nobody(read)
    finally:
        folder.chmod(0o755)
    assert load_checkpoint(path).trainer["step"] == 3


def test_a_locked_file_is_explained_in_one_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: it is open for writing elsewhere."""
    monkeypatch.delenv("HDF5_USE_FILE_LOCKING", raising=False)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert refusal(path) == "locked: another process has it open for writing; try again later"
    assert verify_checkpoint(path).ok


def test_a_file_system_without_locks_is_explained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: errno 37, as on some network file systems."""

    def fail(*_: Any) -> None:
        raise OSError(37, "Unable to synchronously open file (unable to lock file, errno = 37)")

    monkeypatch.setattr(h5py, "File", fail)
    (problem,) = verify_checkpoint(path).problems
    assert problem.startswith("cannot be locked: unable to lock file, errno = 37; set HDF5_USE_FILE_LOCKING")


def test_a_superblock_of_another_version_is_refused(path: Path) -> None:
    good = bytearray(path.read_bytes())
    assert struct.unpack_from("<Q", good, 28)[0] == len(good)
    good[8] = 0
    path.write_bytes(good)
    assert "another format version (superblock)" in refusal(path)
