"""Reading text and encoded corpora: what comes in, and one clear line for everything that cannot."""

import errno
import gzip
import hashlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from gru_ref.data import Corpus, encode_files, get_tokenizer, load_corpus, sources, split
from gru_ref.data import corpus as module
from gru_ref.data.windows import Windows
from gru_ref.errors import DataError, RunError

TEXT = b"a\r\nb\rc\n\xef\xbb\xbf\0\x92 The quick brown fox.\n" * 20
UNKNOWN = 20 * (2 + 3 + 2)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return str(path)


@pytest.fixture
def encoded(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "corpus.h5"
    encode_files([text], path, "bytes")
    return path


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT)))


def refusal(files: list[str], tokenizer: str = "bytes", vocab_size: int = 0) -> str:
    """The message of the DataError that these files raise; one line that names the last of them."""
    with pytest.raises(DataError) as caught:
        load_corpus(files, tokenizer, vocab_size)
    message = str(caught.value)
    assert "\n" not in message
    assert files[-1] in message
    return message


# Text


def test_a_text_file_is_read_as_bytes(text: str) -> None:
    """D02: no newline is translated, no byte order mark dropped, nothing appended."""
    corpus = load_corpus([text], "bytes")
    assert corpus.tokens.tobytes() == np.frombuffer(TEXT, np.uint8).astype("<u2").tobytes()
    assert corpus.unknown == 0
    assert corpus.sources == [{"name": "text.txt", "bytes": len(TEXT), "md5": md5(TEXT)}]
    assert not corpus.tokens.flags.writeable


def test_unknown_bytes_are_counted(text: str) -> None:
    """D02: the reported count is the expected one."""
    corpus = load_corpus([text], "ascii100")
    assert corpus.unknown == UNKNOWN
    assert corpus.tokens.dtype == np.uint8


@pytest.mark.parametrize("chunk", [1, 7, 840, 10_000])
def test_the_size_of_the_pieces_changes_nothing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    whole = load_corpus([text, text], "ascii100")
    for where in (module, sources):
        monkeypatch.setattr(where, "CHUNK", chunk)
    pieces = load_corpus([text, text], "ascii100")
    np.testing.assert_array_equal(pieces.tokens, whole.tokens)
    assert pieces.facts() == whole.facts()
    assert encode_files([text, text], tmp_path / "c.h5", "ascii100") == whole.facts()
    assert load_corpus([str(tmp_path / "c.h5")], "ascii100").facts() == whole.facts()


def test_the_separator_stands_between_documents_only(tmp_path: Path) -> None:
    for name, content in (("b.txt", b"B"), ("a.txt", b"A"), ("c.txt", b"C")):
        (tmp_path / name).write_bytes(content)
    files = [str(tmp_path / name) for name in ("b.txt", "a.txt", "c.txt")]
    assert load_corpus(files, "bytes").tokens.tolist() == [66, 256, 65, 256, 67]
    assert load_corpus(files, "ascii100").tokens.tolist() == [39, 3, 38, 3, 40]
    assert load_corpus(files[:1], "bytes").tokens.tolist() == [66]


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    contents = {"b.txt": b"B", "a/z.md": b"Z", "a/noending": b"N", ".hidden": b"H", ".git/x.txt": b"X"}
    contents |= {"old.h5": b"5", "train.bin": b"BB", "empty.txt": b"", "c.gz": gzip.compress(b"C")}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    os.symlink(tmp_path, tmp_path / "loop")
    corpus = load_corpus([str(tmp_path)], "bytes")
    assert [source["name"] for source in corpus.sources] == ["a/noending", "a/z.md", "b.txt", "c.gz"]
    assert get_tokenizer("bytes").decode(corpus.tokens) == b"NZBC"


def test_gzip_and_plain_text_are_the_same_corpus(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(TEXT))
    packed, plain = load_corpus([str(path)], "bytes"), load_corpus([text], "bytes")
    assert packed.fingerprint() == plain.fingerprint()
    assert packed.sources == [{"name": "text.txt.gz", "bytes": len(TEXT), "md5": md5(TEXT)}]


@pytest.mark.usefixtures("stdin")
def test_standard_input_is_a_document(text: str) -> None:
    corpus = load_corpus(["-", text], "bytes")
    assert [source["name"] for source in corpus.sources] == ["-", "text.txt"]
    assert get_tokenizer("bytes").decode(corpus.tokens) == TEXT + TEXT


