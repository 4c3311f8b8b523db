"""Kernels that are compiled when they are first used, perhaps long after warm-up: while that lasts the liveness word
says so. Knows how the compilers tell, not what they compile."""

from __future__ import annotations

import threading
from typing import Any

from tgi.server.engine.liveness import Liveness


def watch_compilers(liveness: Liveness, device_type: str) -> None:
    """To be called once, by the thread that owns the device. What other threads compile holds up no step."""
    if device_type == "cuda":
        _watch_triton(liveness, threading.get_ident())
    else:
        _watch_numba(liveness, threading.get_ident())


def _watch_numba(liveness: Liveness, thread: int) -> None:
    from numba.core import event

    class Told(event.Listener):
        def on_start(self, event: object) -> None:
            if threading.get_ident() == thread:
                liveness.compiling()

        def on_end(self, event: object) -> None:
            if threading.get_ident() == thread:
                liveness.compiled()

    event.register("numba:compile", Told())


def _watch_triton(liveness: Liveness, thread: int) -> None:
    from triton import knobs  # pyright: ignore[reportMissingImports]  (comes with torch for CUDA)

    before, after = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook

    def begins(**details: Any) -> bool | None:
        if threading.get_ident() == thread:
            liveness.compiling()
        return None if before is None else before(**details)

    def has_ended(**details: Any) -> bool | None:
        if threading.get_ident() == thread:
            liveness.compiled()
        return None if after is None else after(**details)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.jit_post_compile_hook = has_ended
