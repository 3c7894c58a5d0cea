"""Saving a checkpoint so that a reader finds the old file or the new one, whole, whatever happens.

    .<name>.<pid>.tmp → flush → `complete` → close → fsync → md5 → rename → <name>.md5 → fsync of the folder

Two saves of the same checkpoint give the same bytes: sorted paths, no times, one fixed HDF5 format. That
format (1.10) carries a checksum in every piece of metadata, so damage there is an error and not other data.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
from h5py import h5f, h5fd, h5g, h5p

from gru_ref.checkpoint import layout
from gru_ref.checkpoint.layout import Checkpoint
from gru_ref.errors import CheckpointError, RunError
from gru_ref.temporaries import remove_stale, temporary_path
from gru_ref.types import Array

_TEMPORARY = re.compile(r"\..+\.h5(?:\.md5)?\.(\d{1,9})\.tmp", re.DOTALL)


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> int:
    """Write `path` and its sidecar `<path>.md5`; returns the bytes of the checkpoint file.

    Raises CheckpointError, before anything is written, for a checkpoint that its config does not explain or
    that holds NaN or Inf, and RunError if the file cannot be written (disk full, no permission). After any
    failure, Ctrl-C included, a file that stood there before is untouched and no temporary file is left.
    """
    path = Path(path)
    try:
        datasets = layout.to_datasets(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: not written: {error}") from None
    sidecar = layout.sidecar_path(path)
    new, new_sidecar = temporary_path(path), temporary_path(sidecar)
    try:
        try:
            digest, size = _write_hdf5(new, datasets)
            _write_bytes(new_sidecar, sidecar_line(digest, path.name))
            # A kill between these lines may leave a checkpoint without a sidecar, never beside a wrong one.
            sidecar.unlink(missing_ok=True)
            new.replace(path)
            new_sidecar.replace(sidecar)
            _fsync_folder(path.parent)
        finally:
            for temporary in (new, new_sidecar):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RunError(f"{path}: the checkpoint cannot be written: {error.strerror or error}") from error
    return size


def remove_stale_temporaries(folder: str | Path) -> list[Path]:
    """Remove and return what killed saves left in `folder`, as `gru_ref.temporaries.remove_stale` does."""
    return remove_stale(folder, _TEMPORARY)


def sidecar_line(digest: str, name: str) -> bytes:
    """The line that md5sum prints for a file of this name and reads with -c, with its escapes."""
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return os.fsencode(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")


class _Sink:
    """The file as HDF5's driver for Python file objects sees it; it keeps the first error and goes on.

    HDF5 that was told of a failed write fails again, or crashes, when the file is closed. So a full disk
    stays hidden from it: what it writes after the error is dropped, and `error` is raised once it is done.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.position = 0
        self.size = 0
        self.error: BaseException | None = None

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = offset + (self.size if whence == os.SEEK_END else 0)
        return self.position

    def tell(self) -> int:
        return self.position

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self.size = max(self.size, self.position + len(view))
        with self._keeping_errors():
            done = 0
            while self.error is None and done < len(view):
                done += os.pwrite(self.descriptor, view[done:], self.position + done)
        return len(view)

    def truncate(self, size: int) -> None:
        self.size = size
        with self._keeping_errors():
            if self.error is None:
                os.ftruncate(self.descriptor, size)

    @contextlib.contextmanager
    def _keeping_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - Ctrl-C too; _write_hdf5 raises it again
            self.error = error

    def readinto(self, buffer: bytearray) -> int:
        return os.preadv(self.descriptor, [buffer], self.position)

    def read(self, size: int) -> bytes:
        return os.pread(self.descriptor, size, self.position)

    def flush(self) -> None:
        """Nothing is buffered here; _write_hdf5 calls fsync once."""


def _write_hdf5(path: Path, datasets: Mapping[str, Array]) -> tuple[str, int]:
    """A new file with these datasets, on disk when this returns its md5 and its size in bytes."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        sink = _Sink(descriptor)
        try:
            _fill(sink, datasets)
        finally:
            if sink.error is not None:
                raise sink.error
        os.fsync(descriptor)
        return layout.file_md5(_chunks(descriptor)), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _fill(sink: _Sink, datasets: Mapping[str, Array]) -> None:
    with contextlib.closing(_create(sink)) as file:
        for group in layout.GROUPS[1:]:
            if any(path.startswith(f"{group}/") for path in datasets):
                _create_group(file, group)
        manifest = layout.manifest_dataset(datasets)
        for path, array in {**datasets, "/manifest": manifest}.items():
            if path in layout.TEXTS:
                array = array.astype(h5py.string_dtype("utf-8", array.dtype.itemsize))
            file.create_dataset(path, data=array, track_times=False)
            if sink.error is not None:
                return
        for name, value in (("format", layout.FORMAT), ("manifest_md5", layout.md5(manifest))):
            file.attrs.create(name, value.encode(), dtype=h5py.string_dtype("utf-8", len(value)))
        file.attrs["format_version"] = np.int64(layout.FORMAT_VERSION)
        file.flush()
        file.attrs["complete"] = np.int64(1)


def _create(sink: _Sink) -> h5py.File:
    # h5py's own File() takes these settings only in its newest versions.
    access, creation = h5p.create(h5p.FILE_ACCESS), h5p.create(h5p.FILE_CREATE)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_fileobj_driver(h5fd.fileobj_driver, sink)
    creation.set_obj_track_times(False)
    return h5py.File(h5f.create(b"checkpoint", h5f.ACC_TRUNC, creation, access))


def _create_group(file: h5py.File, name: str) -> None:
    creation = h5p.create(h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    h5g.create(file.id, name.encode(), gcpl=creation)


def _chunks(descriptor: int, size: int = 1 << 22) -> Iterator[bytes]:
    offset = 0
    while chunk := os.pread(descriptor, size, offset):
        offset += len(chunk)
        yield chunk


def _write_bytes(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