def test_a_named_pipe_is_a_document(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(TEXT,))
    writer.start()
    corpus = load_corpus([str(pipe)], "bytes")
    writer.join()
    assert corpus.sources == [{"name": "pipe", "bytes": len(TEXT), "md5": md5(TEXT)}]


def test_without_files_the_embedded_corpus_is_read() -> None:
    from pydoc_data.topics import topics

    corpus = load_corpus([], "ascii100")
    [source] = corpus.sources
    assert source["name"] == "pydoc_data.topics"
    assert len(corpus.tokens) == source["bytes"] > 400_000
    content = get_tokenizer("bytes").decode(load_corpus([], "bytes").tokens)
    assert content.decode() == "\n".join(topics[key] for key in sorted(topics))
    assert source["md5"] == md5(content)
    assert 0 < corpus.unknown < 0.01 * len(corpus.tokens)


def test_the_fingerprint_is_of_tokenizer_and_tokens(text: str) -> None:
    tokenizer = get_tokenizer("bytes")
    corpus = load_corpus([text], "bytes")
    expected = md5(tokenizer.fingerprint().encode() + np.frombuffer(TEXT, np.uint8).astype("<u2").tobytes())
    assert corpus.fingerprint() == expected
    assert Corpus(corpus.tokens, tokenizer, [], 0).fingerprint() == expected
    assert load_corpus([text], "ascii100").fingerprint() != expected


def test_one_changed_byte_changes_the_fingerprint(text: str) -> None:
    """R05: a resumed run can tell that its data changed."""
    before = load_corpus([text], "bytes").fingerprint()
    Path(text).write_bytes(b"A" + TEXT[1:])
    assert load_corpus([text], "bytes").fingerprint() != before


def test_facts_are_json_and_name_no_path(text: str, tmp_path: Path) -> None:
    facts = load_corpus([text], "ascii100").facts()
    assert json.loads(json.dumps(facts)) == facts
    assert str(tmp_path) not in json.dumps(facts)
    assert facts["tokens"] == len(TEXT)
    assert facts["vocab_size"] == 100


