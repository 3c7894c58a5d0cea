"""`gru-ref encode`: what it prints, what it writes, what it raises."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gru_ref.cli.encode import command
from gru_ref.data import load_corpus
from gru_ref.errors import DataError, UsageError

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


def test_a_vocabulary_is_trained_and_travels_with_the_corpus() -> None:
    pytest.importorskip("tokenizers")
    result = encode("text.txt", "-o", "c.h5", "--train-bpe", "262")
    assert result.exit_code == 0
    corpus = load_corpus(["c.h5"])
    assert result.stdout.startswith(f"c.h5: {len(corpus.tokens):,} tokens (bpe, 262), 0 unknown bytes, ")
    assert corpus.tokenizer.decode(corpus.tokens) == TEXT
    assert corpus.tokenizer.vocab_size == 262
    assert len(corpus.tokens) < len(TEXT)
    assert encode("text.txt", "-o", "d.h5", "--train-bpe", "262", "--workers", "1").exit_code == 0
    assert Path("c.h5").read_bytes() == Path("d.h5").read_bytes()


def test_a_vocabulary_is_taken_from_another_corpus(folder: Path) -> None:
    pytest.importorskip("tokenizers")
    encode("text.txt", "-o", "c.h5", "--train-bpe", "262")
    (folder / "other.txt").write_bytes(b"Hello\xff <|endoftext|> w")
    figures = json.loads(encode("other.txt", "-o", "d.h5", "--vocab", "c.h5", "--json").stdout)
    vocabulary, other = load_corpus(["c.h5"]).tokenizer, load_corpus(["d.h5"])
    assert figures["tokenizer_fingerprint"] == vocabulary.fingerprint()
    assert other.tokenizer.decode(other.tokens) == b"Hello\xff <|endoftext|> w"
    assert vocabulary.separator_id not in other.tokens
    encode("other.txt", "-o", "e.h5", "--vocab", "c.h5", "--special-tokens")
    asked = load_corpus(["e.h5"]).tokens.tolist()
    assert asked == [
        *vocabulary.encode(b"Hello\xff "),
        vocabulary.separator_id,
        *vocabulary.encode(b" w"),
    ]


def test_standard_input_can_be_trained_on_and_encoded() -> None:
    pytest.importorskip("tokenizers")
    assert encode("-", "text.txt", "-o", "c.h5", "--train-bpe", "262", stdin=TEXT).exit_code == 0
    corpus = load_corpus(["c.h5"])
    assert corpus.tokenizer.decode(corpus.tokens) == TEXT + TEXT
    assert corpus.tokens.tolist().count(corpus.tokenizer.separator_id) == 1


def test_the_field_of_records_is_chosen(folder: Path) -> None:
    (folder / "d.jsonl").write_text('{"body": "ab"}\n{"body": "c"}\n')
    assert encode("d.jsonl", "-o", "c.h5", "--tokenizer", "bytes", "--field", "body").exit_code == 0
    corpus = load_corpus(["c.h5"])
    assert corpus.tokens.tolist() == [97, 98, 256, 99]
    assert corpus.sources[0]["documents"] == 2
    refused = encode("d.jsonl", "-o", "d.h5")
    assert str(refused.exception).startswith("d.jsonl: line 1: no field 'text'; it has 'body'")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--tokenizer", "bpe"], "give --vocab a folder with GPT-2's vocab.json and merges.txt"),
        (["--vocab", "none"], "none: no such file; --vocab takes a folder with GPT-2's"),
        (["--vocab", "a", "--train-bpe", "300"], "contradict"),
        (["--vocab", "a", "--tokenizer", "bytes"], "--vocab goes with --tokenizer bpe, not with bytes"),
        (["--train-bpe", "300", "--tokenizer", "ascii100"], "--train-bpe goes with"),
        (["--special-tokens"], "'ascii100' has no special tokens"),
        (["--train-bpe", "4096"], "repeated pairs for"),
    ],
)
def test_what_contradicts_itself_is_refused_and_writes_nothing(
    folder: Path, arguments: list[str], match: str
) -> None:
    if "4096" in arguments:
        pytest.importorskip("tokenizers")
    result = encode("text.txt", "-o", "c.h5", *arguments)
    assert isinstance(result.exception, UsageError)
    assert match in str(result.exception)
    assert os.listdir(folder) == ["text.txt"]


def test_a_signal_to_end_leaves_nothing_behind(folder: Path) -> None:
    """L03: the exit code is 143, and neither a file nor a process stays."""
    code = (
        "import os, signal, sys; from gru_ref.cli import main; from gru_ref.data import corpus; "
        "corpus._write_h5.__globals__['_facts'] = lambda *a: os.kill(os.getpid(), signal.SIGTERM); main()"
    )
    arguments = [sys.executable, "-c", code, "encode", "text.txt", "-o", "c.h5"]
    result = subprocess.run(arguments, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (143, b"", b"")
    assert os.listdir(folder) == ["text.txt"]


def test_a_signal_ends_the_making_of_a_vocabulary_at_once(folder: Path) -> None:
    """L03: and the process that makes it; before there is one it is announced."""
    pytest.importorskip("tokenizers")
    code = (
        "import time; from gru_ref.cli import main; from gru_ref.data import bpe_training; "
        "bpe_training._PROGRAM = 'import time; time.sleep(60)'; main()"
    )
    arguments = [sys.executable, "-c", code, "encode", "text.txt", "-o", "c.h5", "--train-bpe", "262"]
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stderr is not None
        assert process.stderr.readline() == (
            b"gru-ref: making a vocabulary of 262 tokens, which may take a while\n"
        )
        time.sleep(1)
        process.send_signal(number)
        start = time.monotonic()
        process.communicate(timeout=30)
        assert time.monotonic() - start < 10
        assert process.returncode == 128 + number
        assert os.listdir(folder) == ["text.txt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("text.txt",),
        ("-o", "c.h5"),
        ("text.txt", "-o", "c.h5", "--tokenizer", "x"),
        ("text.txt", "-o", "c.h5", "--train-bpe", "256"),
        ("text.txt", "-o", "c.h5", "--workers", "0"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...]) -> None:
    assert encode(*arguments).exit_code == 2
