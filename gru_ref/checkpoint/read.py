"""Reading a checkpoint without trusting it: one pass that serves loading and verifying.

    superblock → root attributes → structure of every object → manifest and config → layout → each tensor

Nothing that a link, a virtual dataset or external storage points to is ever opened: a file that holds one is
refused before any dataset is read. Only the groups and datasets of the layout are entered, so the work is
bounded by the size of the file. md5 finds damage, not tampering: whoever edits a file can edit its manifest.
"""

import contextlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5l, h5o, h5s, h5t

from gru_ref import config as configuration
from gru_ref.checkpoint import layout
from gru_ref.checkpoint.layout import Checkpoint, Facts, Scalar
from gru_ref.config import Config
from gru_ref.data.tokenizers import get_tokenizer
from gru_ref.errors import CheckpointError, ConfigError, DataError, UsageError
from gru_ref.types import Array

Report: TypeAlias = Callable[[str], None]
"""Takes one line about a problem that allows to go on; it may raise CheckpointError to stop here."""

MAX_OBJECTS = 200_000  # 10,000 layers have 120,003 tensors and moments
_HDF5_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)  # all that h5py makes of a bad file
_EXACT_TYPES = {
    "<f4": h5t.IEEE_F32LE,
    "<f8": h5t.IEEE_F64LE,
    "<i8": h5t.STD_I64LE,
    "<u8": h5t.STD_U64LE,
}


@dataclass
class Contents:
    """What a pass learned beside the tensors."""

    config: Config
    data: dict[str, Any]
    tokenizer: dict[str, Any] | None  # of bpe
    scalars: dict[str, Scalar]  # by path
    format_version: int


def load_checkpoint(path: str | Path, *, weights_only: bool = False) -> Checkpoint:
    """Read a checkpoint, checking structure, md5 and finiteness of all that is read.

    With `weights_only` the moments and the hidden state are neither read nor returned ({} and None); their
    structure is still checked. Raises CheckpointError, one line naming file, dataset, expected and found;
    UsageError for a path that does not exist.
    """

    def stop(problem: str) -> None:
        raise CheckpointError(problem)

    tensors: dict[str, Array] = {}

    def keep(name: str, array: Array, _: bool) -> None:
        tensors[name] = array

    try:
        contents = examine(Path(path), stop, keep, weights_only=weights_only)
    except CheckpointError as error:
        raise CheckpointError(f"{printable(str(path))}: {error}") from None
    return layout.from_datasets(contents.config, contents.data, contents.tokenizer, contents.scalars, tensors)


def examine(
    path: Path, report: Report, visit: Callable[[str, Array, bool], None], *, weights_only: bool = False
) -> Contents:
    """One pass: `visit(path in the file, array, whether its md5 is right)` for each tensor, one at a time.

    Problems that allow to go on are reported; those that do not are raised as CheckpointError, whose message
    does not name the file.
    """
    size = _container_size(path)
    with _open(path) as file:
        version, manifest_md5 = _root_attributes(file)
        found = _sound_structure(file, size, report)
        reader = _Reader(file, found, report, manifest_md5)
        config = _config(reader.json("/config"), version)
        data = reader.json("/data")
        if not isinstance(data, dict):
            raise CheckpointError("/data: not a JSON object")
        tokenizer = _vocabulary(reader, config, report)
        numbers = {path: item for path, item in found.items() if path not in layout.TEXTS}
        scalars = _scalars(reader, numbers)
        has_moments = any(name.startswith("/optimizer/m/") for name in numbers)
        step = int(scalars.get("/trainer/step", has_moments))  # a missing step is the only problem then
        problems = layout.layout_problems(numbers, config, step)
        for problem in problems or layout.scalar_problems(scalars, config):
            report(problem)
        named = {problem.partition(":")[0] for problem in problems}
        reader.check_manifest(named)
        for name in layout.tensor_shapes(config, step):
            if name not in named and (name.startswith("/model/") or not weights_only):
                _visit(name, reader, report, visit)
    return Contents(config, data, tokenizer, scalars, version)


def _visit(name: str, reader: "_Reader", report: Report, visit: Callable[[str, Array, bool], None]) -> None:
    try:
        array, is_right = reader.read(name)
    except CheckpointError as error:
        report(str(error))
        return
    for problem in layout.tensor_problems(name, array):
        report(problem)
    visit(name, array, is_right)


