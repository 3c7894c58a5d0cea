"""Sampling: which tokens a setting leaves, which one is drawn, and the loop that feeds it back (S01–S03)."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gru_ref import generate as generation
from gru_ref import random
from gru_ref.config import ModelConfig
from gru_ref.data.tokenizers import get_tokenizer
from gru_ref.errors import RunError, UsageError
from gru_ref.generate import choose, generate, probabilities, stream_text
from gru_ref.models.gru_lm import GRULM

LAST_U = 1 - 2.0**-53  # the largest draw there is
US = (0.0, 0.25, 0.5, 0.999, LAST_U)
NEGATIVE_INFINITY = -np.inf

# Few different values, so that ties are the rule.
tied_logits = st.lists(st.integers(-3, 3), min_size=1, max_size=12).map(np.array)
any_logits = st.lists(st.floats(-30, 30), min_size=1, max_size=12).map(np.array)


def small_model(dtype=np.float64, **config):
    model = GRULM(ModelConfig(**{"layers": 2, "hidden": 8, "vocab_size": 100} | config), seed=3, dtype=dtype)
    model.initialise()
    return model


def ranked(logits):
    """Ids from the largest logit down, equal ones by id: the rule, written another way."""
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def next_logits(model, ids):
    """Logits of the token after `ids`, computed from nothing but them."""
    logits, _, _ = model.forward(np.array(ids)[:, None])
    return logits[-1, 0, : model.config.vocab_size]


# Temperature (S01) -----------------------------------------------------------------------------------------


@given(tied_logits, st.sampled_from(US), st.integers(0, 5), st.floats(0.01, 1))
def test_temperature_0_takes_the_largest_logit_and_of_equal_ones_the_lowest_id(logits, u, top_k, top_p):
    assert choose(logits, temperature=0, top_k=top_k, top_p=top_p, u=u) == int(np.argmax(logits))


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30, 1e-6])
@pytest.mark.parametrize("u", US)
def test_a_tiny_temperature_is_greedy_and_does_not_overflow(temperature, u):
    """Overflow would be a warning, which is an error here."""
    logits = np.array([-1e3, 2.0, 2.5, 1.0, 1e3, 999.0], np.float32)
    assert choose(logits, temperature=temperature, u=u) == 4


def test_a_huge_temperature_is_uniform_but_filters_still_rank_by_the_logits():
    logits = np.array([1.0, 5.0, -7.0, 3.0])
    assert probabilities(logits, temperature=1e30).tolist() == [0.25] * 4
    assert probabilities(logits, temperature=1e30, top_k=2).tolist() == [0, 0.5, 0, 0.5]
    assert probabilities(logits, temperature=1e30, top_p=0.75).tolist() == [1 / 3, 1 / 3, 0, 1 / 3]


def test_temperature_divides_the_logits():
    logits = np.array([0.0, np.log(4.0)])
    for temperature, ratio in ((1.0, 4.0), (2.0, 2.0), (0.5, 16.0)):
        p = probabilities(logits, temperature=temperature)
        assert p[1] / p[0] == pytest.approx(ratio, rel=1e-14)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        *(({"temperature": t}, "temperature") for t in (-1, -1e-300, np.nan, np.inf, -np.inf)),
        *(({"top_k": k}, "top-k") for k in (-1, -(10**9))),
        *(({"top_p": p}, "top-p") for p in (0, -0.1, 1.0001, np.nan, np.inf)),
    ],
)
def test_a_setting_out_of_range_is_a_usage_error_that_names_it(settings, name):
    with pytest.raises(UsageError, match=f"^{name} must be"):
        choose(np.zeros(3), u=0.5, **settings)
    with pytest.raises(UsageError, match=f"^{name} must be"):
        generate(small_model(), [2], 5, **settings)  # at once, not at the first token


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_logit_that_is_not_finite_stops_the_sampling(bad, temperature):
    with pytest.raises(RunError, match=f"largest logit is {bad}"):
        choose(np.array([0.0, bad, 1.0]), temperature=temperature, u=0.5)


# top-k (S02) -----------------------------------------------------------------------------------------------


@given(st.one_of(tied_logits, any_logits), st.integers(1, 15))
def test_top_k_keeps_exactly_k_and_of_equal_logits_the_lowest_ids(logits, k):
    kept = np.flatnonzero(probabilities(logits, temperature=100.0, top_k=k))
    assert kept.tolist() == sorted(ranked(logits)[:k])


@pytest.mark.parametrize(
    ("logits", "k", "kept"),
    [([1, 2, 2, 2, 3], 3, {1, 2, 4}), ([7, 7, 7, 7], 2, {0, 1}), ([1, 2, 2, 2, 3], 1, {4})],
)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_only_the_k_kept_ids_are_ever_drawn(logits, k, kept, dtype):
    """A threshold at the k-th logit would keep four of the first ones. 5,000 draws each."""
    logits = np.array(logits, dtype)
    us = random.uniform(5000, seed=1, stream=random.SAMPLING)
    assert {choose(logits, top_k=k, u=u) for u in us} == kept


@given(any_logits, st.sampled_from(US), st.floats(0.1, 10))
def test_k_of_0_or_at_least_the_vocabulary_is_no_filter_and_k_of_1_is_greedy(logits, u, temperature):
    unfiltered = probabilities(logits, temperature=temperature)
    for k in (0, len(logits), len(logits) + 1, 10**9):
        assert np.array_equal(probabilities(logits, temperature=temperature, top_k=k), unfiltered)
    assert choose(logits, temperature=temperature, top_k=1, u=u) == np.argmax(logits)


# top-p -----------------------------------------------------------------------------------------------------


@given(any_logits, st.floats(1e-6, 1), st.integers(0, 12))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, top_p, top_k):
    """Of what top-k left. The sums differ in their last bits from those under test, hence 1e-12."""
    p = probabilities(logits, top_k=top_k)
    kept = np.flatnonzero(probabilities(logits, top_k=top_k, top_p=top_p))
    size = max(len(kept), 1)
    assert kept.tolist() == sorted(ranked(logits)[:size])
    assert p[kept].sum() >= top_p - 1e-12
    without_the_last = p[ranked(logits)[: size - 1]].sum()
    assert size == 1 or without_the_last < top_p + 1e-12


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-300, 1),
        (0.25, 1),
        (np.nextafter(0.25, 1), 2),
        (0.5, 2),
        (0.75, 3),
        (np.nextafter(1, 0), 4),
        (1.0, 4),
    ],
)
def test_top_p_at_the_exact_boundaries_of_four_equal_probabilities(top_p, kept):
    assert probabilities(np.zeros(4), top_p=top_p).tolist() == [1 / kept] * kept + [0] * (4 - kept)


def test_top_p_is_a_share_of_what_top_k_left():
    """0.5 of four would be two, 0.5 of the two that top-k left is one."""
    assert probabilities(np.zeros(4), top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]


# The draw --------------------------------------------------------------------------------------------------


def test_the_draw_is_the_first_id_whose_cumulative_probability_is_above_u():
    for u, expected in ((0, 0), (np.nextafter(0.25, 0), 0), (0.25, 1), (0.5, 2), (LAST_U, 3)):
        assert choose(np.zeros(4), u=u) == expected


def test_the_largest_draw_is_the_last_id_although_ten_tenths_do_not_add_up_to_1():
    assert [choose(np.zeros(V), u=LAST_U) for V in range(1, 120)] == list(range(119))


@given(any_logits, st.floats(0, LAST_U), st.integers(0, 12), st.floats(0.01, 1))
def test_every_draw_has_a_probability_above_0(logits, u, top_k, top_p):
    settings = {"temperature": 0.05, "top_k": top_k, "top_p": top_p}
    assert probabilities(logits, **settings)[choose(logits, u=u, **settings)] > 0


@pytest.mark.parametrize("u", US)
def test_a_logit_of_minus_infinity_is_never_drawn(u):
    logits = np.array([NEGATIVE_INFINITY, 0, NEGATIVE_INFINITY, 0, NEGATIVE_INFINITY])
    assert choose(logits, u=u) in (1, 3)


@given(st.lists(st.floats(-5, 5, width=16), min_size=1, max_size=8), st.floats(0.2, 5))
def test_probabilities_are_the_softmax_in_float64_whatever_the_logits_type(values, temperature):
    exact = np.exp(np.array(values) / temperature)
    for dtype in (np.float16, np.float32, np.float64):
        p = probabilities(np.array(values, dtype), temperature=temperature)
        assert p.dtype == np.float64
        np.testing.assert_allclose(p, exact / exact.sum(), rtol=1e-12)


def test_frequencies_of_5_000_draws_agree_with_the_probabilities_at_5_sigma():
    logits = np.array([0.3, -1.0, 2.0, 1.1, 0.0, 1.9])
    settings = {"temperature": 1.3, "top_k": 5, "top_p": 0.9}
    p, N = probabilities(logits, **settings), 5000
    us = random.uniform(N, seed=11, stream=random.SAMPLING)
    counts = np.bincount([choose(logits, u=u, **settings) for u in us], minlength=6)
    assert np.count_nonzero(p) == 4
    assert counts[p == 0].sum() == 0
    assert (np.abs(counts - N * p) <= 5 * np.sqrt(N * p * (1 - p))).all()


# The loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"reset_after": False}, {"tied": True, "layers": 1}])
def test_greedy_tokens_are_the_argmax_of_logits_computed_from_the_whole_text(config):
    """S01: the state that the loop carries is that of all tokens before."""
    model, prompt = small_model(**config), [2, 45, 78]
    text = list(prompt)
    for token in generate(model, prompt, 30, temperature=0):
        assert token == np.argmax(next_logits(model, text))
        text.append(token)
    assert len(text) == 33


def test_greedy_does_not_depend_on_the_seed_and_sampling_does():
    model = small_model()
    for greedy in ({"temperature": 0}, {"top_k": 1}, {"temperature": 1e-30}, {"top_p": 1e-9}):
        assert len({tuple(generate(model, [2], 20, seed=seed, **greedy)) for seed in range(4)}) == 1
    sampled = {tuple(generate(model, [2], 20, seed=seed)) for seed in (0, 1, 2, random.MAX_SEED)}
    assert len(sampled) == 4
    assert tuple(generate(model, [2], 20, seed=2)) in sampled


def test_the_draw_of_a_position_is_a_function_of_seed_and_position_alone():
    model, prompt, settings = small_model(), [2, 50], {"temperature": 0.7, "top_k": 40, "top_p": 0.9}
    tokens = list(generate(model, prompt, 12, seed=9, start=1000, **settings))
    for i, token in enumerate(tokens):
        (u,) = random.uniform(1, seed=9, stream=random.SAMPLING, step=1000 + i)
        assert token == choose(next_logits(model, prompt + tokens[:i]), u=u, **settings)


def test_a_longer_sample_begins_with_the_shorter_one_and_can_be_gone_on_with():
    model, prompt = small_model(), [7, 8, 9]
    longer = list(generate(model, prompt, 20, seed=4))
    assert list(generate(model, prompt, 6, seed=4)) == longer[:6]
    assert list(generate(model, prompt + longer[:6], 14, seed=4, start=6)) == longer[6:]


@pytest.mark.parametrize("reset_after", [True, False])
@pytest.mark.parametrize("length", [1, 2, 17])
def test_a_prompt_in_one_go_leaves_the_state_of_one_token_at_a_time(reset_after, length):
    """S03, keras#1128."""
    model = small_model(reset_after=reset_after)
    ids = random.permutation(100, seed=1, stream=random.SAMPLING)[:length]
    logits, state, _ = model.forward(ids[:, None])
    stepwise = None
    for token in ids:
        last, stepwise, _ = model.forward(np.array([[token]]), stepwise)
    np.testing.assert_allclose(stepwise, state, rtol=0, atol=1e-14)
    np.testing.assert_allclose(last[0], logits[-1], rtol=0, atol=1e-13)


