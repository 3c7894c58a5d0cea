"""Tokenizers: what each byte becomes, what comes back, and how many bytes a token stands for."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gru_ref.data import get_tokenizer
from gru_ref.errors import DataError

ALL_BYTES = bytes(range(256)) * 2
KNOWN = bytes([10, *range(32, 127)])
D02 = [ALL_BYTES, b"a\r\nb\rc\n", b"\xef\xbb\xbfabc", b"a\0b", b"\x92", "a\u2028b".encode(), b"\t", b""]


def test_ascii100_table_is_the_documented_one() -> None:
    ids = get_tokenizer("ascii100").encode(bytes(range(256))).tolist()
    expected = [1] * 256
    expected[10] = 4
    expected[32:127] = range(5, 100)
    assert ids == expected


def test_special_ids() -> None:
    ascii100, plain, ids = get_tokenizer("ascii100"), get_tokenizer("bytes"), get_tokenizer("ids", 50257)
    for tokenizer, expected in (
        (ascii100, (100, 1, 4, 3)),
        (plain, (257, None, 10, 256)),
        (ids, (50257, None, None, None)),
    ):
        assert (
            tokenizer.vocab_size,
            tokenizer.unknown_id,
            tokenizer.start_id,
            tokenizer.separator_id,
        ) == expected


@pytest.mark.parametrize("data", D02)
def test_ascii100_keeps_length_and_counts_every_other_byte_as_unknown(data: bytes) -> None:
    """D02: tab, CR, NUL, byte order mark, lone 0x92 and U+2028 are unknown bytes, and nothing crashes."""
    tokenizer = get_tokenizer("ascii100")
    ids = tokenizer.encode(data)
    assert ids.dtype == np.uint8
    assert len(ids) == len(data)
    assert np.count_nonzero(ids == tokenizer.unknown_id) == sum(byte not in KNOWN for byte in data)


def test_ascii100_of_crlf_and_of_a_byte_order_mark() -> None:
    """D02: CRLF stays two tokens, a byte order mark is three unknown bytes."""
    tokenizer = get_tokenizer("ascii100")
    assert tokenizer.encode(b"a\r\nb").tolist() == [70, 1, 4, 71]
    assert tokenizer.encode(b"\xef\xbb\xbfa").tolist() == [1, 1, 1, 70]


def test_ascii100_decodes_unknown_visibly_and_other_specials_to_nothing() -> None:
    assert get_tokenizer("ascii100").decode([0, 70, 1, 2, 71, 3, 4]).decode() == "a\ufffdb\n"


@pytest.mark.parametrize("data", D02)
def test_bytes_is_lossless(data: bytes) -> None:
    """D02: decode(encode(b)) == b."""
    tokenizer = get_tokenizer("bytes")
    ids = tokenizer.encode(data)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(data)
    assert tokenizer.decode(ids) == data


@given(st.binary())
def test_random_bytes_round_trip(data: bytes) -> None:
    """D02: `bytes` gives all back, `ascii100` all but the unknown bytes, each replaced by U+FFFD."""
    assert get_tokenizer("bytes").decode(get_tokenizer("bytes").encode(data)) == data
    ascii100 = get_tokenizer("ascii100")
    expected = b"".join(bytes([b]) if b in KNOWN else "\ufffd".encode() for b in data)
    assert ascii100.decode(ascii100.encode(data)) == expected


@given(st.binary(), st.integers(0, 100))
def test_encoding_in_pieces_gives_the_same_tokens(data: bytes, cut: int) -> None:
    for name in ("ascii100", "bytes"):
        encode = get_tokenizer(name).encode
        np.testing.assert_array_equal(np.concatenate([encode(data[:cut]), encode(data[cut:])]), encode(data))


@given(st.binary())
def test_token_bytes_sum_to_the_bytes_encoded(data: bytes) -> None:
    """N11: the denominator of bits per byte counts bytes, unknown ones too."""
    for name in ("ascii100", "bytes"):
        tokenizer = get_tokenizer(name)
        counts = tokenizer.token_bytes()
        assert counts is not None
        assert counts.shape == (tokenizer.vocab_size,)
        assert counts[tokenizer.encode(data)].sum() == len(data)


def test_bits_per_byte_of_a_uniform_model_of_two_byte_characters() -> None:
    """N11: "é" is two bytes; a special token adds nats and no bytes."""
    tokenizer = get_tokenizer("bytes")
    counts = tokenizer.token_bytes()
    assert counts is not None
    targets = np.append(tokenizer.encode("éé".encode()), 256)
    nats = len(targets) * math.log(256)
    assert counts[targets].sum() == 4
    assert nats / (math.log(2) * counts[targets].sum()) == pytest.approx(5 * 8 / 4, abs=1e-12)


def test_special_tokens_stand_for_no_bytes() -> None:
    ascii100, plain = get_tokenizer("ascii100").token_bytes(), get_tokenizer("bytes").token_bytes()
    assert ascii100 is not None
    assert plain is not None
    assert np.flatnonzero(ascii100 == 0).tolist() == [0, 2, 3]
    assert np.flatnonzero(plain == 0).tolist() == [256]
    assert get_tokenizer("ids", 9).token_bytes() is None


@pytest.mark.parametrize(("name", "bad"), [("ascii100", 100), ("bytes", 257), ("bytes", -1)])
def test_decode_refuses_ids_out_of_range(name: str, bad: int) -> None:
    with pytest.raises(DataError, match=f"token id {bad} "):
        get_tokenizer(name).decode([0, bad])


def test_decode_of_nothing_is_nothing() -> None:
    assert get_tokenizer("ascii100").decode([]) == get_tokenizer("bytes").decode([]) == b""


def test_ids_neither_encodes_nor_decodes() -> None:
    tokenizer = get_tokenizer("ids", 10)
    with pytest.raises(DataError, match="cannot encode"):
        tokenizer.encode(b"a")
    with pytest.raises(DataError, match="cannot decode"):
        tokenizer.decode([1])


def test_fingerprints_are_fixed_and_tell_tokenizers_apart() -> None:
    """They are written into corpora and checkpoints, so they must not change."""
    assert get_tokenizer("bytes").fingerprint() == hashlib.md5(b"bytes 257").hexdigest()
    assert get_tokenizer("ascii100").fingerprint() == "fb81ead2613e18d1b5ed65586592c872"
    prints = [
        get_tokenizer(*arguments).fingerprint() for arguments in (("ids", 256), ("ids", 257), ("bytes",))
    ]
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("name", "vocab_size", "match"),
    [
        ("words", 0, "unknown tokenizer 'words'"),
        ("bpe", 0, "give --vocab"),
        ("ids", 0, "1…65536"),
        ("ids", 65537, "1…65536"),
        ("ascii100", 99, "not the 100"),
        ("bytes", 256, "not the 257"),
    ],
)
def test_impossible_tokenizers_are_refused(name: str, vocab_size: int, match: str) -> None:
    with pytest.raises(DataError, match=match):
        get_tokenizer(name, vocab_size)


def test_own_vocabulary_size_is_accepted() -> None:
    assert get_tokenizer("ascii100", 100).vocab_size == 100