def _container_size(path: Path) -> int:
    """Size of the file, once it agrees with the superblock that `save_checkpoint` writes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("not a regular file")
        with path.open("rb") as file:
            block = file.read(48)
    except FileNotFoundError:
        raise UsageError(f"{printable(str(path))}: no such file; name a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    if not status.st_size:
        raise CheckpointError("an empty file")
    if not block.startswith(b"\x89HDF\r\n\x1a\n"):
        raise CheckpointError("not a checkpoint: it does not begin as an HDF5 file does")
    if len(block) < 48:
        raise CheckpointError(f"truncated: {status.st_size} bytes")
    if block[8] not in (2, 3) or block[9:11] != b"\x08\x08":
        raise CheckpointError("not a checkpoint: an HDF5 file of another format version (superblock)")
    base, _, end = struct.unpack_from("<QQQ", block, 12)
    if base != 0 or end != status.st_size:
        word = "truncated" if status.st_size < end else "changed"
        raise CheckpointError(f"{word}: {status.st_size:,} bytes, its superblock says {end:,}")
    return status.st_size


@contextlib.contextmanager
def _hdf5(what: str) -> Iterator[None]:
    """Turn whatever h5py raises in this block into one line about `what`."""
    try:
        yield
    except _HDF5_ERRORS as error:
        raise CheckpointError(f"{what}: damaged HDF5: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What HDF5 says in brackets after the name of its own function, or the whole text."""
    text = str(error.args[-1]) if error.args else type(error).__name__
    return printable(text.partition("(")[2].removesuffix(")") or text)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[h5py.File]:
    try:
        file = h5py.File(path, "r")
    except BlockingIOError:
        raise CheckpointError("locked: another process has it open for writing; try again later") from None
    except PermissionError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}") from None
    except _HDF5_ERRORS as error:
        if "unable to lock" in str(error):  # some network and read-only file systems cannot
            advice = "set HDF5_USE_FILE_LOCKING=FALSE if no one writes it"
            raise CheckpointError(f"cannot be locked: {_reason(error)}; {advice}") from None
        raise CheckpointError(f"damaged HDF5: {_reason(error)}") from None
    with contextlib.closing(file):
        yield file


def _root_attributes(file: h5py.File) -> tuple[int, str]:
    """Check format, version and completeness; returns the version and the md5 of the manifest."""
    with _hdf5("root attributes"):
        names = {printable(name) for name in file.attrs}
    if "format" not in names:
        raise CheckpointError("not a gru-ref checkpoint: attribute format is missing")
    found = _attribute(file, "format", "a fixed-length string")
    if found != layout.FORMAT:
        raise CheckpointError(f"not a gru-ref checkpoint: attribute format is {found!r}")
    if "format_version" not in names:
        raise CheckpointError("attribute format_version is missing")
    version = _attribute(file, "format_version", "int64")
    if version > layout.FORMAT_VERSION:
        raise CheckpointError(
            f"made by a newer gru-ref (format version {version}): upgrade gru-ref to read it"
        )
    if version < 1:
        raise CheckpointError(f"format version {version} does not exist")
    if "complete" not in names or _attribute(file, "complete", "int64") != 1:
        raise CheckpointError("not complete: attribute complete is not 1, so its writing was interrupted")
    if "manifest_md5" not in names:
        raise CheckpointError("attribute manifest_md5 is missing")
    extra = names - {"format", "format_version", "complete", "manifest_md5"}
    if extra:
        raise CheckpointError(f"unexpected attribute {min(extra)}")
    return int(version), str(_attribute(file, "manifest_md5", "a fixed-length string"))


def _attribute(file: h5py.File, name: str, expected: str) -> Any:
    """Value of a scalar root attribute, whose type is looked at before anything is read."""
    with _hdf5(f"attribute {name}"):
        attribute = h5a.open(file.id, name.encode())
        found, shape = _type_name(attribute.get_type()), attribute.shape
        is_expected = found == "<i8" if expected == "int64" else found.startswith("|S")
        if shape == () and is_expected:
            value = np.empty((), found)
            attribute.read(value, attribute.get_type())
    if shape != () or not is_expected:
        raise CheckpointError(f"attribute {name}: {layout.show((found, shape or ()))}, expected {expected}")
    return value.item().decode("utf-8", "backslashreplace") if found.startswith("|S") else value.item()


def _sound_structure(file: h5py.File, size: int, report: Report) -> dict[str, Facts]:
    """The datasets of the file, or CheckpointError once all that is not of the plain kind is reported."""
    structure = _Structure(file, size)
    for problem in structure.problems[:-1]:
        report(problem)
    if structure.problems:
        raise CheckpointError(structure.problems[-1])
    return structure.found