def test_a_prompt_longer_than_a_chunk_is_read_whole(monkeypatch):
    """S03: nothing is cropped, also where the prompt is read in several pieces, the last one partial."""
    model, prompt = small_model(), [i % 100 for i in range(21)]
    expected = list(generate(model, prompt, 15))
    monkeypatch.setattr(generation, "PROMPT_CHUNK", 4)
    read, forward = [], model.forward
    model.forward = lambda ids, state: read.append(ids[:, 0].tolist()) or forward(ids, state)
    assert list(generate(model, prompt, 15)) == expected
    assert [len(ids) for ids in read] == [4, 4, 4, 4, 4, 1, *[1] * 14]
    assert [token for ids in read for token in ids] == prompt + expected[:-1]


def test_n_of_0_yields_nothing_and_the_model_is_not_run():
    model = small_model()
    model.forward = None
    assert list(generate(model, [2], 0)) == []


def test_tokens_come_as_they_are_made_so_a_consumer_can_stop():
    assert len(list(islice(generate(small_model(), [2], 2**32), 3))) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": []}, "the prompt has no token"),
        ({"ids": [3, 100]}, "token id 100, which is not in 0…99"),
        ({"ids": [2, 10**30]}, "token id 10{30}, which is not in 0…99"),
        ({"ids": [-1]}, "token id -1, which is not in 0…99"),
        ({"n": -1}, "n must be at least 0"),
        ({"n": 2, "start": 2**32 - 1}, "positions lie in"),
        ({"start": -1}, "positions lie in"),
        ({"seed": -1}, "seed must lie in"),
        ({"seed": 2**64}, "seed must lie in"),
    ],
)
def test_wrong_arguments_are_usage_errors_before_the_first_token(arguments, message):
    with pytest.raises(UsageError, match=message):
        generate(small_model(), **{"ids": [2], "n": 1} | arguments)


