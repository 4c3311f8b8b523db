"""Runs a compiled worker on torch's own OpenMP threads, so that our kernels and torch's never fight for the cores.

numba's parallel loops bring a second pool: its workers and torch's then spin or sleep against each other, and where no
system libgomp exists a wake-up costs 170 µs. Entering the libgomp that torch has loaded costs 2 µs.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic

logger = logging.getLogger(__name__)

# A worker gets the address of its int64 arguments. Words 0 to 2 belong to this module.
NEXT_ITEM, NUM_ITEMS, NEXT_THREAD, FIRST_ARGUMENT = range(4)

_SIGNATURE = types.void(types.int64)


def worker(function: Callable[[int], None]) -> Callable[[], int]:
    """Decorator: a function of the arguments' address -> a getter of its machine code's address, which compiles at the
    first call (or reads the code from numba's cache).

    The worker takes items by `atomic_add` on NEXT_ITEM until NUM_ITEMS. It must not allocate or raise: it runs without
    the GIL, on threads that Python does not know.
    """
    compiled: list[Any] = []

    def address() -> int:
        if not compiled:
            compiled.append(_compile(function))
        return compiled[0].address

    return address


def _compile(function: Callable[[int], None]) -> Any:
    # numba's cache notices a change of the function's own file only; its building blocks live in other files.
    function.__qualname__ = f"{function.__qualname__}_{_fingerprint():08x}"
    options = {"nopython": True, "error_model": "numpy"}
    try:
        return cfunc(_SIGNATURE, cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        logger.warning("CPU kernels are compiled anew at each start: set NUMBA_CACHE_DIR to a writable directory")
        return cfunc(_SIGNATURE, **options)(function)


@functools.cache
def _fingerprint() -> int:
    """Of the source of all kernels."""
    room = Path(__file__).parent
    sources = [*sorted(room.glob("*.py")), *sorted(room.parent.glob("*.py"))]
    return functools.reduce(lambda crc, path: zlib.crc32(path.read_bytes(), crc), sources, 0)


def _find_gomp_parallel() -> Any:
    """GOMP_parallel of the library that torch loaded for the whole process; None where torch threads otherwise."""
    if not torch.backends.openmp.is_available():
        return None
    enter = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if enter is None:
        logger.info("CPU kernels run on one thread: torch's OpenMP library has no GOMP_parallel")
        return None
    enter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return enter


_gomp_parallel = _find_gomp_parallel()
_call_alone = functools.cache(ctypes.CFUNCTYPE(None, ctypes.c_int64))  # address -> function that releases the GIL


def max_threads() -> int:
    """Threads that `run` uses at most: torch's number, so that the shared pool never changes its size."""
    return torch.get_num_threads() if _gomp_parallel is not None else 1


def run(worker_address: int, arguments_address: int, alone: bool, max_workers: int | None = None) -> None:
    """Run the worker to the end on all threads, or on the calling thread alone where the work is too small to share.

    The caller has set NEXT_ITEM and NEXT_THREAD to 0 and NUM_ITEMS; other Python threads run meanwhile. `max_workers`:
    for how many the caller has scratch memory, where that matters.
    """
    threads = 1 if alone else max_threads()
    if max_workers is not None:
        threads = min(threads, max_workers)
    if threads > 1:
        _gomp_parallel(worker_address, arguments_address, threads, 0)
    else:
        _call_alone(worker_address)(arguments_address)


def _atomic_add(typingctx, address, value):
    """Add to the int64 at `address`; returns what was there. Sequentially consistent."""
    del typingctx, address, value

    def emit(context, builder, signature, arguments):
        del context, signature
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


atomic_add: Any = intrinsic(_atomic_add)
