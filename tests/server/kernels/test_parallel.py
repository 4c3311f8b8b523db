"""Workers on torch's threads: every item once, whatever the number of threads, and with no place for a cache."""

from __future__ import annotations

import logging

import numba
import numpy as np
import pytest

from tgi.server.kernels.cpu import parallel
from tgi.server.kernels.cpu.parallel import FIRST_ARGUMENT, NEXT_ITEM, NEXT_THREAD, NUM_ITEMS, atomic_add, run, worker


@worker
def count_items(arguments):
    atomic_add(arguments + 8 * NEXT_THREAD, 1)
    while True:
        item = atomic_add(arguments + 8 * NEXT_ITEM, 1)
        if item >= atomic_add(arguments + 8 * NUM_ITEMS, 0):
            return
        atomic_add(arguments + 8 * (FIRST_ARGUMENT + item), 1)


def words_for(num_items: int) -> np.ndarray:
    words = np.zeros(FIRST_ARGUMENT + num_items, np.int64)
    words[NUM_ITEMS] = num_items
    return words


@pytest.mark.parametrize("num_items", [0, 1, 1000])
@pytest.mark.parametrize("alone", [False, True])
def test_every_item_is_taken_once(num_items, alone):
    words = words_for(num_items)
    run(count_items(), words.ctypes.data, alone)
    assert (words[FIRST_ARGUMENT:] == 1).all()
    assert words[NEXT_THREAD] == (1 if alone else parallel.max_threads())


def test_no_more_threads_than_the_caller_has_room_for():
    words = words_for(10)
    run(count_items(), words.ctypes.data, alone=False, max_workers=1)
    assert words[NEXT_THREAD] == 1


def test_torchs_own_threads_are_found():
    """Without them every kernel runs on one thread: correct, slow, and easily overlooked."""
    assert parallel._gomp_parallel is not None


def test_without_a_place_for_its_cache_a_worker_is_compiled_and_says_so(monkeypatch, caplog):
    def cfunc(signature, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return numba.cfunc(signature, **options)

    def nothing(arguments):
        pass

    monkeypatch.setattr(parallel, "cfunc", cfunc)
    with caplog.at_level(logging.WARNING):
        address = worker(nothing)()
    run(address, words_for(0).ctypes.data, alone=True)
    assert [record.getMessage() for record in caplog.records] == [
        "CPU kernels are compiled anew at each start: set NUMBA_CACHE_DIR to a writable directory"
    ]


def test_a_compile_error_is_not_taken_for_a_missing_cache(monkeypatch):
    def cfunc(*args, **options):
        raise RuntimeError("broken")

    monkeypatch.setattr(parallel, "cfunc", cfunc)
    with pytest.raises(RuntimeError, match="broken"):
        worker(lambda arguments: None)()
