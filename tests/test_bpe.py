"""Byte-pair encoding: the tokens of GPT-2, nothing lost, and vocabularies from and to files."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gru_ref.data import bpe, bpe_training, get_tokenizer
from gru_ref.data.bpe import ALPHABET, BPE, END_OF_TEXT
from gru_ref.errors import DataError, RunError, UsageError

tokenizers = pytest.importorskip("tokenizers")

GPT2 = Path(__file__).parent.parent.parent / "shared" / "data" / "gpt2"
needs_gpt2 = pytest.mark.skipif(not GPT2.exists(), reason="needs ../shared/data/gpt2")

D02 = [
    bytes(range(256)) * 2,
    b"a\r\nb\rc\n",
    b"\xef\xbb\xbfabc",
    b"a\0b",
    b"\x92",
    "a\u2028b".encode(),
    b"\xed\xa0\x80 \xf4\x90\x80\x80 \xc0\xaf \xe3\x80",
    b"",
]
CHARACTERS = [
    *"aZé日1½²٣ \n\t\r\u3000\xa0\u2028'!…\0\x1c\x85\u0301\u180e\u200b😀",
    *("  ", "\n\n", "'s", "'ll", "'S", " the", END_OF_TEXT),
]


def generated_text(seed: int = 1) -> bytes:
    """Words that recur, as in any language, between all kinds of other characters."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 7))) for _ in range(200)]
    odd = ["é", "日本", "²", "  ", "\n", "\t", "…", "'ll", "😀", "12"]
    return " ".join(rng.choice(words if rng.random() < 0.9 else odd) for _ in range(4000)).encode()


@pytest.fixture(scope="module")
def toy() -> BPE:
    return bpe.train([generated_text()], 400)


def library(tokenizer: BPE) -> Any:
    """An encoder of the library's own, as its users make it."""
    ids = {token: number for number, token in enumerate(tokenizer.definition()["tokens"])}
    merges = [tuple(merge.split()) for merge in tokenizer.definition()["merges"]]
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return encoder


def crafted(*merges: str) -> BPE:
    return BPE({"tokens": [*ALPHABET, *(m.replace(" ", "") for m in merges)], "merges": list(merges)})


# What is encoded


def test_the_alphabet_is_the_librarys() -> None:
    assert sorted(ALPHABET) == sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for character in ("é", "日", "\0", " ", "\u00ad"):
        [(spelled, _)] = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(
            character
        )
        assert spelled == "".join(ALPHABET[byte] for byte in character.encode())


