"""Windows: every token is a target once an epoch, in an order that only the cursor decides."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gru_ref import random
from gru_ref.data.windows import Windows
from gru_ref.errors import DataError
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.types import Array

T = 8


def text(n: int) -> Array:
    """n distinct tokens, none of them 0: a token's value tells its position."""
    return np.arange(1, n + 1, dtype=np.uint16)


def counted(targets: Array) -> list[int]:
    return sorted(targets[targets != IGNORE].tolist())


@pytest.mark.parametrize("n", [0, 1, T - 1, T])
def test_text_shorter_than_a_window_is_refused(n: int) -> None:
    """D01: the message says what there is and what is needed."""
    with pytest.raises(DataError, match=rf"has {n} tokens, needs at least T\+1 = 9"):
        Windows(text(n), T, seed=1)


def test_one_token_more_than_a_window_is_exactly_one_window() -> None:
    """D01: n = T+1."""
    windows = Windows(text(T + 1), T, seed=1)
    inputs, targets = windows.batch(windows.indices(0, 1))
    assert len(windows) == 1
    assert inputs[:, 0].tolist() == list(range(1, T + 1))
    assert targets[:, 0].tolist() == list(range(2, T + 2))


def test_two_windows_and_one_token() -> None:
    """D01: n = 2T+1 is two whole windows, nothing masked."""
    windows = Windows(text(2 * T + 1), T, seed=1)
    inputs, targets = windows.batch(np.arange(2))
    assert len(windows) == 2
    np.testing.assert_array_equal(inputs.T.ravel(), np.arange(1, 2 * T + 1))
    np.testing.assert_array_equal(targets, inputs + 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_a_partial_window_is_padded_and_masked(dtype: type) -> None:
    """IGNORE survives token types that have no −1."""
    windows = Windows(text(T + 4).astype(dtype), T, seed=1)
    inputs, targets = windows.batch(np.array([1]))
    assert len(windows) == 2
    assert inputs[:, 0].tolist() == [9, 10, 11, 0, 0, 0, 0, 0]
    assert targets[:, 0].tolist() == [10, 11, 12, -1, -1, -1, -1, -1]


def test_batches_are_time_major_integers_for_every_token_type() -> None:
    for dtype in (np.uint8, np.uint16):
        windows = Windows(np.full(20, 255, dtype), T, seed=1)
        inputs, targets = windows.batch(np.array([0, 1]))
        assert inputs.shape == targets.shape == (T, 2)
        assert inputs.dtype == targets.dtype == np.int64
        assert inputs.max() == targets.max() == 255


@given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 3), st.integers(1, 7))
def test_every_token_but_the_first_is_a_target_once_an_epoch(
    seq_len: int, extra: int, seed: int, batch: int
) -> None:
    n = seq_len + 1 + extra
    windows = Windows(text(n), seq_len, seed=seed)
    seen = []
    for cursor in range(0, len(windows), batch):
        inputs, targets = windows.batch(windows.indices(cursor, min(batch, len(windows) - cursor)))
        mask = targets != IGNORE
        np.testing.assert_array_equal(targets[mask], inputs[mask] + 1)
        assert not inputs[~mask].any()
        seen += counted(targets)
    assert sorted(seen) == list(range(2, n + 1))


def test_an_epoch_is_the_permutation_that_seed_and_epoch_name() -> None:
    windows = Windows(text(10 * T + 1), T, seed=7)
    epochs = [windows.indices(10 * e, 10) for e in range(3)]
    for e, order in enumerate(epochs):
        assert sorted(order.tolist()) == list(range(10))
        np.testing.assert_array_equal(order, random.permutation(10, seed=7, stream=random.DATA_ORDER, step=e))
    assert len({tuple(order.tolist()) for order in epochs}) == 3
    assert Windows(text(10 * T + 1), T, seed=8).indices(0, 10).tolist() != epochs[0].tolist()


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 10, 29, 30])
def test_the_sequence_does_not_depend_on_the_batch_size(batch: int) -> None:
    """R02: 3 epochs of 10 windows; a batch that does not divide crosses epochs and loses nothing."""
    windows = Windows(text(10 * T + 1), T, seed=3)
    whole = windows.indices(0, 30)
    pieces = [windows.indices(c, min(batch, 30 - c)) for c in range(0, 30, batch)]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_resuming_anywhere_with_another_batch_size_continues_the_sequence() -> None:
    """R02, R05: a fresh object at every cursor 1…29 neither skips nor repeats."""
    whole = Windows(text(10 * T + 1), T, seed=3).indices(0, 30)
    for cursor in range(1, 30):
        resumed = Windows(text(10 * T + 1), T, seed=3)
        np.testing.assert_array_equal(resumed.indices(cursor, 30 - cursor), whole[cursor:])


def test_epochs_by_cursor() -> None:
    windows = Windows(text(10 * T + 1), T, seed=3)
    assert [windows.epoch(c) for c in (0, 9, 10, 29)] == [0, 0, 1, 2]
    assert [c for c in range(30) if windows.starts_epoch(c)] == [0, 10, 20]
    assert windows.indices(5, 0).shape == (0,)


def test_lanes_are_consecutive_windows_and_masked_beyond_the_end() -> None:
    windows = Windows(text(7 * T + 1), T, seed=1, lanes=3)
    steps = [windows.indices(cursor, 3).tolist() for cursor in range(0, 18, 3)]
    assert steps == [[0, 3, 6], [1, 4, -1], [2, 5, -1]] * 2
    assert [c for c in range(0, 18, 3) if windows.starts_epoch(c)] == [0, 9]
    assert [windows.epoch(c) for c in (0, 6, 9)] == [0, 0, 1]
    inputs, targets = windows.batch(np.array([2, 5, -1]))
    assert not inputs[:, 2].any()
    assert (targets[:, 2] == IGNORE).all()


@given(st.integers(1, 9), st.integers(0, 80), st.integers(1, 9))
def test_lanes_read_on_where_they_stopped_and_cover_every_target_once(
    seq_len: int, extra: int, lanes: int
) -> None:
    n = seq_len + 1 + extra
    windows = Windows(text(n), seq_len, seed=1, lanes=lanes)
    batches = [windows.batch(windows.indices(c, lanes)) for c in range(0, windows.per_epoch, lanes)]
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    for lane in range(lanes):
        real = inputs[:, lane][targets[:, lane] != IGNORE]
        assert (np.diff(real) == 1).all()
    assert counted(targets) == list(range(2, n + 1))


@pytest.mark.parametrize(("cursor", "count"), [(0, 2), (0, 4), (1, 3)])
def test_lanes_refuse_another_batch_size(cursor: int, count: int) -> None:
    with pytest.raises(DataError, match=r"3 lanes.*train\.batch_size"):
        Windows(text(50), T, seed=1, lanes=3).indices(cursor, count)
