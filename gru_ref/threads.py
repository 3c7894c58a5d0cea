"""Who uses the cores, and when: the one policy.

    definitions      call NumPy, whose BLAS has `count()` threads of its own
    compiled twins   share their rows among `count()` threads of the pool below, the caller being one of them;
                     meanwhile BLAS is held to one thread, that of its caller

So the cores are never asked for twice: idle BLAS threads watch for work for a while and would take the cores
from a kernel. A run with twins holds BLAS to one thread throughout (`limited`). No sum is divided among a
twin's threads, but BLAS may sum the products of other sizes in another order, so results are the same to the
bit for the same number of threads.

The pool is made of plain Python threads: kernels and BLAS release the interpreter's lock while they run.
"""

import contextlib
import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from threadpoolctl import ThreadpoolController, threadpool_limits

_WORTH_ALONE = 70_000.0
"""Nanoseconds of work that a second thread is worth waking up for: that takes about as long (measured)."""
_WORTH_AMONG_OTHERS = 5_000.0
"""The same where it is awake for other work."""
_count = 0  # 0: not asked for yet
_inside = 0  # callers that hold BLAS to one thread
_before: list[int] = []  # its libraries' numbers of threads outside
_blas_lock = threading.Lock()
_lock = threading.Lock()
_workers: list["_Worker"] = []


def available_cores() -> int:
    """The cores that this process may use: its affinity, and its group's quota of time, rounded up.

    Where the system cannot tell the affinity (macOS) it is every core.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def count() -> int:
    """The number of threads that twins share their work among."""
    global _count
    _count = _count or available_cores()
    return _count


@contextlib.contextmanager
def limited(threads: int, *, pool: bool = True) -> Iterator[None]:
    """Within it, twins use this many threads, 0 for all cores, and BLAS one.

    pool: whether twins do the work; where they do not, BLAS has as many threads instead.
    """
    global _count
    before, _count = _count, threads or available_cores()
    try:
        with threadpool_limits(1 if pool else _count, user_api="blas"):
            yield
    finally:
        _count = before


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it, BLAS has one thread; several may be within it at once, and the last to leave restores."""
    global _inside
    with _blas_lock:
        _inside += 1
        if _inside == 1:
            _before[:] = [library.num_threads for library in _blas()]
            for library, n in zip(_blas(), _before, strict=True):
                if n != 1:
                    library.set_num_threads(1)
    try:
        yield
    finally:
        with _blas_lock:
            _inside -= 1
            if not _inside:
                for library, n in zip(_blas(), _before, strict=True):
                    if n != 1:
                        library.set_num_threads(n)


@functools.cache
def _blas() -> list[Any]:
    return list(ThreadpoolController().select(user_api="blas").lib_controllers)


def share(function: Callable[[int, int], Any], n: int, *, unit: int = 1, cost: float = math.inf) -> None:
    """Call function(start, stop) for parts of range(n), at the same time, and wait for all of them.

    Parts begin at multiples of `unit`. cost: nanoseconds that an element takes, roughly; where that makes too
    little work for another thread, there are fewer parts. A part's exception is raised here, after the others
    are done. A call from within a part, or while another thread shares, does its work alone.
    """
    least = _WORTH_ALONE if _local.waiting is None else _WORTH_AMONG_OTHERS
    parts = max(1, int(min(count(), n, n * cost / least if n else 1)))
    per_part = max(1, -(-n // (parts * unit))) * unit
    calls = [(function, start, min(start + per_part, n)) for start in range(0, max(n, 1), per_part)]
    if _local.waiting is None:
        _run([calls])
    else:
        _local.waiting.append(calls)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """What is shared within it begins when it ends, as one: no thread waits for another in between.

    So nothing within it may read what another share within it writes.
    """
    waiting: list[list[_Call]] = []
    _local.waiting = waiting
    try:
        yield
    finally:
        _local.waiting = None
    with one_blas_thread():
        _run(waiting)


_Call = tuple[Callable[[int, int], Any], int, int]
_Errors = SimpleQueue[BaseException | None]


class _Local(threading.local):
    waiting: list[list[_Call]] | None = None
    """What this thread has shared within `at_once`."""


_local = _Local()


def _run(shared: list[list[_Call]]) -> None:
    """Every call: the first parts of all that is shared here, the second parts in another thread, …"""
    by_thread = [[call for call in calls if call] for calls in itertools.zip_longest(*shared)]
    if len(by_thread) <= 1 or not _lock.acquire(blocking=False):
        errors = [_attempt(calls) for calls in by_thread]
    else:
        try:
            while len(_workers) < len(by_thread) - 1:
                _workers.append(_Worker())
            done: _Errors = SimpleQueue()  # of this call: one that Ctrl-C ended leaves nothing for the next
            for worker, calls in zip(_workers, by_thread[1:], strict=False):
                worker.todo.put((calls, done))
            errors = [_attempt(by_thread[0])] + [done.get() for _ in by_thread[1:]]
        finally:
            _lock.release()
    for error in errors:
        if error is not None:
            raise error


def _attempt(calls: list[_Call]) -> BaseException | None:
    try:
        for function, start, stop in calls:
            function(start, stop)
    except BaseException as error:  # noqa: BLE001 (handed to the thread that shares, which raises it)
        return error
    return None


class _Worker(threading.Thread):
    """A thread that waits for parts; a daemon, so that it never keeps a process alive."""

    def __init__(self) -> None:
        super().__init__(name="gru-ref worker", daemon=True)
        self.todo: SimpleQueue[tuple[list[_Call], _Errors]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            calls, done = self.todo.get()
            done.put(_attempt(calls))
            del calls  # and the arrays that they hold, while nothing is to be done


def _forget_workers() -> None:
    """After a fork the child has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _workers.clear()


os.register_at_fork(after_in_child=_forget_workers)


def _quota() -> float:
    """The cores' worth of time that Linux's control groups grant this process; infinity for no limit.

    Version 2: cpu.max has 'quota period' or 'max period', in every group on the way up. Version 1:
    cpu.cfs_quota_us, −1 for none, and cpu.cfs_period_us.
    """
    root = Path("/sys/fs/cgroup")
    quota = math.inf
    with contextlib.suppress(OSError, ValueError):  # no control groups, or none that can be read
        for line in Path("/proc/self/cgroup").read_text("ascii").splitlines():
            number, controllers, name = line.split(":", 2)
            base = root if number == "0" else root / "cpu"
            if number != "0" and "cpu" not in controllers.split(","):
                continue
            group = base / name.lstrip("/")
            for folder in (group, *group.parents):
                quota = min(quota, _quota_of(folder))
                if folder == base:
                    break
    return quota


def _quota_of(folder: Path) -> float:
    with contextlib.suppress(OSError, ValueError):  # the root group has no such files
        limit, period = (folder / "cpu.max").read_text("ascii").split()
        return math.inf if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit, period = ((folder / f"cpu.cfs_{what}_us").read_text("ascii") for what in ("quota", "period"))
        return math.inf if int(limit) < 0 else int(limit) / int(period)
    return math.inf