class _Structure:
    """Type and shape of every dataset by path, from object headers alone: no dataset is read.

    Only the groups of the layout are entered, so links cannot lead in circles or deeper than the layout.
    """

    def __init__(self, file: h5py.File, size: int) -> None:
        self.size = size
        self.found: dict[str, Facts] = {}
        self.problems: list[str] = []
        self.groups = {"/": file.id}
        self.addresses = {h5o.get_info(file.id, b".").addr: "/"}
        for parent in layout.GROUPS:
            if parent in self.groups:
                with _hdf5(parent):
                    self._enter_group(parent)

    def _enter_group(self, parent: str) -> None:
        group = self.groups[parent]
        count = group.get_num_objs()
        if not 0 < count <= MAX_OBJECTS:
            self.problems.append(f"{parent}: {count:,} objects, expected 1 to {MAX_OBJECTS:,}")
            return
        if parent != "/" and h5a.get_num_attrs(group):
            self.problems.append(f"{parent}: unexpected attributes")
        names: list[bytes] = []
        group.links.iterate(names.append)
        for name in names:
            path = f"{parent.rstrip('/')}/{printable(os.fsdecode(name))}"
            with _hdf5(path):
                problem = self._enter_link(group, name, path)
            if problem:
                self.problems.append(f"{path}: {problem}")

    def _enter_link(self, group: h5g.GroupID, name: bytes, path: str) -> str | None:
        """Note the object that one link leads to; returns what is wrong with it."""
        kind = group.links.get_info(name).type
        if kind != h5l.TYPE_HARD:
            word = {h5l.TYPE_SOFT: "a soft link", h5l.TYPE_EXTERNAL: "an external link"}
            return f"{word.get(kind, 'a user-defined link')}, expected the object itself; not followed"
        info = h5o.get_info(group, name)
        if info.addr in self.addresses:
            return f"the same object as {self.addresses[info.addr]}, expected one of its own"
        self.addresses[info.addr] = path
        if info.type == h5o.TYPE_GROUP:
            if path not in layout.GROUPS:
                return "an unexpected group"
            self.groups[path] = h5g.open(group, name)
            return None
        if info.type != h5o.TYPE_DATASET:
            return "a committed datatype, expected a dataset"
        dataset = h5d.open(group, name)
        self.found[path] = (_type_name(dataset.get_type()), dataset.shape or ())
        return _dataset_problem(dataset, self.size)


def _dataset_problem(dataset: h5d.DatasetID, size: int) -> str | None:
    """What makes a dataset more than plain bytes of a known type inside this file."""
    creation, kind = dataset.get_create_plist(), dataset.get_type()
    if creation.get_layout() == h5d.VIRTUAL:
        return "a virtual dataset, expected its own data; not followed"
    if creation.get_external_count():
        return "external storage, expected its data in this file; not opened"
    if creation.get_layout() != h5d.CONTIGUOUS or creation.get_nfilters():
        return "chunked, compact or filtered storage, expected contiguous"
    if dataset.get_space().get_simple_extent_type() == h5s.NULL:
        return "no value (a null dataspace)"
    if kind.committed():
        return "a committed datatype, expected its own"
    name = _type_name(kind)
    if name not in _EXACT_TYPES and not name.startswith("|S"):
        return f"found {layout.show((name, dataset.shape))}, expected a little-endian number or text"
    if h5a.get_num_attrs(dataset):
        return "unexpected attributes"
    needed = kind.get_size() * math.prod(dataset.shape)
    offset, stored = dataset.get_offset(), dataset.get_storage_size()
    if needed == 0:
        return f"no elements, its shape is {dataset.shape}"
    if offset is None or stored != needed or offset + needed > size:
        return f"{stored:,} bytes stored, expected {needed:,} inside the file"
    return None


def _type_name(kind: h5t.TypeID) -> str:
    """'<f4', '|S5' and the like for the types of the layout, words for all others."""
    for name, exact in _EXACT_TYPES.items():
        if kind.equal(exact):
            return name
    if isinstance(kind, h5t.TypeStringID) and not kind.is_variable_str():
        if kind.get_cset() == h5t.CSET_UTF8 and kind.get_strpad() == h5t.STR_NULLPAD:
            return f"|S{kind.get_size()}"
        return "another kind of string"
    try:
        dtype = kind.dtype
    except TypeError:
        return "an unknown type"
    return dtype.str if dtype.str.startswith(">") else f"type {dtype}"


