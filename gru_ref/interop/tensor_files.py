"""Files of named tensors: safetensors and npz, read without trusting them and written whole or not at all.

Not here: what the names mean. A file is known by its first bytes, whatever it is called. Pickles are refused
(.pt, .pth, .bin and .pkl are pickles, and so is an npz with object arrays): to read one is to run the program
inside it.

Beside its tensors a file carries one JSON object: under the key `gru-ref` of a safetensors file's metadata,
and as the UTF-8 bytes of the array `__metadata__` in an npz. Other programs ignore it.
"""

import contextlib
import json
import math
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gru_ref.errors import RunError, UsageError
from gru_ref.temporaries import remove_stale_of, temporary_path
from gru_ref.types import Array

METADATA_KEY = "gru-ref"
NPZ_METADATA = "__metadata__"
SUFFIXES = (".safetensors", ".npz")
LONGEST_NAME = 500  # characters of a tensor's name; longer ones are made to confuse
_PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle")
_SAFETENSORS_TYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


@dataclass
class TensorFile:
    """What a file holds. bfloat16, which NumPy lacks, is held as the same values in float32."""

    path: Path
    tensors: dict[str, Array]
    dtypes: dict[str, str]  # as stored: 'float32', 'big-endian float32', 'bfloat16'
    metadata: dict[str, Any] = field(default_factory=dict)  # our JSON object, {} where there is none

    def select(self, names: Mapping[str, str]) -> "TensorFile":
        """The tensors of these names only, each under its new name."""
        tensors = {new: self.tensors[old] for old, new in names.items()}
        dtypes = {new: self.dtypes[old] for old, new in names.items()}
        return TensorFile(self.path, tensors, dtypes, self.metadata)


def read_tensors(path: str | Path) -> TensorFile:
    """Every tensor of a safetensors or npz file.

    Raises UsageError, one line naming the file, for anything else: pickles, damaged or foreign files, arrays
    that are not plain numbers.
    """
    read = _read(Path(path))
    for name in read.tensors:
        if len(name) > LONGEST_NAME:
            raise UsageError(f"{path}: a tensor's name has {len(name):,} characters: {name[:60]!r}…")
        if not name.isprintable():
            raise UsageError(f"{path}: a tensor's name has control characters: {name!r}")
    return read


def read_shards(index: Path) -> TensorFile:
    """Every tensor of a model that Hugging Face's libraries have spread over several files beside `index`.

    The index, model.safetensors.index.json, says in which file each tensor is: {"weight_map": {name: file}}.
    Raises UsageError where the two disagree, or where it names anything but a file beside it.
    """
    homes = read_json(index).get("weight_map")
    if not isinstance(homes, dict) or not all(isinstance(file, str) for file in homes.values()):
        raise UsageError(f"{index}: has no weight_map of names and files")
    whole = TensorFile(index, {}, {})
    for file in sorted(set(homes.values())):
        if file != Path(file).name or not file.endswith(".safetensors") or not file.isprintable():
            raise UsageError(f"{index}: {file!r} is not the name of a safetensors file beside it")
        shard = read_tensors(index.with_name(file))
        if strays := [name for name in shard.tensors if homes.get(name) != file]:
            raise UsageError(f"{index}: does not say that {strays[0]} is in {file}")
        whole.tensors |= shard.tensors
        whole.dtypes |= shard.dtypes
    if missing := sorted(homes.keys() - whole.tensors.keys()):
        raise UsageError(
            f"{index.with_name(homes[missing[0]])}: lacks {missing[0]}, which {index.name} names"
        )
    return whole


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises UsageError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object")
    return value