@given(st.lists(st.sampled_from(CHARACTERS), max_size=60).map("".join), st.integers(1, 40))
def test_tokens_are_those_of_the_library_for_the_whole_text(toy: BPE, text: str, segment: int) -> None:
    """D03: cutting a text and remembering words change no token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "SEGMENT", segment)
        assert toy.encode(text.encode()).tolist() == library(toy).encode(text).ids


def test_a_long_text_has_the_tokens_of_the_library(toy: BPE) -> None:
    text = generated_text(2)
    assert len(text) > 4 * bpe.SEGMENT
    assert toy.encode(text).tolist() == library(toy).encode(text.decode()).ids


def test_words_are_split_as_in_gpt2() -> None:
    """D03: lower-case contractions only, runs of letters, of numbers of any script, of the rest."""
    tokenizer = crafted("' l", "'l l", "' L", "Â ²", "3 Â²", "a Â²", "Ġ a", "Ġ Ġ", "Ċ a")
    for text, expected in {
        "I'll": ["I", "'ll"],
        "I'LL": ["I", "'", "L", "L"],
        "3²": ["3Â²"],
        "a²": ["a", "Â²"],
        "  a": ["Ġ", "Ġa"],
        "   a": ["ĠĠ", "Ġa"],
        "a  ": ["a", "ĠĠ"],
        "\na": ["Ċ", "a"],
    }.items():
        tokens = [tokenizer.definition()["tokens"][number] for number in tokenizer.encode(text.encode())]
        assert tokens == expected


@pytest.mark.parametrize("data", D02)
def test_nothing_is_lost(toy: BPE, data: bytes) -> None:
    """D02: decode(encode(b)) == b, for bytes that are not UTF-8 too."""
    ids = toy.encode(data)
    assert ids.dtype == np.dtype("<u2")
    assert toy.decode(ids) == data


@given(st.one_of(st.binary(), st.text(st.characters(exclude_categories=("Cs",))).map(str.encode)))
def test_any_bytes_come_back_and_are_counted(toy: BPE, data: bytes) -> None:
    """D02, N11: token_bytes sums to the bytes encoded."""
    ids = toy.encode(data)
    assert toy.decode(ids) == data
    assert toy.token_bytes()[ids].sum() == len(data)


def test_a_byte_that_is_not_utf8_is_a_token_of_its_own(toy: BPE) -> None:
    """D02: and the text around it is encoded as if it stood alone."""
    the, space_the = toy.encode(b"the").tolist(), toy.encode(b" the").tolist()
    assert toy.encode(b"the\xff\xe9 the").tolist() == [
        *the,
        *(toy.definition()["tokens"].index(ALPHABET[byte]) for byte in (0xFF, 0xE9)),
        *space_the,
    ]


def test_special_ids(toy: BPE) -> None:
    tokens = toy.definition()["tokens"]
    assert (toy.vocab_size, toy.unknown_id) == (400, None)
    assert tokens[toy.separator_id] == END_OF_TEXT
    assert toy.decode([toy.start_id]) == b"\n"
    assert toy.token_bytes()[toy.separator_id] == 0
    assert toy.decode([toy.separator_id]) == b""
    assert crafted().separator_id is None
    with pytest.raises(DataError, match="token id 400 "):
        toy.decode([400])


def test_text_that_spells_a_special_token_is_ordinary_unless_asked_for(toy: BPE) -> None:
    """D03."""
    text = b"a<|endoftext|>b <|endoftext|"
    assert toy.separator_id not in toy.encode(text)
    assert toy.decode(toy.encode(text)) == text
    asked = toy.with_special_tokens()
    assert asked.encode(text).tolist() == [
        *toy.encode(b"a"),
        toy.separator_id,
        *toy.encode(b"b <|endoftext|"),
    ]
    assert asked.fingerprint() == toy.fingerprint()
    with pytest.raises(DataError, match="only bpe"):
        get_tokenizer("bytes").with_special_tokens()


@pytest.mark.parametrize("run", ["a", "^", " ", "\n", "é", "\0"])
def test_the_time_for_a_long_run_grows_with_its_length(toy: BPE, run: str) -> None:
    """D03: near-linear (8 times the text in well under 64 times the time), and the library's tokens."""

    def seconds(count: int) -> float:
        tokenizer = BPE(toy.definition())
        tokenizer.encode(b"x")  # makes the library's encoder
        start = time.process_time()
        tokenizer.encode(run.encode() * count)
        return time.process_time() - start

    assert min(seconds(200_000) for _ in range(3)) < 24 * min(seconds(25_000) for _ in range(3)) + 0.02
    assert toy.encode(run.encode() * 9999).tolist() == library(toy).encode(run * 9999).ids


# Where a text is cut


def parts(text: bytes, length: int) -> list[bytes]:
    """The segments of a text that comes `length` bytes at a time."""
    pieces, rest = [], b""
    for start in range(0, len(text), length):
        more, rest = bpe.segments(rest + text[start : start + length], False)
        pieces += more
    return pieces + bpe.segments(rest, True)[0]


