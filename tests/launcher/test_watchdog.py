"""When a rank counts as hung or dead."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launcher.fake_programs import TIMEOUT_S
from tgi.enums import Phase
from tgi.launcher.watchdog import Judge, RankWatch
from tgi.shard_client.messages import Health

WELL = Health(Phase.RUNNING, 411, 0.1, 2.0, finished=7)
HUNG = Health(Phase.RUNNING, 412, 2.1, 2.0, finished=7)


def judge() -> Judge:
    return Judge("shard 0", timeout_s=10.0)


def test_hung_twice_in_a_row() -> None:
    watched = judge()
    assert watched.answered(HUNG) is None, "after a pause of the machine a well rank looks so for a moment"
    assert watched.answered(WELL) is None
    assert watched.answered(HUNG) is None
    assert watched.is_suspicious
    assert watched.answered(HUNG) == "shard 0 hung: step 412 has run for 2.1 s (limit 2 s)"


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (Phase.IDLE, "its idle beat has been missing for 1801.0 s (limit 1800 s)"),
        (Phase.STARTING, "it has been starting for 1801.0 s (limit 1800 s)"),
        (Phase.CAPTURING, "it has been capturing for 1801.0 s (limit 1800 s)"),
    ],
)
def test_what_it_hung_in(phase: Phase, words: str) -> None:
    watched = judge()
    hung = Health(phase, 0, 1801.0, 1800.0)
    assert (watched.answered(hung), watched.answered(hung)) == (None, f"shard 0 hung: {words}")


def test_one_that_says_it_failed_may_end_by_itself() -> None:
    watched = judge()
    for since_s in (0.0, 1.0, 9.9):
        assert watched.answered(Health(Phase.FAILED, 3, since_s, 0.0)) is None
        assert not watched.is_suspicious
    stuck = Health(Phase.FAILED, 3, 10.5, 0.0)
    assert (watched.answered(stuck), watched.answered(stuck)) == (
        None,
        "shard 0 hung: it has been failed for 10.5 s (limit 0 s)",
    )


def test_silence_counts_from_the_first_question() -> None:
    watched = judge()
    watched.answered(WELL)
    assert watched.unanswered(asked_at=100.0, now=100.1) is None
    assert watched.unanswered(asked_at=101.0, now=109.9) is None
    assert watched.unanswered(asked_at=109.9, now=110.0) is None, "once more, to be sure"
    told = watched.unanswered(asked_at=110.0, now=110.2)
    assert told == "shard 0 is silent: Health unanswered for 10.2 s (limit 10 s)"


def test_a_launcher_that_was_stopped_itself_blames_nobody() -> None:
    watched = judge()
    watched.answered(WELL)
    assert watched.unanswered(asked_at=100.0, now=4000.0) is None
    assert watched.answered(WELL) is None
    assert not watched.is_suspicious


@given(st.lists(st.tuples(st.sampled_from(["well", "hung", "silent", "slow"]), st.floats(0.0, 30.0)), max_size=40))
def test_never_at_the_first_sign_and_never_before_the_first_answer(signs: list[tuple[str, float]]) -> None:
    watched, now, answered, last_bad = judge(), 0.0, False, False
    for sign, seconds in signs:
        asked_at, now = now, now + seconds
        if sign in ("well", "hung"):
            verdict = watched.answered(WELL if sign == "well" else HUNG)
            answered = True
        else:
            verdict = watched.unanswered(asked_at, now)
        assert verdict is None or (answered and last_bad and sign != "well")
        if verdict is not None:
            return
        last_bad = sign != "well"


def test_it_can_be_stopped_before_there_is_a_socket(tmp_path: Path) -> None:
    before = threading.active_count()
    watch = RankWatch("shard 0", tmp_path / "nobody", 10.0, lambda: None)
    watch.stop()
    watch.join(TIMEOUT_S)
    assert threading.active_count() == before
    assert not watch.is_ready
    assert watch.verdict is None
