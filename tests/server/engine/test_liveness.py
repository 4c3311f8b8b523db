from __future__ import annotations

import math

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


def test_a_follower_that_waits_is_never_hung() -> None:
    liveness = Liveness(hung_after_s=2.0)
    liveness.wait()
    assert liveness.read().hung_after_s == math.inf
