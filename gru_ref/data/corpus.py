"""A corpus: one array of token ids, with where it came from. Not here: how windows are cut from it.

`load_corpus` reads

    text     whatever gru_ref/data/sources.py finds: files, JSON lines, folders, -, or nothing; a separator
             token stands between two documents
    F.h5     alone: a corpus that `encode_files` wrote, memory-mapped
    F.bin    alone: little-endian uint16 ids, raw as nanoGPT writes them, or behind llm.c's header of 256
             int32 (20240520, 1, number of tokens); memory-mapped. Nothing in it says which text they stand
             for: the tokenizer is 'ids', or 'bpe' with the vocabulary that the caller says made them

An encoded corpus is an HDF5 file, format version 1:

    /tokens      (N,) uint8 or uint16, contiguous
    /tokenizer   JSON: the vocabulary (`Tokenizer.definition`); of bpe only
    /meta        JSON: what `Corpus.facts` returns, with the fingerprint of the tokenizer and of all tokens
    attributes format, format_version, meta_md5, and complete, which is written last

Reading one checks all of it: no links, no external or virtual data, sizes, md5s, the largest id. An md5
finds damage, not tampering.
"""

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gru_ref.data import bpe, bpe_training
from gru_ref.data.parallel import Batch, encode_batches
from gru_ref.data.sources import CHUNK, MD5Beside, Reading, Source, find_sources, md5, reading
from gru_ref.data.tokenizers import Ascii100, Tokenizer, get_tokenizer
from gru_ref.errors import DataError, RunError
from gru_ref.temporaries import remove_stale_of, temporary_path
from gru_ref.types import Array

FORMAT = "gru-ref corpus"
FORMAT_VERSION = 1

LLMC_MAGIC, LLMC_VERSION, LLMC_HEADER = 20240520, 1, 1024
WORTH_A_PROCESS = 2**23  # bytes of files for every process that encodes

Progress = Callable[[int, int], None]
"""Called with the bytes of files done and in all; while a vocabulary is made from them, with 0 in all."""


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
    digest = md5(tokenizer.fingerprint().encode())
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


def load_corpus(
    files: Sequence[str], tokenizer: str | Tokenizer = "auto", vocab_size: int = 0, vocab: str = ""
) -> Corpus:
    """The corpus of these files, as the module's docstring says.

    tokenizer: a tokenizer, or the name of one. 'auto' takes that of an encoded file; else 'bpe' where there
    is a `vocab`, 'ids' for a .bin, 'ascii100' for text. vocab: for 'bpe', what `bpe.load` takes; an encoded
    file has its own. vocab_size: of the model, or 0; 'ids' takes the largest id + 1 for 0, the others refuse
    all but 0 and their own.

    Text needs the memory of its tokens and about 1 MiB; encoded files need none. Raises DataError, one line
    that names the file.
    """
    if len(files) == 1 and files[0].lower().endswith(".h5"):
        return _load_h5(files[0], tokenizer, vocab_size, vocab)
    if len(files) == 1 and files[0].lower().endswith(".bin"):
        return _load_bin(files[0], tokenizer, vocab_size, vocab)
    chosen = _for_text(files, tokenizer, vocab_size, vocab)
    tokens = io.BytesIO()
    with contextlib.ExitStack() as stack:
        sources = find_sources(files, stack, None)
        facts, unknown, digest = _encode_into(tokens, sources, chosen)
    array = np.frombuffer(tokens.getbuffer(), chosen.dtype)
    array.flags.writeable = False
    return Corpus(array, chosen, facts, unknown, digest)


