"""`gru-ref encode`: what it prints, what it writes, what it raises."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gru_ref.cli.encode import command
from gru_ref.data import load_corpus
from gru_ref.errors import DataError

TEXT = b"Hello\tworld\n" * 100


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "text.txt").write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def encode(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(command, arguments, input=stdin)


def test_the_last_line_has_tokens_unknown_bytes_speed_and_md5() -> None:
    """D02: unknown bytes are reported, with what would keep them."""
    result = encode("text.txt", "-o", "c.h5")
    assert result.exit_code == 0
    corpus = load_corpus(["c.h5"], "ascii100")
    assert result.stdout.startswith(
        "c.h5: 1,200 tokens (ascii100), 100 unknown bytes (8.33%; --tokenizer bytes"
    )
    assert result.stdout.endswith(f" MB/s, md5 {corpus.fingerprint()}\n")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_json_has_the_facts_of_the_corpus() -> None:
    result = encode("text.txt", "text.txt", "-o", "c.h5", "--tokenizer", "bytes", "--json")
    figures = json.loads(result.stdout)
    facts = load_corpus(["c.h5"], "bytes").facts()
    assert {key: figures[key] for key in facts} == facts
    assert figures["tokens"] == 2401
    assert figures["output"] == "c.h5"
    assert figures["mb_per_second"] > 0


def test_no_hint_where_nothing_is_unknown() -> None:
    assert "0 unknown bytes, " in encode("text.txt", "-o", "c.h5", "--tokenizer", "bytes").stdout


def test_standard_input_is_read_as_bytes() -> None:
    assert encode("-", "-o", "c.h5", "--tokenizer", "bytes", stdin=b"a\r\nb").exit_code == 0
    assert load_corpus(["c.h5"], "bytes").tokens.tolist() == [97, 13, 10, 98]


def test_an_existing_corpus_needs_force() -> None:
    assert encode("text.txt", "-o", "c.h5").exit_code == 0
    refused = encode("text.txt", "-o", "c.h5")
    assert isinstance(refused.exception, DataError)
    assert "--force" in str(refused.exception)
    assert encode("text.txt", "-o", "c.h5", "--force").exit_code == 0


def test_a_missing_file_is_an_error_of_the_family_and_writes_nothing(folder: Path) -> None:
    result = encode("none.txt", "-o", "c.h5")
    assert isinstance(result.exception, DataError)
    assert str(result.exception) == "none.txt: cannot be read: No such file or directory"
    assert os.listdir(folder) == ["text.txt"]


@pytest.mark.parametrize(
    "arguments", [("text.txt",), ("-o", "c.h5"), ("text.txt", "-o", "c.h5", "--tokenizer", "x")]
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert encode(*arguments).exit_code == 2
