"""Byte-pair encoding as GPT-2 does it, through the `tokenizers` library (extra `text`). No downloads here.

A text is split into words (GPT-2's pattern: a contraction; letters, digits or other characters, each with at
most one space before; white space), and in each word neighbouring tokens are merged, the earliest merge of
the vocabulary first, starting from single bytes. With GPT-2's vocabulary the ids are exactly those of GPT-2.

The vocabulary is written in GPT-2's alphabet, one printable character a byte: 'Ġ' is a space, 'Ċ' a newline.

    definition   {"tokens": [every token, id 0 first], "merges": ["Ġ t", "h e", …]}

It holds the 256 bytes. A token that is neither a byte nor made by a merge is *special*, as '<|endoftext|>',
which separates documents: it has no text of its own, and text that spells it is ordinary text unless
`special_tokens` is set.

Nothing is lost: a byte that is not part of valid UTF-8 is a token of its own. Long texts are encoded in
segments, which changes no token: a space or newline behind another character always begins a word. Only where
a whole MiB has no such place (a run of one letter, say) is a word cut. A vocabulary is made from words of at
most 1,024 characters: longer ones are cut, because the time to make it grows with the square of their length.

Decoding and counting bytes need the definition only, not the library.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gru_ref.data.tokenizers import Tokenizer, md5_of
from gru_ref.errors import DataError, UsageError
from gru_ref.types import Array

END_OF_TEXT = "<|endoftext|>"
MAX_VOCABULARY = 2**16  # ids are uint16
SEGMENT = 2**12  # bytes after which a text is cut at the next place that allows it
LONGEST_SEGMENT = 2**20
LONGEST_WORD = 2**10  # characters of a word that a vocabulary is made from
_CACHE = 2**23  # characters of text whose tokens are remembered

_VARIATIONS = (  # of BPE, in a tokenizer.json
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "dropout",
    "byte_fallback",
    "ignore_merges",
)
_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # the second is OpenAI's own naming
_WANTED = (
    "a folder with GPT-2's vocab.json and merges.txt, as distributed with OpenAI's GPT-2, "
    "or a tokenizer.json, or an encoded corpus"
)
NO_VOCABULARY = (
    f"tokenizer 'bpe' needs a vocabulary: give --vocab {_WANTED}; gru-ref encode --train-bpe 4096 makes one"
)

# A space or newline whose left neighbour is no white space of any kind (nor an ASCII control).
_CUT = re.compile(
    rb"(?<![\x00-\x20])(?<!\xc2[\x85\xa0])(?<!\xe1\x9a\x80)(?<!\xe2\x80[\x80-\x8a\xa8\xa9\xaf])"
    rb"(?<!\xe2\x81\x9f)(?<!\xe3\x80\x80)[ \n]"
)
# White space as the library's pattern means it, and the stretches of text that no word reaches beyond.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_STRETCH = re.compile(f"[{_SPACE}]*[^{_SPACE}]+|[{_SPACE}]+")
_INVALID = re.compile("([\udc80-\udcff]+)")  # what errors="surrogateescape" makes of bytes that are not UTF-8


def _alphabet() -> list[str]:
    """The character of every byte: itself where it is printable, else the next one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


ALPHABET = _alphabet()
_BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}