def encode_files(
    files: Sequence[str],
    output: str | Path,
    tokenizer: str | Tokenizer = "ascii100",
    *,
    vocab: str = "",
    train_bpe: int = 0,
    special_tokens: bool = False,
    text_field: str = "text",
    workers: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Encode text files into the HDF5 corpus `output` (.h5), in bounded memory; returns `Corpus.facts` of it.

    tokenizer, vocab: as for `load_corpus`. train_bpe: make a vocabulary of this size from the files first,
    in a process of its own, which reads them twice. special_tokens: text that spells a special token of bpe
    becomes that token. text_field: the key or column of the text in .jsonl and .parquet files. workers:
    processes that may encode for bpe; their number changes nothing in the corpus, and more than one needs a
    main module that is guarded by `if __name__ == "__main__"`, as every use of multiprocessing does.

    The file appears under its name only when it is whole and on disk. Raises DataError for the input and
    for an output that exists unless `overwrite`, RunError where writing fails.
    """
    path = Path(output)
    if path.suffix != ".h5":
        raise DataError(f"{output}: the name of an encoded corpus must end in .h5")
    if not path.parent.is_dir():
        raise DataError(f"{output}: its folder does not exist; create it first")
    if path.is_dir() or (path.exists() and not overwrite):
        raise DataError(f"{output}: already exists; choose another name, or --force to replace a file")
    chosen = None
    if not train_bpe:
        chosen = _for_text(files, tokenizer, 0, vocab)
    with contextlib.ExitStack() as stack:
        sources = find_sources(files, stack, path.parent)
        if chosen is None:
            show = progress or (lambda done, total: None)
            done = sum(source.size for source in sources)
            texts = _texts(sources, text_field, show)
            chosen = bpe_training.train(texts, train_bpe, waiting=lambda: show(done, 0))
        if special_tokens:
            chosen = chosen.with_special_tokens()
        return _write_h5(path, sources, chosen, text_field, workers, progress)


def _for_text(files: Sequence[str], asked: str | Tokenizer, vocab_size: int, vocab: str) -> Tokenizer:
    """The tokenizer to encode these text files with."""
    name = asked if isinstance(asked, str) else asked.name
    if name == "ids":
        what = files[0] if files else "the embedded corpus"
        hint = "choose ascii100, bytes or bpe"
        if isinstance(asked, Tokenizer):
            hint = "give a .bin of ids, or import the weights with their vocabulary (--set data.vocab=…)"
        raise DataError(f"{what}: is text, which tokenizer 'ids' cannot encode; {hint}")
    if isinstance(asked, Tokenizer):
        return asked
    if vocab and name in ("auto", "bpe"):
        return _vocabulary(vocab, vocab_size)
    if vocab:
        raise DataError(f"--vocab {vocab}: goes with tokenizer 'bpe', not with '{name}'")
    if name == "auto" and vocab_size not in (0, Ascii100.vocab_size):
        raise DataError(
            f"model.vocab_size is {vocab_size}, and text without a vocabulary is read with 'ascii100', which "
            f"has {Ascii100.vocab_size}; {bpe.NO_VOCABULARY}"
        )
    return get_tokenizer("ascii100" if name == "auto" else name, vocab_size)


def _vocabulary(vocab: str, vocab_size: int) -> bpe.BPE:
    tokenizer = bpe.load(vocab)
    if vocab_size not in (0, tokenizer.vocab_size):
        raise DataError(
            f"{vocab}: model.vocab_size {vocab_size} is not its {tokenizer.vocab_size} tokens; leave it 0"
        )
    return tokenizer


def _texts(sources: list[Source], text_field: str, progress: Progress) -> Iterator[bytes]:
    before = 0
    for source in sources:
        pieces = Reading(source, bpe.segments, text_field)
        for piece in filter(None, pieces):
            yield piece
            progress(before + pieces.done, 0)
        before += source.size


def _batches(
    sources: list[Source], tokenizer: Tokenizer, text_field: str, facts: list[dict[str, Any]]
) -> Iterator[tuple[Batch, int]]:
    """Pieces of about CHUNK bytes together, and how many bytes of the files were read by then.

    Adds what is known of a source to `facts` once it is read.
    """
    batch: Batch = []
    size = before = 0
    is_first = True
    for source in sources:
        pieces = Reading(source, tokenizer.segments, text_field)
        for piece in pieces:
            if piece is None and is_first:
                is_first = False
                continue
            batch.append(piece)
            size += len(piece or b"")
            if size >= CHUNK:
                yield batch, before + pieces.done
                batch, size = [], 0
        before += source.size
        facts.append(pieces.facts())
    if batch:
        yield batch, before


def _encode_into(
    target: "BinaryIO | _Tokens",
    sources: list[Source],
    tokenizer: Tokenizer,
    text_field: str = "text",
    workers: int = 1,
    progress: Progress | None = None,
) -> tuple[list[dict[str, Any]], int, str]:
    """Write the tokens to `target`; returns the sources' facts, unknown tokens and the fingerprint."""
    total = sum(source.size for source in sources)
    workers = min(workers, -(-total // WORTH_A_PROCESS)) if isinstance(tokenizer, bpe.BPE) else 1
    facts: list[dict[str, Any]] = []
    unknown = 0
    batches = _batches(sources, tokenizer, text_field, facts)
    with MD5Beside(tokenizer.fingerprint().encode()) as hashing:
        for tokens, done in encode_batches(tokenizer, batches, workers):
            hashing.update(tokens)
            target.write(tokens.data)
            if tokenizer.unknown_id is not None:
                unknown += int(np.count_nonzero(tokens == tokenizer.unknown_id))
            if progress:
                progress(done, total)
    return facts, unknown, hashing.digest.hexdigest()


# Encoded files ---------------------------------------------------------------------------------------------


def _write_h5(
    output: Path,
    sources: list[Source],
    tokenizer: Tokenizer,
    text_field: str,
    workers: int,
    progress: Progress | None,
) -> dict[str, Any]:
    import h5py

    temporary = temporary_path(output)
    remove_stale_of(output)
    try:
        with h5py.File(temporary, "w", libver="v110") as file:
            encode = functools.partial(
                _encode_into,
                sources=sources,
                tokenizer=tokenizer,
                text_field=text_field,
                workers=workers,
                progress=progress,
            )
            count = _known_count(sources, tokenizer)
            if count is not None:
                with _synced_meanwhile(temporary):
                    read, unknown, digest = encode(_Tokens(file, count, tokenizer.dtype))
            else:
                with tempfile.TemporaryFile(dir=output.parent) as made:
                    read, unknown, digest = encode(made)
                    count = made.tell() // tokenizer.dtype.itemsize
                    made.seek(0)
                    shutil.copyfileobj(made, _Tokens(file, count, tokenizer.dtype), 2 * CHUNK)
            if definition := tokenizer.definition():
                file.create_dataset(
                    "tokenizer", data=np.bytes_(json.dumps(definition, sort_keys=True).encode())
                )
            facts = _facts(tokenizer, count, unknown, read, digest)
            meta = json.dumps(facts).encode()
            file.create_dataset("meta", data=np.bytes_(meta))
            # Strings of fixed length: in h5py's usual ones, one flipped bit made HDF5 2.0 read for ever.
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["format_version"] = FORMAT_VERSION
            file.attrs["meta_md5"] = np.bytes_(md5(meta).hexdigest())
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


def _known_count(sources: list[Source], tokenizer: Tokenizer) -> int | None:
    """How many tokens there will be, where every byte is one; None where only encoding tells.

    The dataset must be contiguous, so it cannot grow.
    """
    if tokenizer.name not in ("ascii100", "bytes") or any(s.kind or s.is_packed for s in sources):
        return None
    return sum(source.size for source in sources) + len(sources) - 1  # with the separators


class _Tokens:
    """The dataset /tokens of an HDF5 file, written from its start to its end."""

    def __init__(self, file: Any, count: int, dtype: np.dtype[Any]) -> None:
        self._dataset = file.create_dataset("tokens", (count,), dtype)
        self._done = 0

    def write(self, data: Any) -> None:
        """Write whole tokens behind those written before."""
        tokens = np.frombuffer(data, self._dataset.dtype)
        self._dataset[self._done : self._done + len(tokens)] = tokens
        self._done += len(tokens)


@contextlib.contextmanager
def _synced_meanwhile(path: Path) -> Iterator[None]:
    """Bring what is written to a file to the disk again and again, so that little is left for the end."""
    ended = threading.Event()

    def sync() -> None:
        while not ended.wait(0.02):
            _sync(path)

    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(sync)
        try:
            yield
        finally:
            ended.set()
    syncing.result()  # an error that was raised there is not raised again by another fsync


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


def _load_h5(path: str, asked: str | Tokenizer, vocab_size: int, vocab: str) -> Corpus:
    with reading(path), open(path, "rb") as raw:
        size = os.fstat(raw.fileno()).st_size
    try:
        facts, definition, tokens = _read_h5(path, size)
        name = facts["tokenizer"]
        tokenizer = get_tokenizer(name, facts["vocab_size"], definition)
        _require(facts["tokenizer_fingerprint"] == tokenizer.fingerprint(), f"another '{name}' encoded it")
        _require(facts["fingerprint"] == fingerprint(tokens, tokenizer), "/tokens has another md5")
        _require(int(tokens.max()) < tokenizer.vocab_size, f"/tokens has ids that '{name}' does not have")
        corpus = Corpus(tokens, tokenizer, facts["sources"], facts["unknown"], facts["fingerprint"])
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: is not a whole encoded corpus: {reason}; encode the text again") from None
    if vocab and asked in ("auto", "bpe"):
        asked = _vocabulary(vocab, vocab_size)
    _require_tokenizer(path, tokenizer, asked)
    if vocab_size not in (0, tokenizer.vocab_size):
        raise DataError(
            f"{path}: model.vocab_size {vocab_size} is not the {tokenizer.vocab_size} of its tokenizer "
            f"'{name}'; set it to 0, or encode the text with another"
        )
    return corpus


def _require_tokenizer(path: str, found: Tokenizer, asked: str | Tokenizer) -> None:
    """Tokens of one tokenizer are never taken for another's."""
    name = asked if isinstance(asked, str) else asked.name
    if name not in ("auto", found.name):
        is_fixed = isinstance(asked, Tokenizer)
        hint = f"encode the text with '{name}'" if is_fixed else f"set data.tokenizer to '{found.name}'"
        raise DataError(f"{path}: was encoded with '{found.name}', not '{name}'; {hint}")
    if isinstance(asked, Tokenizer) and asked.fingerprint() != found.fingerprint():
        raise DataError(
            f"{path}: was encoded with another vocabulary for '{name}' ({found.vocab_size:,} tokens, md5 "
            f"{found.fingerprint()}) than is asked for ({asked.vocab_size:,} tokens, md5 "
            f"{asked.fingerprint()}); encode the text with that one"
        )


def _read_h5(path: str, size: int) -> tuple[dict[str, Any], dict[str, Any] | None, Array]:
    """The facts and the vocabulary, their md5s checked, and the mapped tokens, unchecked.

    Raises ValueError and h5py's errors.
    """
    import h5py

    with h5py.File(path, "r") as file:
        for name, kind in (("format", "S"), ("format_version", "i"), ("meta_md5", "S"), ("complete", "b")):
            found = file.attrs.get_id(name).dtype.kind if name in file.attrs else "none"
            _require(found == kind, f"its attribute '{name}' is missing or of another type")
        _require(file.attrs["format"] == FORMAT.encode(), f"its format is not '{FORMAT}'")
        version = file.attrs["format_version"]
        _require(version == FORMAT_VERSION, f"format version {version} is not {FORMAT_VERSION}")
        _require(file.attrs["complete"], "it was never completed")
        meta = _text(file, "meta", size)
        _require(md5(meta).hexdigest().encode() == file.attrs["meta_md5"], "/meta has another md5")
        facts = json.loads(meta)
        # The fingerprint in /meta is the md5 of the vocabulary.
        definition = json.loads(_text(file, "tokenizer", size)) if facts["tokenizer"] == "bpe" else None
        tokens = _own_dataset(file, "tokens", size)
        shape, dtype, offset = tokens.shape, tokens.dtype, tokens.id.get_offset()
    _require(shape == (facts["tokens"],), "/tokens has another length than /meta says")
    _require(dtype in (np.dtype("u1"), np.dtype("<u2")), f"/tokens cannot be {dtype}")
    _require(offset is not None and offset + shape[0] * dtype.itemsize <= size, "/tokens is cut off")
    return facts, definition, np.asarray(np.memmap(path, dtype, "r", offset, shape))


def _own_dataset(file: Any, name: str, size: int) -> Any:
    """A dataset whose data is in this very file; a link could make any file of this machine part of it."""
    import h5py

    _require(isinstance(file.get(name, getlink=True), h5py.HardLink), f"/{name} is missing or a link")
    dataset = file[name]
    _require(isinstance(dataset, h5py.Dataset), f"/{name} is not a dataset")
    layout = dataset.id.get_create_plist().get_layout()
    _require(layout == h5py.h5d.CONTIGUOUS and not dataset.external, f"/{name} is not contiguous")
    _require(0 < dataset.nbytes <= size, f"/{name} does not fit in the file")
    return dataset


def _text(file: Any, name: str, size: int) -> bytes:
    dataset = _own_dataset(file, name, size)
    _require(dataset.dtype.kind == "S" and dataset.shape == (), f"/{name} is not one text")
    text: bytes = dataset[()]
    return text


def _load_bin(path: str, asked: str | Tokenizer, vocab_size: int, vocab: str) -> Corpus:
    if vocab and asked in ("auto", "bpe"):
        asked = _vocabulary(vocab, vocab_size)
    name = asked if isinstance(asked, str) else asked.name
    if name not in ("auto", "ids") and not isinstance(asked, bpe.BPE):
        raise DataError(
            f"{path}: holds token ids, not text that '{name}' could encode; set data.tokenizer to 'ids', or "
            "give the --vocab they were made with"
        )
    if isinstance(asked, Tokenizer):
        vocab_size = asked.vocab_size
    with reading(path), open(path, "rb") as raw:
        size = os.fstat(raw.fileno()).st_size
        head = raw.read(LLMC_HEADER)
        raw.seek(0)
        digest = hashlib.file_digest(raw, md5).hexdigest()
    offset = _llmc_offset(path, head, size) if head[:4] == struct.pack("<i", LLMC_MAGIC) else 0
    if size % 2:
        raise DataError(f"{path}: has {size} bytes, an odd number; uint16 ids need an even one")
    if size == offset:
        raise DataError(f"{path}: holds no tokens")
    with reading(path):
        tokens = np.asarray(np.memmap(path, "<u2", "r", offset))
    largest = int(tokens.max())
    if vocab_size and largest >= vocab_size:
        raise DataError(f"{path}: has token id {largest}, not below model.vocab_size {vocab_size}")
    tokenizer = asked if isinstance(asked, Tokenizer) else get_tokenizer("ids", vocab_size or largest + 1)
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