@given(st.lists(st.sampled_from([*CHARACTERS, "\udce3"]), max_size=80), st.integers(1, 30), st.integers(1, 9))
def test_segments_do_not_depend_on_how_the_text_comes(texts: list[str], length: int, segment: int) -> None:
    text = "".join(texts).encode("utf-8", "surrogateescape")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "SEGMENT", segment)
        patch.setattr(bpe, "LONGEST_SEGMENT", 4 * segment + 4)
        pieces, rest = bpe.segments(text, True)
        assert (b"".join(pieces), rest) == (text, b"")
        assert parts(text, length) == pieces
        assert max(map(len, pieces), default=0) <= bpe.LONGEST_SEGMENT


def test_a_run_without_a_place_to_cut_is_cut_between_characters(toy: BPE, monkeypatch: Any) -> None:
    """Bounded memory for any file; no character is torn."""
    monkeypatch.setattr(bpe, "LONGEST_SEGMENT", 100)
    text = ("日" * 200).encode()
    pieces, _ = bpe.segments(text, True)
    assert [len(piece) for piece in pieces] == [99] * 6 + [6]
    assert toy.decode(toy.encode(text)) == text


def test_remembered_words_are_forgotten_when_they_grow_too_many(toy: BPE, monkeypatch: Any) -> None:
    monkeypatch.setattr(bpe, "_CACHE", 1000)
    tokenizer = BPE(toy.definition())
    assert tokenizer.encode(generated_text()).tolist() == toy.encode(generated_text()).tolist()
    assert sum(map(len, tokenizer._known)) <= 1000


# Training


def test_the_most_frequent_pair_is_merged_first() -> None:
    tokenizer = bpe.train([b"xyxyxyxy ab ab xyxy"], 260)
    assert tokenizer.definition()["merges"][:2] == ["x y", "xy xy"]
    assert tokenizer.definition()["tokens"] == [*sorted(ALPHABET), "xy", "xyxy", "ab", END_OF_TEXT]


def test_training_depends_on_the_text_alone(toy: BPE) -> None:
    """Not on threads, nor on the pieces it comes in."""
    text = generated_text()
    for length in (1000, 7777):
        assert bpe.train(parts(text, length), 400).definition() == toy.definition()
    assert bpe.train([generated_text(2)], 400).fingerprint() != toy.fingerprint()


def test_training_leaves_invalid_bytes_out() -> None:
    assert bpe.train([b"xy\xffxy\xffxy"], 258).definition()["merges"] == ["x y"]


def test_a_text_with_too_few_pairs_is_refused_with_the_number_it_has() -> None:
    with pytest.raises(DataError, match="--train-bpe 300: the text has repeated pairs for 258 tokens only"):
        bpe.train([b"ab ab"], 300)
    assert bpe.train([b"ab ab"], 258).vocab_size == 258
    for size in (256, 65537):
        with pytest.raises(DataError, match="257 to 65536"):
            bpe.train([b"ab"], size)


# Vocabularies on disk


def tokenizer_json(tokenizer: BPE, **changes: Any) -> dict[str, Any]:
    """What the library writes for it, with some parts changed."""
    tokens = tokenizer.definition()["tokens"]
    encoder = library(bpe.BPE({"tokens": tokens[:-1], "merges": tokenizer.definition()["merges"]}))
    encoder.add_special_tokens([tokens[-1]])
    facts: dict[str, Any] = json.loads(encoder.to_str())
    for key, value in changes.items():
        table, _, name = key.rpartition("__")
        (facts[table] if table else facts)[name] = value
    return facts


def write_two_files(
    folder: Path, tokenizer: BPE, names: tuple[str, str] = ("vocab.json", "merges.txt")
) -> None:
    folder.mkdir(exist_ok=True)
    ids = {token: number for number, token in enumerate(tokenizer.definition()["tokens"])}
    (folder / names[0]).write_text(json.dumps(ids))
    lines = ["#version: 0.2", *tokenizer.definition()["merges"], ""]
    (folder / names[1]).write_text("\n".join(lines), "utf-8")


