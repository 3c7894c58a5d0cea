"""What a training step sees: windows of T tokens and the token after each. Not here: reading text.

Of n tokens x[0…n−1], window i of K = ceil((n−1)/T) has

    inputs  x[iT], …, x[iT+T−1]        targets  x[iT+1], …, x[iT+T]

so every token but the first is a target exactly once an epoch. The last window may be partial: where there
is no target left, the input is 0 and the target IGNORE.

A run's windows are one endless sequence, and a *cursor* counts how many of it were used. The sequence depends
on (n, T, seed) alone, never on the batch size, so a resumed run that changes its batch size neither skips nor
repeats a window.

Two orders:
  shuffled  epoch e visits the K windows in the order of a random permutation that (seed, e) names.
  lanes     truncated backpropagation through time with L lanes: the windows in text order are cut into L
            lanes of W = ceil(K/L) consecutive ones, step s of an epoch takes window s of every lane, and the
            state is carried from step to step and zeroed where an epoch starts. Index −1 stands for a window
            beyond the end: input 0 and target IGNORE throughout.
"""

import numpy as np

from gru_ref import random
from gru_ref.errors import DataError
from gru_ref.ops.cross_entropy import IGNORE
from gru_ref.types import Array


def _gather(tokens: Array, seq_len: int, indices: Array) -> tuple[Array, Array]:
    """Inputs and targets of the windows `indices`: each (T, B) int64, time-major."""
    positions = np.arange(seq_len)[:, None] + seq_len * indices[None, :]
    counted = (indices >= 0) & (positions < len(tokens) - 1)
    safe = np.where(counted, positions, 0)
    inputs = np.where(counted, tokens[safe].astype(np.int64), 0)
    targets = np.where(counted, tokens[safe + 1].astype(np.int64), IGNORE)  # uint8 has no −1
    return inputs, targets


class Windows:
    """The windows of a training text, in the order of the module's docstring.

    Arguments:
        tokens   (n,) integers, n ≥ T+1
        seq_len  T
        seed     of the order
        lanes    None for the shuffled order, or the number of lanes L (the batch size)

    `len(windows)` is K; `per_epoch` is how far the cursor moves in an epoch: K, or W·L with lanes, which
    counts the windows beyond the end too. Raises DataError for a text that is too short.
    """

    def __init__(self, tokens: Array, seq_len: int, *, seed: int, lanes: int | None = None) -> None:
        if len(tokens) < seq_len + 1:
            raise DataError(
                f"the text has {len(tokens)} tokens, needs at least T+1 = {seq_len + 1}; "
                "use a shorter --seq-len or more text"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.lanes = lanes
        self._count = -(-(len(tokens) - 1) // seq_len)
        self.per_epoch = self._count if lanes is None else -(-self._count // lanes) * lanes
        self._order: tuple[int, Array] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        return self._count

    def epoch(self, cursor: int) -> int:
        """The epoch, from 0, of the window that `cursor` names."""
        return cursor // self.per_epoch

    def starts_epoch(self, cursor: int) -> bool:
        """Whether an epoch starts here: with lanes, the carried state must be zeroed."""
        return cursor % self.per_epoch == 0

    def indices(self, cursor: int, count: int) -> Array:
        """Windows number cursor…cursor+count−1 of the endless sequence: (count,) int64.

        With lanes, count must be L and the cursor a multiple of it: raises DataError otherwise.
        """
        if self.lanes is not None:
            return self._lane_indices(cursor, count)
        pieces = []
        while count > 0:
            epoch, start = divmod(cursor, self.per_epoch)
            piece = self._permutation(epoch)[start : start + count]
            pieces.append(piece)
            cursor, count = cursor + len(piece), count - len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def batch(self, indices: Array) -> tuple[Array, Array]:
        """Inputs and targets of these windows: each (T, B) int64, time-major."""
        return _gather(self.tokens, self.seq_len, indices)

    def _lane_indices(self, cursor: int, count: int) -> Array:
        if count != self.lanes or cursor % count:
            raise DataError(
                f"a carried state has {self.lanes} lanes: it cannot take {count} windows from {cursor} on; "
                "keep train.batch_size as it was"
            )
        width = self.per_epoch // count
        step = cursor % self.per_epoch // count
        windows = np.arange(count, dtype=np.int64) * width + step
        return np.where(windows < self._count, windows, -1)

    def _permutation(self, epoch: int) -> Array:
        if self._order[0] != epoch:
            order = random.permutation(self._count, seed=self.seed, stream=random.DATA_ORDER, step=epoch)
            self._order = (epoch, order)
        return self._order[1]
