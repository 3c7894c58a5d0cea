"""A corpus: one array of token ids, with where it came from. Not here: how windows are cut from it.

`load_corpus` reads

    nothing       the text of Python's own `pydoc_data.topics`, about 466,000 bytes, so that training needs no
                  file: the topics in the order of their keys, joined by a newline. It differs between Python
                  versions; its md5 is recorded as that of any source.
    text files    one document each, in the order given, a separator token between two; read as bytes
    F.gz          a document too; its size and md5 are those of the text, not of the compressed file
    a folder      its regular files, recursively and sorted by path, but for hidden, empty, .h5 and .bin ones
    -             standard input, once
    F.h5          alone: a corpus that `encode_files` wrote, memory-mapped
    F.bin         alone, tokenizer 'ids': little-endian uint16 ids, raw as nanoGPT writes them, or behind
                  llm.c's header of 256 int32 (20240520, 1, number of tokens); memory-mapped

An encoded corpus is an HDF5 file, format version 1:

    /tokens   (N,) uint8 or uint16, contiguous
    /meta     JSON: what `Corpus.facts` returns
    attributes format, format_version, meta_md5, and complete, which is written last

Reading one checks all of it: no links, no external or virtual data, sizes, both md5s, the largest id. An md5
finds damage, not tampering.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import stat
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gru_ref.data.tokenizers import Tokenizer, get_tokenizer
from gru_ref.errors import DataError, RunError
from gru_ref.types import Array

FORMAT = "gru-ref corpus"
FORMAT_VERSION = 1

CHUNK = 2**23  # bytes of text held at a time
LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 1024

Progress = Callable[[int, int], None]
"""Called with the bytes of text done and in all."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids and their origin.

    Fields:
        tokens     (N,) uint8 or uint16, read-only; memory-mapped from an encoded file
        tokenizer  what made them
        sources    a dict a document: name ('-' is standard input), bytes, md5 of its text
        unknown    how many tokens are the unknown token
        digest     the fingerprint, where it is known already
    """

    tokens: Array
    tokenizer: Tokenizer
    sources: list[dict[str, Any]]
    unknown: int
    digest: str = field(default="", repr=False)

    def fingerprint(self) -> str:
        """md5 (hexadecimal) of the tokenizer's fingerprint and then the tokens' bytes, little-endian.

        It does not depend on whether the tokens were read from text or from an encoded file.
        """
        return self.digest or fingerprint(self.tokens, self.tokenizer)

    def facts(self) -> dict[str, Any]:
        """All but the tokens, as JSON takes it; no path of this machine is in it."""
        return _facts(self.tokenizer, len(self.tokens), self.unknown, self.sources, self.fingerprint())


def _facts(
    tokenizer: Tokenizer, count: int, unknown: int, sources: list[dict[str, Any]], digest: str
) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer.name,
        "tokenizer_fingerprint": tokenizer.fingerprint(),
        "vocab_size": tokenizer.vocab_size,
        "tokens": count,
        "unknown": unknown,
        "sources": sources,
        "fingerprint": digest,
    }


def fingerprint(tokens: Array, tokenizer: Tokenizer) -> str:
    """What `Corpus.fingerprint` documents, without copying the tokens."""
    digest = _md5(tokenizer.fingerprint().encode())
    for start in range(0, len(tokens), CHUNK):
        digest.update(np.ascontiguousarray(tokens[start : start + CHUNK]))
    return digest.hexdigest()


def split(tokens: Array, val_fraction: float) -> tuple[Array, Array]:
    """Training and validation tokens: the last `val_fraction` of them, rounded, is for validation.

    The two are views that share no token, so no window touches both. 0 gives an empty validation part.
    """
    if not 0 <= val_fraction < 1:
        raise DataError(f"data.val_fraction must be at least 0 and below 1, not {val_fraction}")
    boundary = len(tokens) - round(len(tokens) * val_fraction)
    return tokens[:boundary], tokens[boundary:]


def load_corpus(files: Sequence[str], tokenizer: str, vocab_size: int = 0) -> Corpus:
    """The corpus of these files, as the module's docstring says.

    `vocab_size` matters to the tokenizer 'ids' only: 0 takes the largest id + 1, so give the vocabulary of
    the training text for the validation text. Needs the memory of the tokens and 8 MiB; encoded files need
    none. Raises DataError, one line that names the file.
    """
    if len(files) == 1 and files[0].lower().endswith(".h5"):
        return _load_h5(files[0], tokenizer, vocab_size)
    if len(files) == 1 and files[0].lower().endswith(".bin"):
        return _load_bin(files[0], tokenizer, vocab_size)
    if tokenizer == "ids":
        what = files[0] if files else "the embedded corpus"
        raise DataError(f"{what}: is text, which tokenizer 'ids' cannot encode; choose ascii100 or bytes")
    chosen = get_tokenizer(tokenizer, vocab_size)
    with contextlib.ExitStack() as stack:
        documents = _documents(files, stack, None)
        tokens = np.empty(_token_count(documents), chosen.dtype)
        sources, unknown, digest = _encode_into(tokens, documents, chosen)
    tokens.flags.writeable = False
    return Corpus(tokens, chosen, sources, unknown, digest)


def encode_files(
    files: Sequence[str],
    output: str | Path,
    tokenizer: str = "ascii100",
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Encode text files into the HDF5 corpus `output` (.h5), 8 MiB at a time; returns `Corpus.facts` of it.

    The file appears under its name only when it is whole and on disk. Raises DataError for the input and
    for an output that exists unless `overwrite`, RunError where writing fails.
    """
    chosen = get_tokenizer(tokenizer)
    path = Path(output)
    if path.suffix != ".h5":
        raise DataError(f"{output}: the name of an encoded corpus must end in .h5")
    if not path.parent.is_dir():
        raise DataError(f"{output}: its folder does not exist; create it first")
    if path.is_dir() or (path.exists() and not overwrite):
        raise DataError(f"{output}: already exists; choose another name, or --force to replace a file")
    with contextlib.ExitStack() as stack:
        documents = _documents(files, stack, path.parent)
        return _write_h5(path, documents, chosen, progress)


