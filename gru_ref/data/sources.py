"""From names on the command line to the documents of a corpus. Not here: tokens.

    nothing       the text of Python's own `pydoc_data.topics`, about 466,000 bytes, so that training needs no
                  file: the topics in the order of their keys, joined by a newline. It differs between Python
                  versions; its md5 is recorded as that of any source.
    a text file   one document, read as bytes
    F.jsonl       JSON lines: the text under one key of every line's object is a document
    F.parquet     the text in one column of every row is a document (needs the extra `text`)
    F.gz          what the name without .gz says; its size and md5 are those of the unpacked bytes
    a folder      its regular files, recursively and sorted by path, but for hidden, empty, .h5 and .bin ones
    -             standard input, once: one document

Lines that are blank and records whose text is empty or null are no documents. A JSON line may have up to
256 MiB; apart from such lines, what is held at a time does not grow with a file.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import stat
import sys
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from gru_ref.errors import DataError, UsageError

CHUNK = 2**20  # bytes read at a time
LONGEST_LINE = 2**28
ROWS = 256  # of a parquet file, decoded at a time

Segments: TypeAlias = Callable[[bytes, bool], tuple[list[bytes], bytes]]
"""`Tokenizer.segments`: how a text may be cut."""


@dataclass(frozen=True)
class Source:
    """A file before it is read."""

    name: str  # what the facts call it
    label: str  # what error messages call it
    size: int  # bytes of the file; of a packed one, of the packed bytes
    open: Callable[[], BinaryIO]

    @property
    def is_packed(self) -> bool:
        return self.name.lower().endswith(".gz")

    @property
    def kind(self) -> str:
        """'.jsonl', '.parquet', or '' for text."""
        suffix = os.path.splitext(self.name.lower().removesuffix(".gz"))[1]
        return suffix if suffix in (".jsonl", ".parquet") else ""


def md5(data: bytes = b"") -> Any:
    """A running md5; it names text, it protects nothing."""
    return hashlib.md5(data, usedforsecurity=False)


class MD5Beside:
    """A running md5 in a thread of its own, at most LAG blocks behind; use it as a context manager.

    What is given to `update` must not change any more. Once the context has ended, `digest` is complete.
    """

    LAG = 4

    def __init__(self, data: bytes = b"") -> None:
        self.digest = md5(data)
        self._pool = ThreadPoolExecutor(1)
        self._behind: deque[Future[None]] = deque()

    def update(self, block: Any) -> None:
        """Hash this block some time."""
        self._behind.append(self._pool.submit(self.digest.update, block))
        if len(self._behind) > self.LAG:
            self._behind.popleft().result()

    def __enter__(self) -> "MD5Beside":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()


@contextlib.contextmanager
def reading(label: str) -> Iterator[None]:
    """Turn what reading a file raises into one line with its name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{label}: cannot be read: {reason}") from None