def test_a_vocabulary_is_the_same_from_every_kind_of_file(toy: BPE, tmp_path: Path) -> None:
    write_two_files(tmp_path / "a", toy)
    write_two_files(tmp_path / "b", toy, ("encoder.json", "vocab.bpe"))
    (tmp_path / "c").mkdir()
    facts = tokenizer_json(toy)
    (tmp_path / "c" / "tokenizer.json").write_text(json.dumps(facts))
    facts["model"]["merges"] = [" ".join(pair) for pair in facts["model"]["merges"]]
    (tmp_path / "old.json").write_text(json.dumps(facts))
    for name in (
        "a",
        "a/vocab.json",
        "a/merges.txt",
        "b",
        "b/vocab.bpe",
        "c",
        "c/tokenizer.json",
        "old.json",
    ):
        loaded = bpe.load(str(tmp_path / name))
        assert loaded.definition() == toy.definition()
        assert loaded.fingerprint() == toy.fingerprint()


def test_the_definition_makes_the_tokenizer_again(toy: BPE) -> None:
    definition = json.loads(json.dumps(toy.definition()))
    again = get_tokenizer("bpe", 400, definition)
    assert again.fingerprint() == toy.fingerprint()
    assert again.encode(D02[0]).tolist() == toy.encode(D02[0]).tolist()
    with pytest.raises(DataError, match=r"model\.vocab_size 50257 is not the 400"):
        get_tokenizer("bpe", 50257, definition)


def test_a_missing_vocabulary_is_one_line_that_says_where_people_get_it(tmp_path: Path) -> None:
    """D03: never a download."""
    (tmp_path / "vocab.json").write_text("{}")
    for path, named in ((tmp_path / "none", "none"), (tmp_path, "merges.txt"), (tmp_path / "sub", "sub")):
        (tmp_path / "sub").mkdir(exist_ok=True)
        with pytest.raises(DataError) as caught:
            bpe.load(str(path))
        message = str(caught.value)
        assert named in message
        assert "vocab.json and merges.txt, as distributed with OpenAI's GPT-2" in message
        assert "nothing is downloaded" in message
        assert "\n" not in message
    with pytest.raises(DataError, match="give --vocab"):
        get_tokenizer("bpe")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "word-piece": ({"model__type": "WordPiece"}, "its model is BPE"),
    "normalizer": ({"normalizer": {"type": "NFC"}}, "no normalizer"),
    "other words": ({"pre_tokenizer__use_regex": False}, "words as in GPT-2"),
    "no words": ({"pre_tokenizer": None}, "words as in GPT-2"),
    "prefix": ({"pre_tokenizer__add_prefix_space": True}, "no space put before"),
    "suffix": ({"model__end_of_word_suffix": "</w>"}, "nothing but merges"),
    "whole words": ({"model__ignore_merges": True}, "nothing but merges"),
    "no model": ({"model": None}, "not a tokenizer.json"),
    "odd merges": ({"model__merges": [["a", "\u0100\u0101"]]}, "cannot make"),
    "merges of three": ({"model__merges": ["a b c"]}, "cannot make"),
    "numbers": ({"model__merges": [[1, 2]]}, "not a tokenizer.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_json_of_another_kind_is_refused(toy: BPE, tmp_path: Path, name: str) -> None:
    changes, reason = REFUSED[name]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_json(toy, **changes)))
    with pytest.raises(DataError, match=reason) as caught:
        bpe.load(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_added_tokens_that_would_split_ordinary_text_are_refused(toy: BPE, tmp_path: Path) -> None:
    facts = tokenizer_json(toy)
    facts["added_tokens"][0]["special"] = False
    (tmp_path / "x.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="added tokens that are special"):
        bpe.load(str(tmp_path / "x.json"))


def without(what: str) -> Callable[[Path], Any]:
    """Change the vocabulary file."""

    def change(folder: Path) -> None:
        ids = json.loads((folder / "vocab.json").read_text())
        if what == "byte":
            ids = {token: number for number, token in enumerate(token for token in ids if token != "Ā")}
        elif what == "id":
            ids[END_OF_TEXT] = 1
        else:
            ids["a"] = "0"
        (folder / "vocab.json").write_text(json.dumps(ids))

    return change


def add_merge(folder: Path, merge: str) -> None:
    with (folder / "merges.txt").open("a", encoding="utf-8") as file:
        file.write(f"{merge}\n")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (without("byte"), "lacks byte 0x00"),
        (without("id"), "ids are not 0…399"),
        (without("number"), "ids are not 0…399"),
        (lambda folder: (folder / "vocab.json").write_text("[1]"), "not a JSON object"),
        (lambda folder: (folder / "vocab.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "vocab.json").write_bytes(b"\xff"), "not UTF-8"),
        (lambda folder: (folder / "merges.txt").write_text("#version: 0.2\n"), "do not belong together"),
        (lambda folder: add_merge(folder, "a z q"), "cannot make 'a z q'"),
        (lambda folder: add_merge(folder, "q z"), "cannot make 'q z'"),
    ],
)
def test_damaged_vocabularies_are_refused_by_name(
    toy: BPE, tmp_path: Path, change: Callable[[Path], Any], reason: str
) -> None:
    write_two_files(tmp_path, toy)
    change(tmp_path)
    with pytest.raises(DataError, match=reason) as caught:
        bpe.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ([], "not an object"),
        ({"tokens": ALPHABET}, "not an object"),
        ({"tokens": ALPHABET, "merges": [1]}, "not two lists"),
        ({"tokens": [*ALPHABET, "a"], "merges": []}, "a token twice"),
        ({"tokens": [*ALPHABET, ""], "merges": []}, "empty"),
        ({"tokens": [*ALPHABET, "\ud800"], "merges": []}, "not Unicode"),
        ({"tokens": [*ALPHABET, "<x>", "<x>a"], "merges": ["<x> a"]}, "cannot make"),
        ({"tokens": [*ALPHABET, *map(str, range(10**4, 75_281))], "merges": []}, "at most 65,536 fit"),
    ],
)
def test_a_definition_that_is_not_sound_is_refused(definition: Any, reason: str) -> None:
    """C03: ids that uint16 cannot hold never come to be."""
    with pytest.raises(DataError, match=reason):
        BPE(definition)


