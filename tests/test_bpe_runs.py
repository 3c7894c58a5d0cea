"""Training with a vocabulary: it goes from the file into the run, and the file is not needed again."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gru_ref import config as configuration
from gru_ref.checkpoint import load_checkpoint, verify_checkpoint
from gru_ref.checkpoint.restore import restore_tokenizer
from gru_ref.cli import run
from gru_ref.data import bpe, encode_files, load_corpus
from gru_ref.errors import ConfigError, DataError
from gru_ref.training import TrainResult, resume, train

pytest.importorskip("tokenizers")

TEXT = " ".join(random.Random(1).choices(["the", "quick", "brown", "fox", "naïve", "<|endoftext|>"], k=900))
SMALL = {"model.layers": 1, "model.hidden": 8, "train.batch_size": 2, "train.seq_len": 16, "train.steps": 4}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """text.txt, and a vocabulary of 280 tokens as GPT-2's two files in vocab/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    definition = bpe.train([TEXT.encode()], 280).definition()
    (tmp_path / "vocab").mkdir()
    ids = {token: number for number, token in enumerate(definition["tokens"])}
    (tmp_path / "vocab" / "vocab.json").write_text(json.dumps(ids))
    (tmp_path / "vocab" / "merges.txt").write_text("\n".join(definition["merges"]), "utf-8")
    return tmp_path


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call


def start(out: str, *, stop_at: int = 0, **options: object) -> TrainResult:
    options = {key.replace("__", "."): value for key, value in options.items()}
    return train(configuration.load(options={**SMALL, **options}), out, stop_at=stop_at)