def _read(path: Path) -> TensorFile:
    head, size = _first_bytes(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < size:
        return _read_safetensors(path)
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _read_npz(path)
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        raise UsageError(
            f"{path}: an HDF5 file; a gru-ref checkpoint needs no import; for Keras see docs/exchange.md"
        )
    if head.startswith(b"\x93NUMPY"):
        raise UsageError(f"{path}: a single .npy array, without names; save named arrays with numpy.savez")
    if head.startswith(b"\x80") or path.suffix.lower() in _PICKLES:
        raise _pickle(path)
    raise UsageError(f"{path}: neither a safetensors nor an npz file")


def _first_bytes(path: Path) -> tuple[bytes, int]:
    """The beginning of a file, and its size."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{path}: not a regular file; name a .safetensors or .npz file")
        with path.open("rb") as file:
            return file.read(16), status.st_size
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _pickle(path: Path, what: str = "a pickle") -> UsageError:
    return UsageError(
        f"{path}: {what}, which can run any program when it is read, so it is refused; "
        "docs/exchange.md has the script that turns it into safetensors"
    )


def _read_safetensors(path: Path) -> TensorFile:
    library = _safetensors()
    try:
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        items = library.deserialize(content)
    except (library.SafetensorError, ValueError, RecursionError, OSError) as error:
        raise UsageError(f"{path}: not a sound safetensors file: {_one_line(error)}") from None
    read = TensorFile(path, {}, {}, _metadata(path, (header.get("__metadata__") or {}).get(METADATA_KEY)))
    for name, item in sorted(items):
        read.tensors[name], read.dtypes[name] = _tensor(path, name, item)
    return read


def _tensor(path: Path, name: str, item: dict[str, Any]) -> tuple[Array, str]:
    stored = item["dtype"]
    if stored == "BF16":  # the upper half of a float32
        halves = np.frombuffer(item["data"], "<u2").astype(np.uint32)
        return (halves << 16).view(np.float32).reshape(item["shape"]), "bfloat16"
    if stored not in _SAFETENSORS_TYPES:
        raise UsageError(f"{path}: {name}: dtype {stored} is not supported; store it as float32")
    array = np.frombuffer(item["data"], _SAFETENSORS_TYPES[stored]).reshape(item["shape"])
    return array, array.dtype.name


def _read_npz(path: Path) -> TensorFile:
    read = TensorFile(path, {}, {})
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(member.filename.endswith(".pkl") for member in members):
                raise _pickle(path, "a PyTorch file with a pickle inside")
            for member in members:
                name = member.filename.removesuffix(".npy")
                known = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
                if name == member.filename or name in read.tensors or not known:
                    raise UsageError(f"{path}: not an npz file: it holds {member.filename!r}")
                with archive.open(member) as stream:
                    read.tensors[name] = _read_npy(path, name, stream, member.file_size)
                read.dtypes[name] = _dtype_name(read.tensors[name].dtype)
    except (
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        ValueError,
        EOFError,
        OSError,
        RuntimeError,
    ) as error:
        raise UsageError(f"{path}: not a sound npz file: {_one_line(error)}") from None
    if NPZ_METADATA in read.tensors:
        del read.dtypes[NPZ_METADATA]
        read.metadata = _metadata(path, read.tensors.pop(NPZ_METADATA).tobytes())
    return read


def _read_npy(path: Path, name: str, stream: Any, size: int) -> Array:
    """One member of an npz; its header is judged before anything is allocated for it."""
    version = np.lib.format.read_magic(stream)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise UsageError(f"{path}: {name}: npy format {version} is not supported")
    shape, fortran, dtype = readers[version](stream)
    if dtype.hasobject:
        raise _pickle(path, f"{name} is an array of Python objects, a pickle")
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise UsageError(f"{path}: {name}: dtype {dtype}, expected plain numbers")
    count = math.prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize > size:
        raise UsageError(f"{path}: {name}: {size:,} bytes do not hold {dtype} {shape}")
    array = np.frombuffer(stream.read(count * dtype.itemsize), dtype, count)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)


def _metadata(path: Path, text: str | bytes | None) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse) if text is not None else {}
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, RecursionError, TypeError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: its gru-ref metadata is not a JSON object")
    return value


def _dtype_name(dtype: np.dtype[Any]) -> str:
    return dtype.name if dtype.isnative else f"big-endian {dtype.name}"


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise UsageError("safetensors is not installed: pip install 'gru-ref[interop]'") from None
    return safetensors


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# Writing ---------------------------------------------------------------------------------------------------


def write_tensors(
    path: str | Path, tensors: Mapping[str, Array], metadata: dict[str, Any], *, overwrite: bool = False
) -> None:
    """Write a safetensors or npz file, as its suffix says. The same content gives the same bytes.

    An empty `metadata` is left out. Raises UsageError for another suffix or a file that is there already,
    RunError where it cannot be written; then an older file stays as it was.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: name a {' or '.join(SUFFIXES)} file")
    if path.suffix == ".npz":
        with replacing(path, overwrite=overwrite) as file:
            _write_npz(file, tensors, metadata)
        return
    library = _safetensors()
    # The library writes the memory behind an array and asks for no strides: a view must become an array.
    arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    # One key: the library orders several of them by chance.
    text = {METADATA_KEY: _json(metadata)} if metadata else {"format": "pt"}
    with replacing(path, overwrite=overwrite) as file:
        file.write(library.numpy.save(arrays, metadata=text))


def _write_npz(file: BinaryIO, tensors: Mapping[str, Array], metadata: dict[str, Any]) -> None:
    text = {NPZ_METADATA: np.frombuffer(_json(metadata).encode(), np.uint8)} if metadata else {}
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in {**tensors, **text}.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


@contextlib.contextmanager
def replacing(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A new file under a temporary name that takes the place of `path` once it is on disk."""
    check_free(path, overwrite=overwrite)
    temporary = temporary_path(path)
    remove_stale_of(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise UsageError where something is at `path` already, unless it is a file that may be replaced."""
    if path.is_dir():
        raise UsageError(f"{path}: is a folder; name a file")
    if os.path.lexists(path) and not overwrite:
        raise UsageError(f"{path}: already exists; choose another name, or --force to replace it")