def test_a_special_token_with_a_space_cannot_be_read_from_text() -> None:
    tokenizer = BPE({"tokens": [*ALPHABET, "<end of text>"], "merges": []})
    with pytest.raises(DataError, match="white space"):
        tokenizer.with_special_tokens()


def test_without_the_library_only_encoding_fails(toy: BPE, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = toy.encode(b"the")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = BPE(toy.definition())
    assert tokenizer.decode(ids) == b"the"
    for use in (lambda: tokenizer.encode(b"a"), lambda: bpe.train([b"a"], 257)):
        with pytest.raises(UsageError, match=r"pip install 'gru-ref\[text\]'"):
            use()


# GPT-2


@pytest.fixture(scope="module")
def gpt2() -> BPE:
    return bpe.load(str(GPT2))


@needs_gpt2
def test_gpt2_ids(gpt2: BPE) -> None:
    """D03: the reference table; the ids are those published with the vocabulary or known from its use."""
    table = {
        "I'll we've  two": [40, 1183, 356, 1053, 220, 734],
        "Hello, world!": [15496, 11, 995, 0],
        "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
        "": [],
    }
    for text, expected in table.items():
        assert gpt2.encode(text.encode()).tolist() == expected
    assert (gpt2.vocab_size, gpt2.separator_id, gpt2.start_id) == (50257, 50256, 198)
    assert gpt2.with_special_tokens().encode(b"<|endoftext|>").tolist() == [50256]


@needs_gpt2
def test_gpt2_on_tinyshakespeare(gpt2: BPE) -> None:
    """D03: 338,025 tokens, published; and the way back."""
    text = (GPT2.parent / "tinyshakespeare.txt").read_bytes()
    ids = gpt2.encode(text)
    assert len(ids) == 338_025
    assert gpt2.decode(ids) == text


@needs_gpt2
@pytest.mark.parametrize("text", ["HE'S I'll", "  two  spaces\n\n", "3²½٣", "naïve 日本", "a" * 200_000])
def test_gpt2_equals_the_library(gpt2: BPE, text: str) -> None:
    """D03."""
    assert gpt2.encode(text.encode()).tolist() == library(gpt2).encode(text).ids


# Long words, and the process that makes a vocabulary


@pytest.mark.parametrize("run", ["a", "^", " ", "\n", "é", "\0", "acgt"])
def test_the_time_to_make_a_vocabulary_grows_with_the_length_of_a_long_run(run: str) -> None:
    """A word of n letters takes n² uncut: 200,000 took more than a minute."""
    text = "".join(random.Random(1).choices(run, k=200_000)).encode()
    start = time.process_time()
    bpe.train([text], 260)
    assert time.process_time() - start < 5


LONG = st.sampled_from(["a" * 9, " " + "é" * 12, "^" * 15, " " * 11, "\n\t" * 6, "12345678901", "字" * 9])


@given(st.lists(st.one_of(LONG, st.sampled_from(CHARACTERS)), max_size=30))
def test_only_words_that_are_too_long_are_cut_for_training(texts: list[str]) -> None:
    """Every other word is the one that the library finds in the whole text."""
    splitter = library(BPE({"tokens": bpe.ALPHABET, "merges": []})).pre_tokenizer
    text, limit = "".join(texts), 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "LONGEST_WORD", limit)
        parts = list(bpe._short_words([text], splitter))
    assert "".join(parts) == text
    expected = []
    for _, (start, end) in splitter.pre_tokenize_str(text):
        size = limit if end - start > limit else end - start
        expected += [text[at : min(at + size, end)] for at in range(start, end, size)]
    found = [part[slice(*at)] for part in parts for _, at in splitter.pre_tokenize_str(part)]
    assert found == expected


