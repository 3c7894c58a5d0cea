"""The pool that twins share their work among, and how many threads there are."""

import functools
import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gru_ref import threads


@given(n=st.integers(0, 200), unit=st.integers(1, 50), cost=st.floats(0, 1e5), count=st.integers(1, 5))
def test_parts_cover_the_range_once_and_begin_at_multiples_of_the_unit(n, unit, cost, count):
    parts = []
    with threads.limited(count):
        threads.share(lambda start, end: parts.append((start, end)), n, unit=unit, cost=cost)
    parts.sort()
    assert parts[0][0] == 0
    assert parts[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
    assert all(start % unit == 0 for start, _ in parts)
    assert len(parts) <= count


def test_parts_run_at_the_same_time():
    together = threading.Barrier(2, timeout=20)
    with threads.limited(2):
        threads.share(lambda start, end: together.wait(), 2)


def test_what_is_too_little_for_a_second_thread_stays_in_the_first_unless_others_are_awake():
    used = []

    def note(start, end):
        used.append(threading.get_ident())

    with threads.limited(2):
        threads.share(note, 100, cost=1000)
        assert used == [threading.get_ident()]
        with threads.at_once():
            threads.share(note, 100, cost=1000)
            assert len(used) == 1
        assert len(set(used[1:])) == 2


def test_what_is_shared_at_once_runs_in_one_go():
    together, results = threading.Barrier(2, timeout=20), np.zeros((2, 10))

    def part(row, start, end):
        results[row, start:end] += np.arange(start, end)

    def first_of_one_last_of_the_other(row, start, end):
        if (row == 0) == (start == 0):
            together.wait()  # only met where thread 1 goes on to the second without waiting for thread 2
        part(row, start, end)

    with threads.limited(2), threads.at_once():
        for row in range(2):
            threads.share(functools.partial(first_of_one_last_of_the_other, row), 10)
    assert np.array_equal(results, [np.arange(10)] * 2)
    with threads.limited(2), pytest.raises(ZeroDivisionError), threads.at_once():
        threads.share(lambda start, end: 1 // start, 2)


def test_where_the_block_fails_nothing_of_it_begins():
    begun = []

    def fails():
        with threads.at_once():
            threads.share(lambda start, end: begun.append(start), 10)
            raise KeyError

    with threads.limited(2), pytest.raises(KeyError):
        fails()
    assert begun == []
    threads.share(lambda start, end: begun.append(start), 10, cost=0)
    assert begun == [0]


def test_a_parts_exception_is_raised_after_the_others_are_done():
    done = []

    def part(start, end):
        if start:
            raise ZeroDivisionError("of the second part")
        done.append(start)

    with threads.limited(2), pytest.raises(ZeroDivisionError, match="of the second part"):
        threads.share(part, 2)
    assert done == [0]
    with threads.limited(2):  # and the pool works on
        threads.share(lambda start, end: done.append(start), 2)
    assert sorted(done) == [0, 0, 1]


def test_sharing_within_a_part_and_from_two_threads_at_once_does_all_the_work():
    total = np.zeros(40)

    def inner(start, end):
        total[start:end] += 1

    def outer(start, end):
        threads.share(lambda a, b: inner(start + a, start + b), end - start)

    with threads.limited(2):
        callers = [threading.Thread(target=lambda: threads.share(outer, 40)) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert total.tolist() == [4.0] * 40


def test_blas_has_one_thread_within_and_as_many_as_before_afterwards():
    def blas():
        return [library.num_threads for library in threads._blas()]

    with threads.limited(2, pool=False):
        before = blas()
        with threads.one_blas_thread():
            with threads.one_blas_thread():
                assert blas() == [1] * len(before)
            assert blas() == [1] * len(before)
        assert blas() == before
    with threads.limited(2):
        assert blas() == [1] * len(before)
        assert threads.count() == 2


def test_a_forked_child_shares_too():
    script = (
        "import os\nfrom gru_ref import threads\n"
        "with threads.limited(2):\n"
        "    threads.share(lambda a, b: None, 2)\n"
        "    child = os.fork()\n"
        "    done = []\n"
        "    threads.share(lambda a, b: done.append(a), 2)\n"
        "    assert sorted(done) == [0, 1]\n"
        "    if child == 0: os._exit(7)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("limit", "cores"), [("150000 100000", 2), ("100000 100000", 1), ("20000 100000", 1), ("max 100000", 8)]
)
def test_a_control_groups_quota_limits_the_cores(limit, cores, monkeypatch, tmp_path):
    """E05: under a quota of 1.5 cores two threads are useful, and eight are not."""
    (tmp_path / "cpu.max").write_text(limit + "\n")
    monkeypatch.setattr(threads, "_quota", lambda: threads._quota_of(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads.available_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("250000", 3), ("-1", 8)])
def test_the_first_version_of_control_groups_is_read_too(quota, cores, monkeypatch, tmp_path):
    (tmp_path / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu.cfs_period_us").write_text("100000")
    monkeypatch.setattr(threads, "_quota", lambda: threads._quota_of(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert threads.available_cores() == cores


def test_affinity_limits_the_cores():
    script = "import os; from gru_ref import threads as t; "
    script += "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    script += "print(t.available_cores())"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "1"