class BPE(Tokenizer):
    """The tokenizer of a definition (see the module's docstring); raises DataError for one that is not whole.

    special_tokens: read text that spells a special token as that token.

    Example:
        >>> tokenizer = BPE({"tokens": [*ALPHABET, "Ġt", "he", "Ġthe"], "merges": ["Ġ t", "h e", "Ġt he"]})
        >>> tokenizer.encode(b" the").tolist()
        [258]
        >>> tokenizer.decode([258])
        b' the'
    """

    name = "bpe"
    dtype = np.dtype("<u2")  # files and fingerprints are little-endian everywhere

    def __init__(self, definition: dict[str, Any], special_tokens: bool = False) -> None:
        made = _made_tokens(definition)
        self._tokens: list[str] = list(definition["tokens"])
        self._merges: list[str] = list(definition["merges"])
        self._ids = {token: number for number, token in enumerate(self._tokens)}
        self._bytes = [bytes(map(_BYTE_OF.__getitem__, t)) if t in made else b"" for t in self._tokens]
        self._special = None
        if special_tokens:
            self._special = _pattern([token for token in self._tokens if token not in made])
        self._known: dict[str, bytes] = {}  # stretch of text: its packed ids
        self._known_size = 0  # characters
        self.vocab_size = len(self._tokens)
        self.separator_id = self._ids.get(END_OF_TEXT)
        self.start_id = self._ids[ALPHABET[10]]

    def __reduce__(self) -> tuple[Any, ...]:
        return BPE, (self.definition(), self._special is not None)

    def with_special_tokens(self) -> "BPE":
        return BPE(self.definition(), special_tokens=True)

    def definition(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "merges": self._merges}

    @functools.cached_property
    def _fingerprint(self) -> str:
        return md5_of(b"bpe " + json.dumps(self.definition(), sort_keys=True).encode())

    def fingerprint(self) -> str:
        return self._fingerprint

    def decode(self, ids: Sequence[int] | Array) -> bytes:
        return b"".join([self._bytes[number] for number in self._checked(ids)])

    def token_bytes(self) -> Array:
        return np.array([len(text) for text in self._bytes], np.int64)

    def encode(self, data: bytes) -> Array:
        """Exact in any size, in the memory of a segment. Needs the library: UsageError where it is absent."""
        pieces, _ = segments(data, True)
        return np.frombuffer(b"".join(map(self._encode_segment, pieces)), self.dtype)

    def segments(self, data: bytes, last: bool) -> tuple[list[bytes], bytes]:
        return segments(data, last)

    def _encode_segment(self, piece: bytes) -> bytes:
        """The ids, packed."""
        if self._special is None:
            return self._encode_text(piece)
        parts = self._special.split(piece)  # every second one spells a special token
        return b"".join(
            self._packed([self._ids[part.decode()]]) if number % 2 else self._encode_text(part)
            for number, part in enumerate(parts)
        )

    def _encode_text(self, text: bytes) -> bytes:
        parts = _INVALID.split(text.decode("utf-8", "surrogateescape"))  # every second one is not UTF-8
        return b"".join(
            self._encode_invalid(part) if number % 2 else self._encode_valid(part)
            for number, part in enumerate(parts)
        )

    def _encode_invalid(self, text: str) -> bytes:
        return self._packed([self._ids[ALPHABET[byte]] for byte in text.encode("utf-8", "surrogateescape")])

    def _encode_valid(self, text: str) -> bytes:
        """What the library gives, several times as fast: a stretch seen before is only looked up."""
        stretches, known = _STRETCH.findall(text), self._known
        new = list({stretch for stretch in stretches if stretch not in known})
        if new:
            encodings = self._library.encode_batch_fast(new)
            known.update((word, self._packed(e.ids)) for word, e in zip(new, encodings, strict=True))
            self._known_size += sum(map(len, new))
        ids = b"".join([known[stretch] for stretch in stretches])
        if self._known_size > _CACHE:
            known.clear()
            self._known_size = 0
        return ids

    def _packed(self, ids: list[int]) -> bytes:
        return np.array(ids, self.dtype).tobytes()

    @functools.cached_property
    def _library(self) -> Any:
        library = _tokenizers()
        merges = [tuple(merge.split(" ")) for merge in self._merges]
        encoder = library.Tokenizer(library.models.BPE(vocab=self._ids, merges=merges))
        encoder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        return encoder