def test_a_process_makes_the_vocabulary_that_this_one_would(toy: BPE) -> None:
    waited: list[None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe_training, "PATIENCE", 0.01)
        made = bpe_training.train([b"", generated_text()], 400, waiting=lambda: waited.append(None))
    assert made.definition() == toy.definition()
    assert len(waited) > 1


def test_a_refusal_or_a_death_of_the_process_is_an_error_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, message in ((300, "repeated pairs for"), (1, "a vocabulary must have 257")):
        with pytest.raises(DataError, match=message):
            bpe_training.train([b"ab ab"] * 50_000, size)
    monkeypatch.setattr(bpe_training, "_PROGRAM", "import os; os._exit(3)")
    with pytest.raises(RunError, match="the process that makes the vocabulary died"):
        bpe_training.train([b"ab ab"] * 50_000, 258)


def test_the_process_ends_when_nobody_waits_for_it(toy: BPE, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether this one is interrupted, or killed while the other trains."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(bpe_training, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))

    def interrupted() -> Iterator[bytes]:
        yield b"ab"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bpe_training.train(interrupted(), 258)
    assert started[0].returncode == -signal.SIGKILL
    hang = "import time\ndef hang(texts, size):\n    list(texts)\n    time.sleep(60)\n"
    use = "bpe_training.bpe.train = hang\nbpe_training.serve"
    program = hang + bpe_training._PROGRAM.replace("bpe_training.serve", use)
    parent, child = Pipe()
    with parent, child:
        arguments = [sys.executable, "-c", program, str(child.fileno()), "258", *sys.path]
        process = subprocess.Popen(arguments, pass_fds=[child.fileno()])
        child.close()
        parent.send_bytes(b"ab")
        parent.send_bytes(b"")
    assert process.wait(timeout=30) == 1
