from __future__ import annotations

import math
import time

import pytest

from tgi.enums import Phase
from tgi.server.engine.liveness import Liveness


def test_a_running_step_has_its_tokens_time_and_at_least_what_is_set() -> None:
    liveness = Liveness(hung_after_s=2.0)
    liveness.enter(Phase.RUNNING, 7, 0.01)
    assert liveness.read().hung_after_s == 2.0
    liveness.enter(Phase.RUNNING, 8, 1.5)
    assert liveness.read().hung_after_s == 30.0


@pytest.mark.parametrize(("hung_after_s", "beat_s"), [(30.0, 5.0), (2.0, 2.0 / 6), (600.0, 5.0)])
def test_an_idle_loop_beats_often_enough(hung_after_s: float, beat_s: float) -> None:
    liveness = Liveness(hung_after_s)
    liveness.enter(Phase.IDLE)
    assert liveness.beat_s == beat_s
    assert liveness.read().hung_after_s == hung_after_s


def test_what_legitimately_takes_long_has_half_an_hour() -> None:
    liveness = Liveness(hung_after_s=2.0)
    assert liveness.read().hung_after_s == 1800
    liveness.enter(Phase.COMPILING)
    assert liveness.read().hung_after_s == 1800


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.RUNNING])
def test_a_follower_is_never_hung_by_itself(phase: Phase) -> None:
    """On a GPU it only knows how long a launch takes, and a launch waits for the steps before it."""
    liveness = Liveness(hung_after_s=2.0)
    liveness.follow(phase, 7)
    assert liveness.read().hung_after_s == math.inf
    liveness.follow(Phase.IDLE)
    assert liveness.read().step == 7


def test_what_is_compiled_in_the_midst_of_a_step_is_not_the_steps_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    liveness = Liveness(hung_after_s=2.0)
    liveness.enter(Phase.RUNNING, 7)
    liveness.compiling()
    liveness.compiling()  # what the one calls is compiled first
    liveness.compiled()
    now = 200.0
    assert (liveness.read().phase, liveness.read().step) == (Phase.COMPILING, 7)
    assert not liveness.read().is_hung
    liveness.compiled()
    assert (liveness.read().phase, liveness.read().since_s) == (Phase.RUNNING, 0.0)
    now = 203.0
    assert liveness.read().is_hung


def test_a_compilation_whose_end_is_not_told_lasts_until_the_next_word() -> None:
    liveness = Liveness()
    liveness.enter(Phase.RUNNING, 7)
    liveness.compiling()
    liveness.enter(Phase.RUNNING, 8)
    assert liveness.read().phase == Phase.RUNNING
    liveness.compiled()
    liveness.compiling()
    assert liveness.read().phase == Phase.COMPILING
    liveness.compiled()
    assert (liveness.read().phase, liveness.read().step) == (Phase.RUNNING, 8)