def _made_tokens(definition: dict[str, Any]) -> set[str]:
    """The tokens that are bytes or made by a merge; raises DataError for a definition that is not sound."""
    if not isinstance(definition, dict) or sorted(definition) != ["merges", "tokens"]:
        raise DataError("the vocabulary is not an object of 'tokens' and 'merges'")
    tokens, merges = definition["tokens"], definition["merges"]
    if not all(isinstance(v, list) and all(isinstance(text, str) for text in v) for v in (tokens, merges)):
        raise DataError("the vocabulary's 'tokens' and 'merges' are not two lists of strings")
    if len(tokens) > MAX_VOCABULARY:
        raise DataError(f"the vocabulary has {len(tokens):,} tokens; ids are uint16, so at most 65,536 fit")
    known = set(tokens)
    if len(known) != len(tokens) or "" in known or re.search("[\ud800-\udfff]", "".join(tokens)):
        raise DataError("the vocabulary has a token twice, or one that is empty or not Unicode text")
    if missing := [byte for byte, character in enumerate(ALPHABET) if character not in known]:
        raise DataError(f"the vocabulary lacks byte {missing[0]:#04x}: it is not one of bytes, as GPT-2's is")
    pairs = [merge.split(" ") for merge in merges]
    made = {*ALPHABET, *("".join(pair) for pair in pairs)}
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not made.issuperset(pair) or "".join(pair) not in known:
            raise DataError(f"the vocabulary cannot make {merge!r}: not two tokens that make a third")
    return made


def _pattern(special: list[str]) -> re.Pattern[bytes] | None:
    if spaced := [token for token in special if re.search(r"\s", token)]:
        raise DataError(f"special token {spaced[0]!r} has white space in it, so a text may be cut within it")
    if not special:
        return None
    longest_first = sorted(special, key=len, reverse=True)
    return re.compile(b"(" + b"|".join(re.escape(token.encode()) for token in longest_first) + b")")


def segments(data: bytes, last: bool) -> tuple[list[bytes], bytes]:
    """Pieces of at least SEGMENT bytes and the rest; the same ones however a text comes in parts.

    data: the text from the end of the last piece on. last: nothing follows it, so nothing is left over.
    """
    pieces, start = [], 0
    while start < len(data):
        found = _CUT.search(data, start + SEGMENT, start + LONGEST_SEGMENT)
        if found:
            end = found.start()
        elif len(data) - start > LONGEST_SEGMENT:
            end = _character_start(data, start + LONGEST_SEGMENT)
        elif last:
            end = len(data)
        else:
            break
        pieces.append(data[start:end])
        start = end
    return pieces, data[start:]