def test_a_file_name_that_is_not_utf8_is_readable_in_the_facts(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    with open(path, "wb") as file:
        file.write(b"x")
    [source] = load_corpus([os.fsdecode(path)], "bytes").sources
    assert source["name"] == "caf\ufffd.txt"


# What cannot be read


def test_unusable_text_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """D01: an empty file is an error; so is all that is not there, not whole or not text."""
    packed = gzip.compress(TEXT)
    contents = {"empty.txt": b"", "cut.gz": packed[:-9], "none.gz": TEXT, "empty.gz": gzip.compress(b"")}
    contents |= {"bad.gz": packed[:20] + bytes([packed[20] ^ 255]) + packed[21:]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".hidden").write_bytes(b"x")
    reasons = {"missing.txt": "No such file", "empty.txt": "is empty", "empty.gz": "is empty"}
    reasons |= {"cut.gz": "ended before", "none.gz": "Not a gzipped", "bad.gz": "cannot be read"}
    reasons |= {"folder": "holds no text"}
    for name, reason in reasons.items():
        assert reason in refusal([str(tmp_path / name)])
        assert reason in refusal([text, str(tmp_path / name)])
    assert "neither" in refusal(["/dev/zero"])


def test_a_file_that_grows_while_it_is_read_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = module.find_sources

    def grow(*arguments: Any) -> Any:
        found = listed(*arguments)
        Path(text).write_bytes(TEXT + b"x")
        return found

    monkeypatch.setattr(module, "find_sources", grow)
    assert "changed while" in refusal([text])


@pytest.mark.usefixtures("stdin")
def test_standard_input_twice_is_refused() -> None:
    assert "only once" in refusal(["-", "-"])


def test_text_as_ids_is_refused(text: str) -> None:
    assert "cannot encode" in refusal([text], "ids")
    with pytest.raises(DataError, match="embedded corpus"):
        load_corpus([], "ids")


def test_encoded_files_are_read_alone(text: str, encoded: Path) -> None:
    assert "alone" in refusal([text, str(encoded)])


# Validation part


@pytest.mark.parametrize(
    ("n", "fraction", "expected"), [(100, 0.29, 29), (10, 0.0, 0), (7, 0.5, 4), (3, 0.1, 0)]
)
def test_split_takes_the_last_share_and_shares_nothing(n: int, fraction: float, expected: int) -> None:
    train, val = split(np.arange(n), fraction)
    assert len(val) == expected
    assert [*train, *val] == list(range(n))


def test_a_share_that_leaves_no_window_for_training_is_refused() -> None:
    """D01."""
    train, _ = split(np.arange(20), 0.6)
    with pytest.raises(DataError, match="has 8 tokens, needs at least"):
        Windows(train, 8, seed=1)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_impossible_shares(fraction: float) -> None:
    with pytest.raises(DataError, match="val_fraction"):
        split(np.arange(9), fraction)


# Encoded corpora


@pytest.mark.parametrize("tokenizer", ["ascii100", "bytes"])
def test_an_encoded_corpus_is_the_corpus_of_its_text(text: str, tmp_path: Path, tokenizer: str) -> None:
    path = tmp_path / "c.h5"
    facts = encode_files([text, text], path, tokenizer)
    fresh, read = load_corpus([text, text], tokenizer), load_corpus([str(path)], tokenizer)
    np.testing.assert_array_equal(read.tokens, fresh.tokens)
    assert read.tokens.dtype == fresh.tokens.dtype
    assert read.facts() == fresh.facts() == facts
    assert not read.tokens.flags.writeable
    assert read.tokens.flags.aligned
    assert isinstance(read.tokens.base, np.memmap)


def test_encoding_twice_gives_the_same_file(text: str, tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        encode_files([text], tmp_path / name)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "b.h5", "text.txt"]


def test_progress_counts_bytes(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (module, sources):
        monkeypatch.setattr(where, "CHUNK", 500)
    seen: list[tuple[int, int]] = []
    encode_files([text], tmp_path / "c.h5", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(min(500 * i, len(TEXT)), len(TEXT)) for i in range(1, -(-len(TEXT) // 500) + 1)]


@pytest.mark.parametrize("tokenizer", ["ascii100", "bytes"])
def test_the_file_is_the_same_for_any_block_size_and_whether_its_length_was_known(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    """Plain text is written in place; of a packed one, how long it is shows only at the end."""
    other = tmp_path / "other.txt"
    other.write_bytes(bytes(range(256)) * 9)
    files = [text, str(other), text]
    encode_files(files, tmp_path / "a.h5", tokenizer)
    first = (tmp_path / "a.h5").read_bytes()
    for where in (module, sources):
        monkeypatch.setattr(where, "CHUNK", 700)
    encode_files(files, tmp_path / "b.h5", tokenizer)
    assert (tmp_path / "b.h5").read_bytes() == first
    monkeypatch.setattr(module, "_known_count", lambda *arguments: None)
    encode_files(files, tmp_path / "c.h5", tokenizer)
    assert (tmp_path / "c.h5").read_bytes() == first
    expected = get_tokenizer(tokenizer)
    separator = np.array([expected.separator_id], expected.dtype)
    parts = [separator if n % 2 else expected.encode(Path(files[n // 2]).read_bytes()) for n in range(5)]
    corpus = load_corpus([str(tmp_path / "a.h5")])
    np.testing.assert_array_equal(corpus.tokens, np.concatenate(parts))
    assert corpus.sources[1]["md5"] == hashlib.md5(other.read_bytes()).hexdigest()


@pytest.mark.parametrize("change", [b"", b"more" * 500])
def test_a_file_that_changes_while_it_is_read_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: bytes
) -> None:
    Path(text).write_bytes(TEXT * 100)
    for where in (module, sources):
        monkeypatch.setattr(where, "CHUNK", 500)

    def meddle(done: int, total: int) -> None:
        with open(text, "ab" if change else "wb") as file:
            file.write(change)

    with pytest.raises(DataError, match=r"text\.txt: changed while it was read"):
        encode_files([text], tmp_path / "c.h5", progress=meddle)
    assert os.listdir(tmp_path) == ["text.txt"]


def test_an_error_of_the_disk_while_it_is_written_is_not_lost(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells it once: to the fsync beside the writing, and not to the last one again."""
    told = []

    def fsync(descriptor: int) -> None:
        if not told:
            told.append(descriptor)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match=r"c\.h5: cannot be written: Input/output error"):
        encode_files([text], tmp_path / "c.h5", progress=lambda done, total: time.sleep(0.2))
    assert os.listdir(tmp_path) == ["text.txt"]


def test_an_existing_file_is_only_replaced_when_asked(text: str, encoded: Path) -> None:
    before = encoded.read_bytes()
    with pytest.raises(DataError, match="already exists"):
        encode_files([text], encoded, "ascii100")
    assert encoded.read_bytes() == before
    encode_files([text], encoded, "ascii100", overwrite=True)
    assert load_corpus([str(encoded)], "ascii100").tokenizer.name == "ascii100"


@pytest.mark.parametrize(
    ("name", "match"), [("c.txt", "end in .h5"), ("no/c.h5", "folder"), ("d.h5", "exists")]
)
def test_impossible_outputs_are_refused(text: str, tmp_path: Path, name: str, match: str) -> None:
    (tmp_path / "d.h5").mkdir()
    with pytest.raises(DataError, match=match):
        encode_files([text], tmp_path / name, overwrite=True)


def test_a_failed_encoding_leaves_nothing_behind(text: str, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_files([text], tmp_path / "c.h5", progress=stop)
    with pytest.raises(DataError, match="none"):
        encode_files([text, str(tmp_path / "none")], tmp_path / "c.h5")
    assert os.listdir(tmp_path) == ["text.txt"]


def _full_disk(text: str, output: str) -> None:
    """In a child process: no file may grow beyond 16 KiB, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
    try:
        encode_files([text], output)
    except RunError as error:
        sys.exit(f"RunError {error}")


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT * 100)
    code = "import sys, test_corpus; test_corpus._full_disk(*sys.argv[1:])"
    arguments = [sys.executable, "-c", code, str(path), str(tmp_path / "c.h5")]
    result = subprocess.run(
        arguments, cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr.startswith(f"RunError {tmp_path / 'c.h5'}: cannot be written: ")
    assert result.stderr.count("\n") == 1
    assert os.listdir(tmp_path) == ["text.txt"]


def test_another_tokenizer_is_refused(encoded: Path) -> None:
    """R05: tokens of one tokenizer are never taken for another's."""
    assert "encoded with 'bytes', not 'ascii100'" in refusal([str(encoded)], "ascii100")
    with pytest.raises(DataError, match=r"model\.vocab_size 100 is not the 257"):
        load_corpus([str(encoded)], "bytes", 100)


def test_damaged_files_are_refused_or_hold_the_same(encoded: Path, tmp_path: Path) -> None:
    """C01: cut anywhere, one bit flipped, bytes overwritten: an error of one line, never other tokens."""
    good, expected = encoded.read_bytes(), load_corpus([str(encoded)], "bytes")
    rng = np.random.default_rng(1)
    damaged = [good[:size] for size in (0, 1, 8, 96, len(good) // 2, len(good) - 1)]
    for _ in range(60):
        flipped, spliced = bytearray(good), bytearray(good)
        flipped[rng.integers(len(good))] ^= 1 << int(rng.integers(8))
        at = int(rng.integers(len(good) - 20))
        spliced[at : at + 20] = rng.bytes(20)
        damaged += [bytes(flipped), bytes(spliced)]
    messages = []
    for number, content in enumerate(damaged):
        path = tmp_path / f"{number}.h5"
        path.write_bytes(content)
        try:
            read = load_corpus([str(path)], "bytes")
        except DataError as error:
            messages.append(str(error))
            continue
        np.testing.assert_array_equal(read.tokens, expected.tokens)
        assert read.facts() == expected.facts()
    assert len(messages) > len(damaged) // 2
    assert all(".h5: is not a whole encoded corpus: " in message for message in messages)
    assert not any("\n" in message for message in messages)


def _rewrite_meta(file: Any, **changes: Any) -> None:
    facts = json.loads(file["meta"][()]) | changes
    meta = json.dumps(facts).encode()
    del file["meta"]
    file["meta"] = np.bytes_(meta)
    file.attrs["meta_md5"] = np.bytes_(md5(meta))


def _replace_tokens(file: Any, **how: Any) -> None:
    tokens = file["tokens"][()]
    del file["tokens"]
    file.create_dataset("tokens", data=tokens, **how)


def _link_tokens(file: Any) -> None:
    file.move("tokens", "elsewhere")
    file["tokens"] = h5py.SoftLink("/elsewhere")


def _external_tokens(file: Any) -> None:
    count = len(file["tokens"])
    del file["tokens"]
    file.create_dataset("tokens", (count,), "<u2", external=[(os.__file__, 0, 2 * count)])


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda f: f.attrs.__delitem__("complete"), "'complete' is missing"),
    (lambda f: f.attrs.modify("complete", False), "never completed"),
    (lambda f: f.attrs.__setitem__("format", np.bytes_("other")), "its format is not"),
    (lambda f: f.attrs.__setitem__("format", "a string of variable length"), "of another type"),
    (lambda f: f.attrs.modify("format_version", 2), "format version 2 is not 1"),
    (lambda f: f.__delitem__("meta"), "/meta is missing"),
    (lambda f: f["tokens"].__setitem__(0, 9), "/tokens has another md5"),
    (lambda f: _rewrite_meta(f, tokenizer="bpe"), "/tokenizer is missing"),
    (lambda f: _rewrite_meta(f, tokenizer="words"), "unknown tokenizer 'words'"),
    (lambda f: _rewrite_meta(f, tokenizer_fingerprint=""), "another 'bytes' encoded it"),
    (lambda f: _rewrite_meta(f, tokens=3), "another length"),
    (lambda f: _replace_tokens(f, chunks=(10,)), "not contiguous"),
    (lambda f: _replace_tokens(f, dtype="<i4"), "cannot be int32"),
    (_link_tokens, "/tokens is missing or a link"),
    (_external_tokens, "not contiguous"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES, ids=[reason for _, reason in CHANGES])
def test_a_file_with_another_structure_is_refused(
    encoded: Path, change: Callable[[Any], Any], reason: str
) -> None:
    with h5py.File(encoded, "r+") as file:
        change(file)
    assert reason in refusal([str(encoded)])


def test_ids_beyond_the_vocabulary_are_refused(encoded: Path) -> None:
    with h5py.File(encoded, "r+") as file:
        file["tokens"][5] = 257
        tokens = file["tokens"][()]
        _rewrite_meta(file, fingerprint=module.fingerprint(tokens, get_tokenizer("bytes")))
    assert "ids that 'bytes' does not have" in refusal([str(encoded)])


def test_what_is_no_encoded_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.h5"
    path.write_bytes(TEXT)
    assert "file signature not found" in refusal([str(path)])
    assert "No such file" in refusal([str(tmp_path / "none.h5")])
    (tmp_path / "folder.h5").mkdir()
    assert "Is a directory" in refusal([str(tmp_path / "folder.h5")])


# uint16 files

TOKENS = np.array([5, 50256, 0, 7], "<u2")


def header(version: int = 1, count: int = 4) -> bytes:
    fields = np.zeros(256, "<i4")
    fields[:3] = 20240520, version, count
    return fields.tobytes()


@pytest.mark.parametrize("head", [b"", header()], ids=["nanoGPT", "llm.c"])
def test_uint16_files_are_read_as_ids(tmp_path: Path, head: bytes) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(head + TOKENS.tobytes())
    corpus = load_corpus([str(path)], "ids")
    assert corpus.tokens.tolist() == TOKENS.tolist()
    assert corpus.tokenizer.vocab_size == 50257
    assert load_corpus([str(path)], "ids", 50304).tokenizer.vocab_size == 50304
    content = path.read_bytes()
    assert corpus.sources == [{"name": "train.bin", "bytes": len(content), "md5": md5(content)}]
    assert "50256, not below model.vocab_size 50256" in refusal([str(path)], "ids", 50256)
    assert "data.tokenizer to 'ids'" in refusal([str(path)], "ascii100")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no tokens"),
        (b"abc", "odd"),
        (header(count=0), "no tokens"),
        (header()[:100], "cut off"),
        (header(version=2) + TOKENS.tobytes(), "version 2"),
        (header() + TOKENS.tobytes()[:-2], "4 tokens = 1032"),
    ],
)
def test_damaged_uint16_files_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(content)
    assert reason in refusal([str(path)], "ids")


def test_importing_the_data_package_imports_no_h5py() -> None:
    code = "import sys, gru_ref.data.corpus, gru_ref.data.windows; sys.exit('h5py' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
