"""Numba's cache of compiled kernels where it is missing, unwritable, damaged or shared (E04).

The first half runs a copy of the package in processes of their own, with an environment that has nothing but
what the test says. The second half compiles one kernel here, with the cache in a folder of the test.
"""

import errno
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numba
import numpy as np
import pytest

import gru_ref
from gru_ref.kernels import numba_cpu
from gru_ref.kernels.numba_cpu import _compile

SCRIPT = """
import numpy as np
from gru_ref import Backend
_, dweight = Backend("numba").embedding.backward(np.ones((3, 2)), (np.array([1, 0, 1]), 2))
assert dweight.tolist() == [[1, 1], [2, 2]]
from gru_ref.kernels.numba_cpu.embedding import _add_rows
stats = _add_rows.compiled[np.dtype(np.float64)].stats
print("hit" if stats.cache_hits else "compiled", "uncached" if stats.cache_path is None else "cached")
"""
ROOT = Path(gru_ref.__file__).parent
KERNELS = Path(numba_cpu.__file__).parents[1]


@pytest.fixture
def package(tmp_path):
    """A copy of the package, as it is when installed, without any cached kernel."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT, tmp_path / "site" / "gru_ref", ignore=ignore)
    shutil.copytree(KERNELS, tmp_path / "site" / "gru_ref" / "kernels", ignore=ignore, dirs_exist_ok=True)
    (tmp_path / "cwd").mkdir()
    return tmp_path


def start(package, **environment):
    """The script in the copy, with the path of the copy and `environment` and nothing else."""
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(package / "site"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        **{name: str(value) for name, value in environment.items()},
    }
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=package / "cwd",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """What a process that ended well printed, and its warnings."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip(), [line for line in err.splitlines() if "Warning" in line]


def files(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def make_unwritable(package):
    """No cache beside the kernels, even for root: a file is where the folder would be."""
    (package / "site" / "gru_ref" / "kernels" / "numba_cpu" / "__pycache__").write_text("")


# --- in processes of their own ----------------------------------------------------------------------------


def test_without_a_home_the_cache_is_beside_the_kernels_and_nothing_else_is_written(package):
    """`env -i`, then HOME=/nonexistent: the second process loads what the first one compiled."""
    before = files(package)
    assert finish(start(package)) == ("compiled cached", [])
    written = files(package) - before
    cache = package / "site" / "gru_ref" / "kernels" / "numba_cpu" / "__pycache__"
    assert {path.parent for path in written} == {cache}
    assert sorted(path.suffix for path in written) == [".nbc", ".nbi", ".sha256"]
    assert finish(start(package, HOME="/nonexistent")) == ("hit cached", [])
    assert files(package) - before == written
    assert not Path("/nonexistent").exists()


def test_a_cache_folder_that_is_a_file_is_one_warning_and_no_cache(package):
    chosen = package / "file"
    chosen.write_text("")
    before = files(package)
    out, warned = finish(start(package, NUMBA_CACHE_DIR=chosen))
    assert out == "compiled uncached"
    assert len(warned) == 1
    assert f"(NUMBA_CACHE_DIR={chosen} cannot be written); set NUMBA_CACHE_DIR to a folder" in warned[0]
    assert files(package) == before


def test_without_any_folder_that_can_be_written_there_is_one_warning_and_no_cache(package):
    (package / "file").write_text("")
    make_unwritable(package)
    before = files(package)
    out, warned = finish(start(package, HOME=package / "file" / "home"))
    assert out == "compiled uncached"
    assert len(warned) == 1
    assert files(package) == before


def test_two_processes_that_compile_at_once_share_the_cache(package):
    """Each may find the other's files half written, and one that comes later may have to compile again."""
    started = [start(package, NUMBA_CACHE_DIR=package / "cache") for _ in range(2)]
    for result in [finish(process) for process in started]:
        assert result in (("compiled cached", []), ("hit cached", []))
    assert {path.suffix for path in files(package / "cache")} == {".nbc", ".nbi", ".sha256"}
    out, warned = finish(start(package, NUMBA_CACHE_DIR=package / "cache"))
    assert out.endswith(" cached")
    assert warned == []


# --- in this process --------------------------------------------------------------------------------------


def add_one(x):
    x[0] += 1


def run(dtype=np.float32):
    """Call a new Kernel, which has to look for its code: was it in the cache?"""
    kernel = _compile.Kernel(add_one, "T[::1]")
    x = np.zeros(1, dtype)
    kernel(x)
    assert x == 1
    return "hit" if kernel.compiled[x.dtype].stats.cache_hits else "compiled"


@pytest.fixture(scope="module")
def good_cache(tmp_path_factory):
    """A folder with one compiled kernel."""
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba.config, "CACHE_DIR", str(folder))
        assert run() == "compiled"
    return folder


@pytest.fixture
def cache(good_cache, tmp_path, monkeypatch):
    """A copy of it, which is where kernels are cached in the test."""
    shutil.copytree(good_cache, tmp_path / "cache")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("suffix", [".nbi", ".nbc", ".sha256"])
@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
def test_a_damaged_cache_is_made_again_without_a_word(damage, suffix, cache):
    (file,) = (path for path in files(cache) if path.suffix == suffix)
    good = {path.name: path.read_bytes() for path in files(cache)}
    assert run() == "hit"
    damage(file)
    assert run() == "compiled"
    assert run() == "hit"
    assert {path.name for path in files(cache)} == good.keys()


def test_each_dtype_has_files_of_its_own(cache):
    """Numba's index of several signatures loses one when two processes add to it at once."""
    before = {path: path.read_bytes() for path in files(cache)}
    assert run(np.float64) == "compiled"
    assert len(files(cache)) == 2 * len(before)
    assert {path: path.read_bytes() for path in before} == before


def test_the_seal_is_a_list_that_sha256sum_checks(cache):
    (seal,) = cache.rglob("*.sha256")
    subprocess.run(
        ["sha256sum", "-c", "--strict", seal.name], cwd=seal.parent, check=True, capture_output=True
    )
    assert len(seal.read_text().splitlines()) == 3  # the sources, and numba's index and data


def test_a_cache_that_fails_while_it_is_written_is_a_warning(cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    shutil.rmtree(cache)
    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "save", full)
    monkeypatch.setattr(_compile, "_warned", False)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert run() == "compiled"


def test_many_kernels_without_a_cache_are_one_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(_compile, "_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        run()
    assert len(caught) == 1