def _character_start(data: bytes, at: int) -> int:
    """The start of the UTF-8 character at this place, or the place itself where it is in none."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "tokenizer 'bpe' needs the package tokenizers: pip install 'gru-ref[text]'"
        ) from None
    return tokenizers


# Vocabularies ----------------------------------------------------------------------------------------------


def train(texts: Iterable[bytes], vocab_size: int) -> BPE:
    """A vocabulary of this size made from texts: the bytes, the most frequent merges, END_OF_TEXT.

    Pairs that occur once are not merged; bytes that are not UTF-8 are left out, and words longer than
    LONGEST_WORD are cut. The same texts give the same vocabulary. Raises DataError where the texts have too
    few pairs. It may take minutes in which no signal is heard: bpe_training.py does the same in a process.
    """
    if not 257 <= vocab_size <= MAX_VOCABULARY:
        raise DataError(f"--train-bpe {vocab_size}: a vocabulary must have 257 to {MAX_VOCABULARY} tokens")
    library = _tokenizers()
    encoder = library.Tokenizer(library.models.BPE())
    encoder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, show_progress=False, initial_alphabet=ALPHABET
    )
    encoder.train_from_iterator(_short_words(_valid_parts(texts), encoder.pre_tokenizer), trainer)
    model = json.loads(encoder.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if len(tokens) < vocab_size - 1:
        raise DataError(
            f"--train-bpe {vocab_size}: the text has repeated pairs for {len(tokens) + 1} tokens only; "
            "ask for those, or give more text"
        )
    return BPE({"tokens": [*tokens, END_OF_TEXT], "merges": [" ".join(pair) for pair in model["merges"]]})


def _valid_parts(texts: Iterable[bytes]) -> Iterator[str]:
    for text in texts:
        yield from _INVALID.split(text.decode("utf-8", "surrogateescape"))[::2]


def _short_words(parts: Iterable[str], splitter: Any) -> Iterator[str]:
    """The same words but for those that are too long, which are cut."""
    for part in parts:
        if max(map(len, _STRETCH.findall(part)), default=0) <= LONGEST_WORD:
            yield part
            continue
        for _, (start, end) in splitter.pre_tokenize_str(part):
            for at in range(start, end, LONGEST_WORD):
                yield part[at : min(at + LONGEST_WORD, end)]


def load(path: str) -> BPE:
    """The tokenizer of a vocabulary on disk.

    path: a folder with vocab.json and merges.txt or with tokenizer.json, one of these files, or a corpus that
    was encoded with one. Raises DataError, one line that names the file.
    """
    if path.lower().endswith(".h5"):
        return _of_corpus(path)
    folder, name = (Path(path), "") if Path(path).is_dir() else (Path(path).parent, Path(path).name)
    for pair in _FILES:
        if name in pair or (not name and any((folder / file).exists() for file in pair)):
            definition = _of_two_files(folder / pair[0], folder / pair[1])
            break
    else:
        if not name and not (folder / "tokenizer.json").exists():
            raise DataError(f"{path}: holds no vocabulary; --vocab takes {_WANTED}; nothing is downloaded")
        definition = _of_tokenizer_json(folder / (name or "tokenizer.json"))
    try:
        return BPE(definition)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _of_corpus(path: str) -> BPE:
    from gru_ref.data.corpus import load_corpus

    tokenizer = load_corpus([path]).tokenizer
    if not isinstance(tokenizer, BPE):
        raise DataError(f"{path}: was encoded with '{tokenizer.name}', so it holds no vocabulary for bpe")
    return tokenizer


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; --vocab takes {_WANTED}; nothing is downloaded") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8; --vocab takes {_WANTED}") from None


def _json_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_text_of(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: not a JSON object; --vocab takes {_WANTED}")
    return value


def _in_order(ids: dict[str, Any], path: Path) -> list[str]:
    """The tokens by id."""
    if sorted(ids.values(), key=lambda number: number if type(number) is int else -1) != [*range(len(ids))]:
        raise DataError(f"{path}: its token ids are not 0…{len(ids) - 1}, each once")
    return sorted(ids, key=ids.__getitem__)


def _of_two_files(vocabulary: Path, merges: Path) -> dict[str, Any]:
    tokens = _in_order(_json_of(vocabulary), vocabulary)
    lines = _text_of(merges).split("\n")
    pairs = [line.removesuffix("\r") for line in lines[lines[0].startswith("#version") :]]
    pairs = [pair for pair in pairs if pair]
    made = {*ALPHABET, *(pair.replace(" ", "") for pair in pairs)}
    odd = [token for token in tokens if token not in made and not re.fullmatch(r"<.+>|\[.+\]", token)]
    if odd:
        raise DataError(
            f"{merges}: does not make {len(odd):,} tokens of {vocabulary.name}, as {odd[0]!r}; "
            "the two files do not belong together"
        )
    return {"tokens": tokens, "merges": pairs}


def _of_tokenizer_json(path: Path) -> dict[str, Any]:
    facts = _json_of(path)
    try:
        model, splitter = facts["model"], facts["pre_tokenizer"] or {}
        added = {token["content"]: token["id"] for token in facts["added_tokens"]}
        plain = {
            "its model is BPE": model["type"] == "BPE",
            "no normalizer": facts["normalizer"] is None,
            "words as in GPT-2": splitter.get("type") == "ByteLevel" and splitter.get("use_regex", True),
            "no space put before the text": not splitter.get("add_prefix_space"),
            "nothing but merges": not any(map(model.get, _VARIATIONS)),
            "added tokens that are special": all(token["special"] for token in facts["added_tokens"]),
        }
        if missing := [need for need, is_met in plain.items() if not is_met]:
            raise DataError(f"{path}: not a byte-level BPE as GPT-2's, which has: {', '.join(missing)}")
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return {"tokens": _in_order({**model["vocab"], **added}, path), "merges": merges}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}: not a tokenizer.json: {error!r}; --vocab takes {_WANTED}") from None
