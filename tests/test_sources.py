"""Documents from files: JSON lines, parquet and packed files, one clear line for what cannot be read."""

import contextlib
import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gru_ref.data import load_corpus, sources
from gru_ref.data.sources import Reading, find_sources
from gru_ref.data.tokenizers import Bytes
from gru_ref.errors import DataError, UsageError

TEXTS = ["First text.\n", "é\u2028日", "", "a\r\nb", "x" * 300, "last"]
DOCUMENTS = [text.encode() for text in TEXTS if text]


def records(texts: list[Any], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 7, key: text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, columns: dict[str, list[Any]], **options: Any) -> str:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, **options)
    return str(path)


def read(path: Path | str, field: str = "text") -> tuple[list[bytes], dict[str, Any]]:
    """The documents of one file, and its facts."""
    with contextlib.ExitStack() as stack:
        [source] = find_sources([str(path)], stack, None)
        reading = Reading(source, Bytes().segments, field)
        documents: list[bytes] = []
        for piece in reading:
            if piece is None:
                documents.append(b"")
            else:
                documents[-1] += piece
        assert reading.done == source.size
        return documents, reading.facts()


def refusal(path: Path | str, field: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        read(path, field)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize("chunk", [1, 7, 64, 2**20])
@pytest.mark.parametrize("name", ["d.jsonl", "d.JSONL", "d.jsonl.gz"])
def test_every_json_line_is_a_document(tmp_path: Path, monkeypatch: Any, chunk: int, name: str) -> None:
    """Blank lines and empty texts are none; size and md5 are those of the unpacked file."""
    monkeypatch.setattr(sources, "CHUNK", chunk)
    content = records(TEXTS) + b"\n  \n" + records([None]) + b'{"text": "no newline"}'
    packed = gzip.compress(content) if name.endswith("gz") else content
    (tmp_path / name).write_bytes(packed)
    documents, facts = read(tmp_path / name)
    assert documents == [*DOCUMENTS, b"no newline"]
    digest = hashlib.md5(content).hexdigest()
    assert facts == {"name": name, "bytes": len(content), "md5": digest, "documents": 6}


def test_a_lone_surrogate_in_json_is_kept(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a\\ud800b"}')
    assert read(tmp_path / "d.jsonl")[0] == [b"a\xed\xa0\x80b"]


def test_the_field_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(records(TEXTS, "content"))
    assert read(tmp_path / "d.jsonl", "content")[0] == DOCUMENTS
    assert "line 1: no field 'text'; it has 'id', 'content': choose by encode --field" in refusal(
        tmp_path / "d.jsonl"
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (records(["a"]) + b"{\n", "line 2: not JSON: "),
        (b"\xff\xfe{}", "line 1: not JSON: "),
        (b"[" * 100_000, "line 1: not JSON: "),
        (records(["a"]) + b"\n[1]\n", "line 3: not a JSON object"),
        (b'{"text": 5}', "line 1: 'text' is no text but int"),
        (b'{"a": 1}', "no field 'text'; it has 'a'"),
        (b"{}", "no field 'text'; it has none"),
        (records(["", None]), "no record has any text under 'text'"),
        (b"\n\n", "no record has any text"),
        (b"", "is empty"),
    ],
)
def test_json_lines_that_cannot_be_read_are_refused_by_line(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "d.jsonl").write_bytes(content)
    assert reason in refusal(tmp_path / "d.jsonl")


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sources, "CHUNK", 100)
    monkeypatch.setattr(sources, "LONGEST_LINE", 1000)
    (tmp_path / "d.jsonl").write_bytes(records(["a"]) + b"[" * 2000)
    assert "line 2 is longer than" in refusal(tmp_path / "d.jsonl")


@pytest.mark.parametrize("rows", [1, 256])
def test_every_row_of_a_parquet_file_is_a_document(tmp_path: Path, monkeypatch: Any, rows: int) -> None:
    monkeypatch.setattr(sources, "ROWS", rows)
    path = write_parquet(
        tmp_path / "d.parquet", {"id": [*range(7)], "text": [*TEXTS, None]}, row_group_size=2
    )
    documents, facts = read(path)
    assert documents == DOCUMENTS
    content = Path(path).read_bytes()
    digest = hashlib.md5(content).hexdigest()
    assert facts == {"name": "d.parquet", "bytes": len(content), "md5": digest, "documents": 5}
    assert read(write_parquet(tmp_path / "b.parquet", {"text": [b"\xff", b"b"]}))[0] == [b"\xff", b"b"]


def test_parquet_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "d.parquet", {"id": [1, 2], "body": ["a", "b"]})
    assert "no column 'text'; it has 'id', 'body': choose by encode --field" in refusal(path)
    assert "row 1: 'id' is no text but int" in refusal(path, "id")
    content = Path(path).read_bytes()
    for name, damaged in (("cut", content[:-20]), ("text", b"no parquet"), ("magic", b"PAR1" * 5)):
        (tmp_path / f"{name}.parquet").write_bytes(damaged)
        assert "not a whole parquet file" in refusal(tmp_path / f"{name}.parquet")
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress(content))
    assert "unpack it first" in refusal(tmp_path / "d.parquet.gz")


def test_without_pyarrow_parquet_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"d\.parquet: parquet needs pyarrow: pip install 'gru-ref\[text\]'"):
        read(tmp_path / "d.parquet")


def test_documents_are_the_same_from_every_format(tmp_path: Path) -> None:
    """A separator stands between two documents, wherever they come from."""
    (tmp_path / "d.jsonl").write_bytes(records(TEXTS))
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / f"{number}.txt").write_bytes(document)
    expected = [token for document in DOCUMENTS for token in (256, *document)][1:]
    for files in ([f"{number}.txt" for number in range(len(DOCUMENTS))], ["d.jsonl"]):
        assert load_corpus([str(tmp_path / file) for file in files], "bytes").tokens.tolist() == expected
    both = load_corpus([str(tmp_path / "0.txt"), str(tmp_path / "d.jsonl")], "bytes")
    assert both.tokens.tolist() == [*DOCUMENTS[0], 256, *expected]