class Reading:
    """One pass over a source: iterate it for None where a document begins, then its text in pieces.

    segments: of the tokenizer. field: the key or column of the text in records.
    `done` is how many of `source.size` bytes are read; `facts` is complete at the end. Iterating raises
    DataError, one line that names the file.
    """

    def __init__(self, source: Source, segments: Segments, field: str) -> None:
        self.source, self.segments, self.field = source, segments, field
        self.done = self.documents = self.bytes = 0
        self._md5 = MD5Beside()

    def __iter__(self) -> Iterator[bytes | None]:
        kinds = {".jsonl": self._lines, ".parquet": self._rows, "": self._text}
        with reading(self.source.label):
            yield from kinds[self.source.kind]()
        if not self.bytes:
            raise DataError(f"{self.source.label}: is empty; give a file with text in it")
        if not self.documents:
            raise DataError(f"{self.source.label}: no record has any text under {self.field!r}")

    def facts(self) -> dict[str, Any]:
        """name, bytes and md5 of what was read, as JSON takes it; of records also how many documents."""
        facts = {"name": self.source.name, "bytes": self.bytes, "md5": self._md5.digest.hexdigest()}
        return {**facts, "documents": self.documents} if self.source.kind else facts

    def _blocks(self) -> Iterator[bytes]:
        """The unpacked bytes of the file, hashed beside what is done with them; none beyond its size."""
        size = self.source.size
        with self.source.open() as raw, self._md5:
            stream: Any = gzip.GzipFile(fileobj=raw) if self.source.is_packed else raw
            while block := stream.read(CHUNK):
                self.done = raw.tell()
                if self.done > size:
                    break
                self._md5.update(block)
                self.bytes += len(block)
                yield block
            self.done = raw.tell()
        if self.done != size:
            raise DataError(
                f"{self.source.label}: changed while it was read; try again when nothing writes to it"
            )

    def _document(self, pieces: list[bytes]) -> Iterator[bytes | None]:
        if any(pieces):
            self.documents += 1
            yield None
            yield from pieces

    def _text(self) -> Iterator[bytes | None]:
        self.documents, rest = 1, b""
        yield None
        for block in self._blocks():
            pieces, rest = self.segments(rest + block, False)
            yield from pieces
        yield from self.segments(rest, True)[0]

    def _lines(self) -> Iterator[bytes | None]:
        number, rest = 0, b""
        for block in self._blocks():
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                number += 1
                yield from self._line(line, number)
            if len(rest) > LONGEST_LINE:
                raise DataError(f"{self.source.label}: line {number + 1} is longer than 256 MiB")
        yield from self._line(rest, number + 1)

    def _line(self, line: bytes, number: int) -> Iterator[bytes | None]:
        if not line.strip():
            return
        where = f"{self.source.label}: line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}: not a JSON object with a field {self.field!r}")
        if self.field not in record:
            raise DataError(
                f"{where}: no field {self.field!r}; it has {_names(record)}: choose by encode --field"
            )
        yield from self._record(record[self.field], where)

    def _rows(self) -> Iterator[bytes | None]:
        pyarrow, parquet = _pyarrow(self.source.label)
        label, field = self.source.label, self.field
        if self.source.is_packed:
            raise DataError(f"{label}: a packed parquet file cannot be read; unpack it first")
        for _ in self._blocks():
            pass  # for the md5
        try:
            with self.source.open() as raw, parquet.ParquetFile(raw, buffer_size=CHUNK) as file:
                names = file.schema_arrow.names
                if field not in names:
                    raise DataError(
                        f"{label}: no column {field!r}; it has {_names(names)}: choose by encode --field"
                    )
                row, total = 0, file.metadata.num_rows
                for batch in file.iter_batches(ROWS, columns=[field]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        self.done = self.source.size * row // total
                        yield from self._record(value, f"{label}: row {row}")
        except pyarrow.ArrowException as error:
            raise DataError(f"{label}: not a whole parquet file: {' '.join(str(error).split())}") from None

    def _record(self, value: Any, where: str) -> Iterator[bytes | None]:
        if isinstance(value, str):
            value = value.encode("utf-8", "surrogatepass")  # JSON can spell a lone surrogate
        if not isinstance(value, bytes | None):
            raise DataError(f"{where}: {self.field!r} is no text but {type(value).__name__}")
        yield from self._document(self.segments(value or b"", True)[0])


def _names(names: Any) -> str:
    shown = [repr(name) for name in names][:8]
    return ", ".join(shown) + (", …" if len(names) > 8 else "") if shown else "none"


def _pyarrow(label: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(f"{label}: parquet needs pyarrow: pip install 'gru-ref[text]'") from None
    return pyarrow, parquet


# Which files -----------------------------------------------------------------------------------------------


def find_sources(files: Sequence[str], stack: contextlib.ExitStack, folder: Path | None) -> list[Source]:
    """The sources that `files` name; copies of what can be read once lie in `folder` and end with `stack`."""
    if not files:
        return [_embedded()]
    if list(files).count("-") > 1:
        raise DataError("-: standard input can be given only once")
    sources = []
    for file in files:
        if file == "-":
            sources.append(_spooled("-", "standard input", sys.stdin.buffer, stack, folder))
        elif os.path.isdir(file):
            sources += [_source(path, name, stack, folder) for path, name in _walk(file)]
        else:
            sources.append(_source(file, os.path.basename(file), stack, folder))
    return sources


def _embedded() -> Source:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("this Python has no pydoc_data, the embedded corpus; give --data") from None
    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    return Source("pydoc_data.topics", "the embedded corpus", len(text), lambda: io.BytesIO(text))


def _walk(folder: str) -> list[tuple[str, str]]:
    """Path, and name relative to the folder, of every file in it that counts as text."""

    def stop(error: OSError) -> None:
        raise error

    found = []
    with reading(folder):
        for parent, folders, names in os.walk(folder, onerror=stop):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names:
                path = os.path.join(parent, name)
                encoded = name.lower().endswith((".h5", ".bin"))
                if name.startswith(".") or encoded or not os.path.isfile(path) or not os.path.getsize(path):
                    continue
                found.append((path, Path(path).relative_to(folder).as_posix()))
    if not found:
        raise DataError(f"{folder}: holds no text (hidden, empty, .h5 and .bin files do not count)")
    return sorted(found, key=lambda pair: pair[1])


def _source(path: str, name: str, stack: contextlib.ExitStack, folder: Path | None) -> Source:
    if path.lower().endswith((".h5", ".bin")):
        raise DataError(f"{path}: is encoded already; it can only be read, and alone")
    name = os.fsencode(name).decode("utf-8", "replace")
    with reading(path):
        status = os.stat(path)
        if stat.S_ISFIFO(status.st_mode):
            with open(path, "rb") as stream:
                return _spooled(name, path, stream, stack, folder)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: is neither a regular file nor a pipe nor a folder")
    if not status.st_size:
        raise DataError(f"{path}: is empty; give a file with text in it")
    return Source(name, path, status.st_size, lambda: open(path, "rb"))


def _spooled(name: str, label: str, stream: Any, stack: contextlib.ExitStack, folder: Path | None) -> Source:
    """What can be read only once, copied to an unnamed temporary file: its size is known then."""
    with reading(label):
        copy = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        while block := stream.read(CHUNK):
            copy.write(block)
        copy.flush()
    if not copy.tell():
        raise DataError(f"{label}: is empty; give a file with text in it")

    def reopen() -> BinaryIO:
        copy.seek(0)
        return os.fdopen(os.dup(copy.fileno()), "rb")

    return Source(name, label, copy.tell(), reopen)
