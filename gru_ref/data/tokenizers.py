"""Tokenizers: bytes to token ids and back. Not here: reading files.

    ascii100   5 special tokens and printable ASCII; every byte is one token, other bytes become 'unknown'
    bytes      the 256 bytes and a document separator; lossless
    bpe        byte pairs merged into words, GPT-2's way, by a vocabulary from a file: gru_ref/data/bpe.py
    ids        token ids whose text nobody here knows, from a uint16 .bin file

Text is bytes throughout, never str: no newline is translated, no byte order mark is dropped. A byte order
mark is three ordinary bytes: kept by `bytes` and `bpe`, three unknown tokens in `ascii100`.

Example:
    >>> tokenizer = get_tokenizer("ascii100")
    >>> tokenizer.encode(b"Hi\\n").tolist()
    [45, 78, 4]
    >>> tokenizer.decode([45, 78, 4])
    b'Hi\\n'
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from gru_ref.errors import DataError
from gru_ref.types import Array


class Tokenizer(ABC):
    """What every tokenizer has. Ids are 0…vocab_size−1; None stands for a special token it lacks."""

    name: str
    vocab_size: int
    dtype: np.dtype[Any]  # of encoded tokens
    unknown_id: int | None = None  # of a byte that the vocabulary does not hold
    separator_id: int | None = None  # stands between two documents
    start_id: int | None = None  # what an empty prompt starts from: a newline, which every text has

    @abstractmethod
    def encode(self, data: bytes) -> Array:
        """The token ids of `data`: (N,) of `dtype`, read-only where it is a view."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | Array) -> bytes:
        """The text of token ids; special tokens have none. Raises DataError for an id out of range."""

    @abstractmethod
    def token_bytes(self) -> Array | None:
        """Bytes of text that each id stands for, special tokens 0: (V,) int64. None where unknown.

        Bits per byte are Σ nats / (ln 2 · Σ token_bytes[target]) over the counted targets.
        """

    def segments(self, data: bytes, last: bool) -> tuple[list[bytes], bytes]:
        """Pieces of a text that can be encoded apart, and its rest, which what follows decides.

        data: the text so far. last: nothing follows, so there is no rest.
        """
        return [data] if data else [], b""

    def with_special_tokens(self) -> "Tokenizer":
        """The same, but text that spells a special token becomes that token; DataError where none can."""
        raise DataError(f"tokenizer '{self.name}' has no special tokens that text could spell; only bpe has")

    def definition(self) -> dict[str, Any] | None:
        """What files must hold to make the tokenizer again, as JSON takes it; None where a name is enough."""
        return None

    def fingerprint(self) -> str:
        """md5 (hexadecimal) of all that defines the tokenizer: equal means that ids mean the same."""
        return md5_of(f"{self.name} {self.vocab_size}".encode())

    def _checked(self, ids: Sequence[int] | Array) -> Array:
        array = np.asarray(ids, dtype=np.int64)
        outside = (array < 0) | (array >= self.vocab_size)
        if outside.any():
            raise DataError(
                f"tokenizer '{self.name}': token id {array[outside][0]} is not in 0…{self.vocab_size - 1}"
            )
        return array