def test_padded_rows_of_the_vocabulary_are_never_sampled():
    model = small_model(vocab_size=5, vocab_padding=64)
    model.arena.param["classifier.bias"][5:] = 1e6
    tokens = list(generate(model, [0], 300, temperature=10.0))
    assert set(tokens) == {0, 1, 2, 3, 4}
    assert set(generate(model, [0], 20, temperature=0)) <= {0, 1, 2, 3, 4}


def test_every_id_can_be_drawn_special_tokens_too():
    """Zero weights: all ids are equally likely."""
    model = GRULM(ModelConfig(layers=1, hidden=2, vocab_size=20))
    assert set(generate(model, [2], 300)) == set(range(20))


# Streaming text --------------------------------------------------------------------------------------------


def test_a_character_is_given_whole_once_its_last_byte_is_there():
    assert list(stream_text([b"\xe6\x97", b"\xa5", b"x\xf0", b"\x9f\x98", b"\x80"])) == [
        *("", "日", "x", "", "😀", "")
    ]
    assert list(stream_text([b"\xe6\x97"])) == ["", "\ufffd"]


# Beginnings, ends and impossible parts of characters are likelier here than in random bytes.
utf8_pieces = st.lists(
    st.sampled_from([b"a", b"\n", b"\xe6", b"\x97", b"\xa5", b"\xf0\x9f", b"\xff", b"\xc0"])
)


@given(st.one_of(utf8_pieces, st.lists(st.binary(max_size=4))))
def test_streamed_text_is_the_text_decoded_at_once(pieces):
    """L04."""
    assert "".join(stream_text(pieces)) == b"".join(pieces).decode("utf-8", errors="replace")


@pytest.mark.parametrize("name", ["bytes", "ascii100"])
@given(data=st.data())
def test_decoding_token_by_token_is_decoding_at_once(name, data):
    tokenizer = get_tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    streamed = "".join(stream_text(tokenizer.decode([token]) for token in ids))
    assert streamed == tokenizer.decode(ids).decode("utf-8", errors="replace")