class _Reader:
    """Reads datasets whose structure is sound and holds them against the manifest."""

    def __init__(self, file: h5py.File, found: dict[str, Facts], report: Report, manifest_md5: str) -> None:
        self.file, self.found, self.report = file, found, report
        array = self._array("/manifest")
        if layout.md5(array) != manifest_md5:
            raise CheckpointError(
                f"/manifest: md5 {layout.md5(array)}, expected {printable(manifest_md5)} (manifest_md5)"
            )
        entries = _parse("/manifest", array)
        try:
            self.listed = {
                str(entry["path"]): (str(entry["dtype"]), tuple(entry["shape"]), str(entry["md5"]))
                for entry in entries
            }
        except (TypeError, KeyError):
            raise CheckpointError("/manifest: expected a list of path, dtype, shape and md5") from None
        if len(entries) != len(self.listed):
            raise CheckpointError("/manifest: a path is listed twice")

    def read(self, path: str) -> tuple[Array, bool]:
        """The dataset and whether its md5 is that of the manifest, which is reported if not."""
        array = self._array(path)
        if path not in self.listed:
            return array, False
        found, expected = layout.md5(array), self.listed[path][2]
        if found != expected:
            self.report(f"{path}: md5 {found}, expected {printable(expected)}")
        return array, found == expected

    def json(self, path: str) -> Any:
        """The value of a text dataset."""
        return _parse(path, self.read(path)[0])

    def check_manifest(self, named: set[str]) -> None:
        """Report where manifest and datasets differ, but for those that a problem has named already."""
        for path in sorted(self.listed.keys() - self.found.keys() - named):
            self.report(f"{printable(path)}: in the manifest, missing in the file")
        for path in sorted(self.found.keys() - named - {"/manifest"}):
            if path not in self.listed:
                self.report(f"{path}: missing in the manifest")
            elif self.listed[path][:2] != self.found[path]:
                self.report(f"{path}: found {layout.show(self.found[path])}, the manifest says otherwise")

    def _array(self, path: str) -> Array:
        if path not in self.found:
            raise CheckpointError(f"{path}: missing")
        dtype, shape = self.found[path]
        if path in layout.TEXTS and (shape != () or not dtype.startswith("|S")):
            raise CheckpointError(f"{path}: found {layout.show((dtype, shape))}, expected a text scalar")
        with _hdf5(path):
            array = np.empty(shape, dtype)
            dataset = h5d.open(self.file.id, path.encode())
            dataset.read(h5s.ALL, h5s.ALL, array, dataset.get_type())  # bytes as stored, no conversion
        return array


def _scalars(reader: _Reader, found: dict[str, Facts]) -> dict[str, Scalar]:
    return {
        path: reader.read(path)[0].item()
        for path, item in found.items()
        if path in layout.TYPES and item == (layout.TYPES[path], ())
    }


def _parse(path: str, array: Array) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(array.item().decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {printable(str(error))}") from None


def _vocabulary(reader: _Reader, config: Config, report: Report) -> dict[str, Any] | None:
    """The vocabulary of the tokenizer bpe; reports one that is missing, not sound or of another model."""
    is_there = "/tokenizer" in reader.found
    problems = layout.vocabulary_problems(is_there, config)
    definition: dict[str, Any] | None = None
    if is_there and not problems:
        definition = reader.json("/tokenizer")
        try:
            get_tokenizer("bpe", config.model.vocab_size, definition)
        except DataError as error:
            problems = [f"/tokenizer: {printable(str(error))}"]
    for problem in problems:
        report(problem)
    return definition


def _config(tables: Any, version: int) -> Config:
    """The configuration, which must hold every key that its version has: no default is invented."""
    if not isinstance(tables, dict):
        raise CheckpointError("/config: not a JSON object")
    try:
        flat = configuration.flatten(tables, "/config")
        missing = configuration.keys().keys() - flat.keys()
        missing -= {key for since, keys in layout.ADDED_KEYS.items() if version < since for key in keys}
        if missing:
            raise CheckpointError(f"/config: key {min(missing)} is missing")
        config = configuration.from_dict(tables, "/config")
        configuration.check_model(config.model)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    return config


def printable(text: str) -> str:
    """Text from a file, with everything that could break a line or a terminal escaped."""
    return text if text.isprintable() else repr(text)[1:-1]