class Ascii100(Tokenizer):
    """pad, unk, bos, eos, newline = 0…4, then bytes 32…126 = 5…99; one token a byte, always.

    Every other byte (tab, carriage return, NUL, 127 and above) is `unk`. It decodes to U+FFFD, the
    replacement character, so that a reader sees that something was lost; pad, bos and eos decode to nothing.
    """

    name = "ascii100"
    vocab_size = 100
    dtype = np.dtype("u1")
    unknown_id = 1
    separator_id = 3
    start_id = 4

    _ID_OF_BYTE = bytes(4 if b == 10 else b - 27 if 32 <= b <= 126 else 1 for b in range(256))
    _TOGETHER = 2**17  # bytes whose temporary arrays stay in the cache, and need no new memory
    _BYTE_OF_ID = bytes([0, 0x80, 0, 0, 10, *range(32, 127)])  # 0x80 and 0: no other id has these
    _REPLACEMENT = "\ufffd".encode()

    def encode(self, data: bytes) -> Array:
        byte = np.frombuffer(data, np.uint8)
        ids = np.empty_like(byte)
        for start in range(0, len(byte), self._TOGETHER):
            some = slice(start, start + self._TOGETHER)
            ids[some] = self._ids(byte[some])
        return ids

    def _ids(self, byte: Array) -> Array:
        """What _ID_OF_BYTE says, faster than looking it up; the arithmetic is modulo 256."""
        offset, highest = np.uint8(32), np.uint8(126 - 32)
        printable = (byte - offset <= highest).view(np.uint8)
        newline = (byte == 10).view(np.uint8)
        return (byte - np.uint8(28)) * printable + newline * np.uint8(3) + np.uint8(self.unknown_id)

    def decode(self, ids: Sequence[int] | Array) -> bytes:
        text = self._checked(ids).astype(np.uint8).tobytes().translate(self._BYTE_OF_ID.ljust(256))
        return text.replace(b"\0", b"").replace(b"\x80", self._REPLACEMENT)

    def token_bytes(self) -> Array:
        counts = np.ones(self.vocab_size, np.int64)
        counts[[0, 2, 3]] = 0
        return counts

    def fingerprint(self) -> str:
        return md5_of(b"ascii100 " + self._ID_OF_BYTE)


class Bytes(Tokenizer):
    """Byte b is token b; 256 separates documents and decodes to nothing."""

    name = "bytes"
    vocab_size = 257
    dtype = np.dtype("<u2")  # files and fingerprints are little-endian everywhere
    separator_id = 256
    start_id = 10

    def encode(self, data: bytes) -> Array:
        return np.frombuffer(data, np.uint8).astype(self.dtype)

    def decode(self, ids: Sequence[int] | Array) -> bytes:
        array = self._checked(ids)
        return array[array != self.separator_id].astype(np.uint8).tobytes()

    def token_bytes(self) -> Array:
        return (np.arange(self.vocab_size) != self.separator_id).astype(np.int64)


class Ids(Tokenizer):
    """Ids of a vocabulary that only their maker knows: training works, text and bits per byte do not."""

    name = "ids"
    dtype = np.dtype("<u2")  # files and fingerprints are little-endian everywhere

    def __init__(self, vocab_size: int) -> None:
        if not 1 <= vocab_size <= 2**16:
            raise DataError(f"tokenizer 'ids': model.vocab_size must lie in 1…65536, not {vocab_size}")
        self.vocab_size = vocab_size

    def encode(self, data: bytes) -> Array:
        raise DataError("tokenizer 'ids' cannot encode text: nothing says which text an id stands for")

    def decode(self, ids: Sequence[int] | Array) -> bytes:
        raise DataError("tokenizer 'ids' cannot decode: nothing says which text an id stands for")

    def token_bytes(self) -> None:
        return None


def md5_of(data: bytes) -> str:
    """md5 as 32 hexadecimal digits; it names a tokenizer, it protects nothing."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def get_tokenizer(name: str, vocab_size: int = 0, definition: dict[str, Any] | None = None) -> Tokenizer:
    """The tokenizer of that name.

    vocab_size: needed by 'ids'; for the others 0 or their own. definition: `Tokenizer.definition`, needed by
    'bpe'; `bpe.load` makes one from files. Raises DataError.
    """
    if name == "ids":
        return Ids(vocab_size)
    tokenizer: Tokenizer
    if name == "bpe":
        from gru_ref.data.bpe import BPE, NO_VOCABULARY

        if definition is None:
            raise DataError(NO_VOCABULARY)
        tokenizer = BPE(definition)
    elif name in ("ascii100", "bytes"):
        tokenizer = Ascii100() if name == "ascii100" else Bytes()
    else:
        raise DataError(f"unknown tokenizer '{name}'; known: ascii100, bytes, bpe, ids")
    if vocab_size not in (0, tokenizer.vocab_size):
        own = tokenizer.vocab_size
        raise DataError(f"model.vocab_size {vocab_size} is not the {own} of tokenizer '{name}'; leave it 0")
    return tokenizer
