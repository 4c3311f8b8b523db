from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from numba import njit
from numba.core import event

from tgi.enums import Phase
from tgi.server.engine.compiling import watch_compilers
from tgi.server.engine.liveness import Liveness


class Noted(Liveness):
    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def compiling(self) -> None:
        super().compiling()
        self.phases.append(self.read().phase)

    def compiled(self) -> None:
        super().compiled()
        self.phases.append(self.read().phase)


@pytest.fixture
def liveness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    listeners: list[event.Listener] = []
    register = event.register

    def noting(kind: str, listener: event.Listener) -> None:
        if kind == "numba:compile":
            listeners.append(listener)
        register(kind, listener)

    monkeypatch.setattr(event, "register", noting)
    noted = Noted()
    noted.enter(Phase.RUNNING, 7)
    yield noted
    for listener in listeners:
        event.unregister("numba:compile", listener)


def fresh() -> Callable[[int], int]:
    return njit(lambda number: number + 1)


def test_numba_says_when_it_compiles(liveness: Noted) -> None:
    watch_compilers(liveness, "cpu")
    kernel = fresh()
    assert kernel(1) == 2
    assert liveness.phases == [Phase.COMPILING, Phase.RUNNING]
    assert kernel(2) == 3
    assert len(liveness.phases) == 2


def test_what_another_thread_compiles_holds_up_no_step(liveness: Noted) -> None:
    watch_compilers(liveness, "cpu")
    thread = threading.Thread(target=lambda: fresh()(1))
    thread.start()
    thread.join()
    assert not liveness.phases


@pytest.mark.gpu  # where triton is
def test_triton_says_when_it_compiles(liveness: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs  # pyright: ignore[reportMissingImports]

    asked: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **details: asked.append(details["key"]))
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", None)
    watch_compilers(liveness, "cuda")
    assert not knobs.runtime.jit_cache_hook(key="a kernel")
    assert not knobs.runtime.jit_post_compile_hook(key="a kernel")
    assert liveness.phases == [Phase.COMPILING, Phase.RUNNING]
    assert asked == ["a kernel"]
