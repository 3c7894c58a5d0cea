"""Text pieces to token ids in several processes, in the order of the pieces. Not here: reading and writing.

A process is a fresh interpreter (no fork: threads and locks of this one stay out of it) that gets the
tokenizer once and then batches of pieces. Which process encodes a batch changes nothing in it.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

import numpy as np

from gru_ref.data.tokenizers import Tokenizer
from gru_ref.errors import DataError, RunError
from gru_ref.types import Array

Batch: TypeAlias = list[bytes | None]
"""Pieces of text; None is a document separator."""


def encode_batch(tokenizer: Tokenizer, batch: Batch) -> Array:
    """The token ids of the pieces, one after another."""
    if None in batch and tokenizer.separator_id is None:
        raise DataError(f"tokenizer '{tokenizer.name}' has no token to put between documents; give one only")
    separator = np.array([tokenizer.separator_id or 0], tokenizer.dtype)
    if len(batch) == 1 and batch[0] is not None:
        return tokenizer.encode(batch[0])  # without a copy
    return np.concatenate([separator if piece is None else tokenizer.encode(piece) for piece in batch])


def encode_batches(
    tokenizer: Tokenizer, batches: Iterable[tuple[Batch, int]], workers: int
) -> Iterator[tuple[Array, int]]:
    """`encode_batch` of each, with the number that came along; with 1 worker in this process.

    At most two batches a worker wait or are worked on. Raises RunError where a process dies.
    """
    if workers == 1:
        for batch, number in batches:
            yield encode_batch(tokenizer, batch), number
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (tokenizer,))
    waiting: deque[tuple[Future[Array], int]] = deque()
    try:
        for batch, number in batches:
            with _signals_held():
                waiting.append((pool.submit(_encode, batch), number))
            if len(waiting) == 2 * workers:
                yield _result(waiting)
        while waiting:
            yield _result(waiting)
    except BrokenProcessPool:
        raise RunError(
            "a process that encodes text died, perhaps for lack of memory; try fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _result(waiting: deque[tuple[Future[Array], int]]) -> tuple[Array, int]:
    future, number = waiting.popleft()
    return future.result(), number


_ENDING = {signal.SIGTERM, signal.SIGHUP}


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """No signal may interrupt this process while it starts another one, which `submit` does.

    The other inherits that, and never sees Ctrl-C, which a terminal sends to all: this process ends them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# In the processes ------------------------------------------------------------------------------------------

_tokenizer: Tokenizer


def _start(tokenizer: Tokenizer) -> None:
    global _tokenizer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _tokenizer = tokenizer


def _end_with_parent() -> None:
    """A parent that was killed could not say that no more work comes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(batch: Batch) -> Array:
    return encode_batch(_tokenizer, batch)