def test_a_run_needs_its_vocabulary_file_only_once(
    folder: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """The checkpoint decodes samples, evaluates and resumes by itself, to the same bytes."""
    straight = start("straight", data__files=["text.txt"], data__vocab="vocab")
    assert straight.checkpoint is not None
    start("run", data__files=["text.txt"], data__vocab="vocab", stop_at=2)
    shutil.rmtree("vocab")
    finished = resume("run")
    assert finished.checkpoint is not None
    assert finished.checkpoint.read_bytes() == straight.checkpoint.read_bytes()
    assert verify_checkpoint(finished.checkpoint).ok

    loaded = load_checkpoint(finished.checkpoint)
    assert (loaded.config.data.tokenizer, loaded.config.model.vocab_size) == ("bpe", 280)
    tokenizer = restore_tokenizer(loaded)
    assert loaded.data["train"]["tokenizer_fingerprint"] == tokenizer.fingerprint()

    code, out, err = call("sample", "run", "--prompt", "the <|endoftext|>", "-n", "9", "--json")
    assert (code, err) == (0, "")
    sample = json.loads(out)
    assert sample["prompt_ids"] == tokenizer.encode(b"the <|endoftext|>").tolist()
    assert sample["text"].encode() == tokenizer.decode(sample["ids"]).decode("utf-8", "replace").encode()
    code, out, _ = call("sample", "run", "--special-tokens", "--prompt", "<|endoftext|>", "-n", "0", "--json")
    assert json.loads(out)["prompt_ids"] == [tokenizer.separator_id]
    code, out, _ = call("eval", "run", "--data", "text.txt", "--json")
    figures = json.loads(out)
    first = tokenizer.token_bytes()[tokenizer.encode(TEXT.encode())[0]]
    assert figures["bytes"] == len(TEXT.encode()) - first


def test_an_empty_prompt_starts_as_after_a_newline(
    folder: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """S03."""
    start("run", data__files=["text.txt"], data__vocab="vocab", train__steps=1)
    _, out, _ = call("sample", "run", "-n", "3", "--json")
    assert json.loads(out)["prompt_ids"] == [bpe.load("vocab").encode(b"\n")[0]]


def test_an_encoded_corpus_brings_its_own_tokenizer(folder: Path) -> None:
    """Unless another is asked for, which is refused."""
    encode_files(["text.txt"], "c.h5", vocab="vocab", tokenizer="bpe")
    encode_files(["text.txt"], "b.h5", "bytes")
    for file, name, size in (("c.h5", "bpe", 280), ("b.h5", "bytes", 257)):
        result = start(f"run-{name}", data__files=[file], train__steps=1)
        assert result.checkpoint is not None
        loaded = load_checkpoint(result.checkpoint)
        assert (loaded.config.data.tokenizer, loaded.config.model.vocab_size) == (name, size)
    with pytest.raises(DataError, match="encoded with 'bpe', not 'ascii100'"):
        start("other", data__files=["c.h5"], data__tokenizer="ascii100")
    with pytest.raises(DataError, match=r"model\.vocab_size 50257 is not the 280"):
        start("other", data__files=["c.h5"], model__vocab_size=50257)
    with pytest.raises(DataError, match=r"vocab: model\.vocab_size 50257 is not its 280 tokens"):
        start("other", data__files=["text.txt"], data__vocab="vocab", model__vocab_size=50257)
    with pytest.raises(DataError, match="give --vocab a folder with GPT-2's"):
        start("other", data__files=["text.txt"], data__tokenizer="bpe")
    with pytest.raises(DataError, match="has 100; tokenizer 'bpe' needs a vocabulary: give --vocab"):
        start("other", data__files=["text.txt"], model__vocab_size=50257)
    with pytest.raises(ConfigError, match=r"data\.vocab goes with tokenizer bpe"):
        start("other", data__files=["text.txt"], data__tokenizer="bytes", data__vocab="vocab")


def test_a_corpus_of_another_vocabulary_is_refused(
    folder: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """R05: ids of one vocabulary are never read with another, in training, resuming or evaluating."""
    encode_files(["text.txt"], "c.h5", vocab="vocab", tokenizer="bpe")
    encode_files(["text.txt"], "d.h5", train_bpe=270)
    start("run", data__files=["c.h5"], stop_at=1)
    for act in (
        lambda: start("other", data__files=["d.h5"], data__vocab="vocab"),
        lambda: start("other", data__files=["c.h5"], data__val_files=["d.h5"]),
        lambda: resume("run", changes={"data.files": ["d.h5"]}),
    ):
        with pytest.raises(DataError, match=r"d\.h5: was encoded with another vocabulary"):
            act()
    code, _, err = call("eval", "run", "--data", "d.h5")
    assert code == 2
    assert "d.h5: was encoded with another vocabulary" in err
    with pytest.raises(ConfigError, match=r"data\.vocab cannot change"):
        resume("run", changes={"data.vocab": "elsewhere"})


def test_a_damaged_vocabulary_in_a_corpus_is_refused(folder: Path) -> None:
    """C01: a flipped bit in it is found, or means the same, as \\u00C4 for \\u00c4."""
    encode_files(["text.txt"], "c.h5", vocab="vocab", tokenizer="bpe")
    good = (folder / "c.h5").read_bytes()
    expected, found = load_corpus(["c.h5"]), 0
    start_at = good.index(b'{"merges"')
    for bit in range(0, 8 * 2000, 271):
        damaged = bytearray(good)
        damaged[start_at + bit // 8] ^= 1 << bit % 8
        (folder / "c.h5").write_bytes(damaged)
        try:
            assert load_corpus(["c.h5"]).fingerprint() == expected.fingerprint()
        except DataError as error:
            found += str(error).startswith("c.h5: is not a whole encoded corpus: ")
    assert found > 50


def test_a_preset_with_its_own_vocabulary_is_planned_without_a_text(
    call: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, _ = call("train", "--preset", "gpt-16m", "--dry-run")
    assert code == 0
    assert "parameters (16.1 M), 3,000 steps" in out


def test_ids_from_a_bin_file_are_given_a_vocabulary(
    folder: Path, call: Callable[..., tuple[int, str, str]]
) -> None:
    """nanoGPT's files hold ids of GPT-2's vocabulary and do not say so; with it, text comes out."""
    tokenizer = bpe.load("vocab")
    tokenizer.encode(TEXT.encode()).tofile("train.bin")
    named = load_corpus(["train.bin"], vocab="vocab")
    assert named.tokenizer.decode(named.tokens) == TEXT.encode()
    assert load_corpus(["train.bin"]).tokenizer.name == "ids"
    np.array([280], "<u2").tofile("large.bin")
    with pytest.raises(DataError, match=r"large\.bin: has token id 280, not below"):
        load_corpus(["large.bin"], vocab="vocab")
    start("ids", data__files=["train.bin"], train__steps=1)
    start("bpe", data__files=["train.bin"], data__vocab="vocab", train__steps=1)
    code, out, _ = call("sample", "bpe", "-n", "2", "--json")
    assert code == 0
    assert json.loads(out)["prompt_ids"] == [tokenizer.start_id]
    [first, *_] = (folder / "ids" / "samples.jsonl").read_text().splitlines()
    assert len(json.loads(first)["text"].split()) == 200  # ids, because nobody knows their text
