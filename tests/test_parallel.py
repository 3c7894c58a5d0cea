"""Encoding in several processes: the same tokens in the same order, and an end whatever happens."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gru_ref.data import bpe, corpus, encode_files, load_corpus, sources
from gru_ref.data.bpe import BPE
from gru_ref.data.parallel import encode_batches
from gru_ref.errors import DataError, RunError
from gru_ref.types import Array

pytest.importorskip("tokenizers")


def text(length: int) -> bytes:
    rng = random.Random(length)
    words = [b"the", b"then", "naïve".encode(), b"\xff\xfe", b"\n\n", b"  ", b"aaaaaaaa", "日本".encode()]
    return b" ".join(rng.choices(words, k=length))


@pytest.fixture(scope="module")
def tokenizer() -> BPE:
    return bpe.train([text(3000)], 270)


class Failing(BPE):
    """Raises for one text, and dies of another."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Failing, (self.definition(),)

    def encode(self, data: bytes) -> Array:
        if data == b"die":
            os._exit(1)
        if data == b"fail":
            raise DataError("this text is refused")
        return super().encode(data)


def test_the_corpus_is_the_same_for_any_number_of_workers(
    tokenizer: BPE, tmp_path: Path, monkeypatch: Any
) -> None:
    """Byte by byte: order, separators and facts; and it is what one call of encode gives."""
    monkeypatch.setattr(corpus, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(bpe, "SEGMENT", 100)
    contents = [text(2000), b"short", text(900)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.txt").write_bytes(content)
    files = [str(tmp_path / f"{number}.txt") for number in range(3)]
    seen: list[tuple[int, int]] = []
    for workers, chunk in ((1, 2**20), (1, 300), (2, 300)):
        for module in (corpus, sources):
            monkeypatch.setattr(module, "CHUNK", chunk)
        output = tmp_path / f"{workers}-{chunk}.h5"
        seen.clear()
        encode_files(files, output, tokenizer, workers=workers, progress=lambda *done: seen.append(done))
        assert output.read_bytes() == (tmp_path / "1-1048576.h5").read_bytes()
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == (sum(map(len, contents)),) * 2
    expected: list[int] = []
    for content in contents:
        expected += [tokenizer.separator_id, *tokenizer.encode(content)]
    assert load_corpus([str(output)]).tokens.tolist() == expected[1:]
    assert tokenizer.decode(expected) == b"".join(contents)


def test_small_texts_are_encoded_in_this_process(tokenizer: BPE, tmp_path: Path, monkeypatch: Any) -> None:
    """Starting one takes as long as encoding some megabytes."""
    monkeypatch.setattr("gru_ref.data.parallel.ProcessPoolExecutor", None)
    (tmp_path / "a.txt").write_bytes(text(100))
    encode_files([str(tmp_path / "a.txt")], tmp_path / "a.h5", tokenizer, workers=8)


def test_a_process_that_dies_or_refuses_is_an_error_and_not_a_hang(tokenizer: BPE) -> None:
    failing = Failing(tokenizer.definition())
    good = [b"the", None, b"then"]
    for bad, error, match in ((b"fail", DataError, "refused"), (b"die", RunError, "fewer --workers")):
        batches = [(good, 1), ([bad], 2), *((good, number) for number in range(3, 20))]
        with pytest.raises(error, match=match):
            list(encode_batches(failing, batches, 2))


def test_a_vocabulary_without_separator_takes_one_document_only(tmp_path: Path) -> None:
    plain = BPE({"tokens": bpe.ALPHABET, "merges": []})
    (tmp_path / "a.txt").write_bytes(b"a b")
    path = str(tmp_path / "a.txt")
    tokens = load_corpus([path], plain).tokens
    np.testing.assert_array_equal(tokens, plain.encode(b"a b"))
    with pytest.raises(DataError, match="no token to put between documents"):
        load_corpus([path, path], plain)