# Text ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Document:
    name: str  # what the facts call it
    label: str  # what error messages call it
    size: int  # bytes
    open: Callable[[], BinaryIO]


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


@contextlib.contextmanager
def _reading(label: str) -> Iterator[None]:
    """Turn what reading a file raises into one line with its name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{label}: cannot be read: {reason}") from None


def _documents(files: Sequence[str], stack: contextlib.ExitStack, folder: Path | None) -> list[_Document]:
    """The documents that `files` name; temporary copies lie in `folder` and end with `stack`."""
    if not files:
        return [_embedded()]
    if list(files).count("-") > 1:
        raise DataError("-: standard input can be given only once")
    documents = []
    for file in files:
        if file == "-":
            documents.append(_spooled("-", "standard input", sys.stdin.buffer, stack, folder))
        elif os.path.isdir(file):
            documents += [_document(path, name, stack, folder) for path, name in _walk(file)]
        else:
            documents.append(_document(file, os.path.basename(file), stack, folder))
    return documents


def _embedded() -> _Document:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError("this Python has no pydoc_data, the embedded corpus; give --data") from None
    text = "\n".join(topics[key] for key in sorted(topics)).encode()
    return _Document("pydoc_data.topics", "the embedded corpus", len(text), lambda: io.BytesIO(text))


def _walk(folder: str) -> list[tuple[str, str]]:
    """Path, and name relative to the folder, of every file in it that counts as text."""

    def stop(error: OSError) -> None:
        raise error

    found = []
    with _reading(folder):
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


def _document(path: str, name: str, stack: contextlib.ExitStack, folder: Path | None) -> _Document:
    if path.lower().endswith((".h5", ".bin")):
        raise DataError(f"{path}: is encoded already; it can only be read, and alone")
    name = os.fsencode(name).decode("utf-8", "replace")
    with _reading(path):
        status = os.stat(path)
        if stat.S_ISFIFO(status.st_mode) or path.lower().endswith(".gz"):
            opener = gzip.open if path.lower().endswith(".gz") else open
            with opener(path, "rb") as stream:
                return _spooled(name, path, stream, stack, folder)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path}: is neither a regular file nor a pipe nor a folder")
    if not status.st_size:
        raise DataError(f"{path}: is empty; give a file with text in it")
    return _Document(name, path, status.st_size, lambda: open(path, "rb"))


def _spooled(
    name: str, label: str, stream: Any, stack: contextlib.ExitStack, folder: Path | None
) -> _Document:
    """A document from a stream of unknown length: copied to an unnamed temporary file, to know its size."""
    with _reading(label):
        copy = stack.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
        while block := stream.read(CHUNK):
            copy.write(block)
        size = copy.tell()
        copy.seek(0)
    if not size:
        raise DataError(f"{label}: is empty; give a file with text in it")
    return _Document(name, label, size, lambda: copy)


def _token_count(documents: list[_Document]) -> int:
    """One token a byte, and a separator between two documents."""
    return sum(document.size for document in documents) + len(documents) - 1


def _blocks(document: _Document) -> Iterator[bytes]:
    """The text of a document, piece by piece, exactly `size` bytes of it."""
    done = 0
    with _reading(document.label), document.open() as stream:
        while block := stream.read(CHUNK):
            done += len(block)
            if done > document.size:
                break
            yield block
    if done != document.size:
        raise DataError(f"{document.label}: changed while it was read; try again when nothing writes to it")


def _encode_into(
    target: Any, documents: list[_Document], tokenizer: Tokenizer, progress: Progress | None = None
) -> tuple[list[dict[str, Any]], int, str]:
    """Fill `target`, an array or dataset of `_token_count` tokens; returns sources, unknown, fingerprint.

    md5 is the slowest part, so both digests run in threads beside encoding and writing.
    """
    total = sum(document.size for document in documents)
    all_tokens = _md5(tokenizer.fingerprint().encode())
    sources: list[dict[str, Any]] = []
    at = unknown = done = 0
    with ThreadPoolExecutor(2) as pool:

        def put(tokens: Array) -> None:
            nonlocal at, unknown
            hashing = pool.submit(all_tokens.update, tokens)
            target[at : at + len(tokens)] = tokens
            at += len(tokens)
            if tokenizer.unknown_id is not None:
                unknown += int(np.count_nonzero(tokens == tokenizer.unknown_id))
            hashing.result()

        for number, document in enumerate(documents):
            if number:
                put(np.array([tokenizer.separator_id], tokenizer.dtype))
            text = _md5()
            for block in _blocks(document):
                hashing = pool.submit(text.update, block)
                put(tokenizer.encode(block))
                hashing.result()
                done += len(block)
                if progress:
                    progress(done, total)
            sources.append({"name": document.name, "bytes": document.size, "md5": text.hexdigest()})
    return sources, unknown, all_tokens.hexdigest()


# Encoded files ---------------------------------------------------------------------------------------------


def _write_h5(
    output: Path, documents: list[_Document], tokenizer: Tokenizer, progress: Progress | None
) -> dict[str, Any]:
    import h5py

    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        with h5py.File(temporary, "w", libver="v110") as file:
            tokens = file.create_dataset("tokens", (_token_count(documents),), tokenizer.dtype)
            sources, unknown, digest = _encode_into(tokens, documents, tokenizer, progress)
            facts = _facts(tokenizer, len(tokens), unknown, sources, digest)
            meta = json.dumps(facts).encode()
            file.create_dataset("meta", data=np.bytes_(meta))
            # Strings of fixed length: in h5py's usual ones, one flipped bit made HDF5 2.0 read for ever.
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["format_version"] = FORMAT_VERSION
            file.attrs["meta_md5"] = np.bytes_(_md5(meta).hexdigest())
            file.flush()
            file.attrs["complete"] = True
        _sync(temporary)
        os.replace(temporary, output)
        _sync(output.parent)
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)  # h5py's own texts are long and name the temporary file
        reason = os.strerror(number) if number else " ".join(str(error).split())
        raise RunError(f"{output}: cannot be written: {reason}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return facts


def _sync(path: Path) -> None:
    """Make a file or the entries of a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# What h5py raises for damaged bytes is not documented; these are the kinds met.
_DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, OverflowError, DataError)


def _require(condition: Any, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _load_h5(path: str, asked: str, vocab_size: int) -> Corpus:
    with _reading(path), open(path, "rb") as raw:
        size = os.fstat(raw.fileno()).st_size
    try:
        facts, tokens = _read_h5(path, size)
        name = facts["tokenizer"]
        tokenizer = get_tokenizer(name, facts["vocab_size"])
        _require(facts["tokenizer_fingerprint"] == tokenizer.fingerprint(), f"another '{name}' encoded it")
        _require(facts["fingerprint"] == fingerprint(tokens, tokenizer), "/tokens has another md5")
        _require(int(tokens.max()) < tokenizer.vocab_size, f"/tokens has ids that '{name}' does not have")
        corpus = Corpus(tokens, tokenizer, facts["sources"], facts["unknown"], facts["fingerprint"])
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: is not a whole encoded corpus: {reason}; encode the text again") from None
    if asked != name:
        raise DataError(f"{path}: was encoded with '{name}', not '{asked}'; set data.tokenizer to '{name}'")
    get_tokenizer(asked, vocab_size)  # a vocabulary that is not the tokenizer's own is refused
    return corpus


def _read_h5(path: str, size: int) -> tuple[dict[str, Any], Array]:
    """The facts, their md5 checked, and the mapped tokens, unchecked. Raises ValueError and h5py's errors."""
    import h5py

    with h5py.File(path, "r") as file:
        for name, kind in (("format", "S"), ("format_version", "i"), ("meta_md5", "S"), ("complete", "b")):
            found = file.attrs.get_id(name).dtype.kind if name in file.attrs else "none"
            _require(found == kind, f"its attribute '{name}' is missing or of another type")
        _require(file.attrs["format"] == FORMAT.encode(), f"its format is not '{FORMAT}'")
        version = file.attrs["format_version"]
        _require(version == FORMAT_VERSION, f"format version {version} is not {FORMAT_VERSION}")
        _require(file.attrs["complete"], "it was never completed")
        for name in ("tokens", "meta"):
            # A link, or data kept elsewhere, could make any file of this machine part of the corpus.
            _require(isinstance(file.get(name, getlink=True), h5py.HardLink), f"/{name} is missing or a link")
            dataset = file[name]
            _require(isinstance(dataset, h5py.Dataset), f"/{name} is not a dataset")
            layout = dataset.id.get_create_plist().get_layout()
            _require(layout == h5py.h5d.CONTIGUOUS and not dataset.external, f"/{name} is not contiguous")
            _require(0 < dataset.nbytes <= size, f"/{name} does not fit in the file")
        _require(file["meta"].dtype.kind == "S" and file["meta"].shape == (), "/meta is not one text")
        meta = file["meta"][()]
        _require(_md5(meta).hexdigest().encode() == file.attrs["meta_md5"], "/meta has another md5")
        facts = json.loads(meta)
        tokens = file["tokens"]
        shape, dtype, offset = tokens.shape, tokens.dtype, tokens.id.get_offset()
    _require(shape == (facts["tokens"],), "/tokens has another length than /meta says")
    _require(dtype in (np.dtype("u1"), np.dtype("<u2")), f"/tokens cannot be {dtype}")
    _require(offset is not None and offset + shape[0] * dtype.itemsize <= size, "/tokens is cut off")
    return facts, np.asarray(np.memmap(path, dtype, "r", offset, shape))


def _load_bin(path: str, asked: str, vocab_size: int) -> Corpus:
    if asked != "ids":
        raise DataError(
            f"{path}: holds token ids, not text that '{asked}' could encode; set data.tokenizer to 'ids'"
        )
    with _reading(path), open(path, "rb") as raw:
        size = os.fstat(raw.fileno()).st_size
        head = raw.read(LLMC_HEADER)
        raw.seek(0)
        digest = hashlib.file_digest(raw, _md5).hexdigest()
    offset = _llmc_offset(path, head, size) if head[:4] == struct.pack("<i", LLMC_MAGIC) else 0
    if size % 2:
        raise DataError(f"{path}: has {size} bytes, an odd number; uint16 ids need an even one")
    if size == offset:
        raise DataError(f"{path}: holds no tokens")
    with _reading(path):
        tokens = np.asarray(np.memmap(path, "<u2", "r", offset))
    largest = int(tokens.max())
    if vocab_size and largest >= vocab_size:
        raise DataError(f"{path}: has token id {largest}, not below model.vocab_size {vocab_size}")
    tokenizer = get_tokenizer("ids", vocab_size or largest + 1)
    source = {"name": os.path.basename(path), "bytes": size, "md5": digest}
    return Corpus(tokens, tokenizer, [source], 0)


def _llmc_offset(path: str, head: bytes, size: int) -> int:
    """Where the tokens begin behind llm.c's header, which is checked."""
    if len(head) < LLMC_HEADER:
        raise DataError(f"{path}: is cut off within its header")
    _, version, count = struct.unpack("<3i", head[:12])
    if version != LLMC_VERSION:
        raise DataError(f"{path}: has version {version} of llm.c's format, only {LLMC_VERSION} is known here")
    if size != LLMC_HEADER + 2 * count:
        raise DataError(
            f"{path}: has {size} bytes, its header says {count} tokens = {LLMC_HEADER + 2 * count} bytes"
        )
    return LLMC_HEADER
