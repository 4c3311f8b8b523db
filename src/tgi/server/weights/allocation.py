"""How memory is allocated while a model loads, with the C library of Linux. Knows no tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
_LARGE_BYTES = 1 << 20
# Where the library's own adjustment ends up after a while of tensors that come and go.
_USUAL_BYTES = 32 << 20


@contextmanager
def apart() -> Iterator[None]:
    """Large blocks go back to the system as soon as they are freed.

    Else each weight that is laid out anew leaves a hole of its size in the heap, which hardly another one fits: a fifth
    of a small model's size. A running model takes large blocks again and again, and is quicker when it keeps them.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is None:
        yield
        return
    adjust(_MMAP_THRESHOLD, _LARGE_BYTES)
    try:
        yield
    finally:
        adjust(_MMAP_THRESHOLD, _USUAL_BYTES)
        adjust(_TRIM_THRESHOLD, 2 * _USUAL_BYTES)
