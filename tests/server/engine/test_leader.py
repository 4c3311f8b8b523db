from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.distributed.group import SingleRank
from tgi.server.engine import leader as room
from tgi.server.engine.leader import GroupBroken, LeaderDevice, Wire, follow, gather_followers
from tgi.shard_client.messages import Admit, Sampling, Stopping


class RecordingRunner:
    """Keeps what it is told, in order. Stands where a ModelRunner stands."""

    depth = 1
    group = SingleRank()
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.told: list[Any] = []

    def allocate(self, *sizes: int) -> None:
        self.told.append(sizes)

    def apply(self, changes: RowChanges) -> None:
        self.told.append(changes)

    def launch(self, plan: StepPlan) -> None:
        self.told.append(plan)


def plan() -> StepPlan:
    return StepPlan(
        number=2**40,
        handles=np.array([2**64 - 1, 5], np.uint64),
        rows=np.array([3, 1], np.int64),
        starts=np.array([7, 0], np.int64),
        query_lens=np.array([1, 3], np.int64),
        samples=np.array([True, False]),
        from_device=np.array([True, False]),
        ids=np.array([0, 9, 8, 7], np.int64),
    )


def start() -> tuple[LeaderDevice, RecordingRunner, RecordingRunner, threading.Thread, list[BaseException]]:
    ours, theirs = socket.socketpair()
    leading, following = RecordingRunner(), RecordingRunner()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            follow(following, Wire(theirs), free_bytes=1)  # type: ignore[arg-type]
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return LeaderDevice(leading, [Wire(ours)]), leading, following, thread, failures  # type: ignore[arg-type]


def test_followers_are_told_every_decision_in_order() -> None:
    leader, leading, following, thread, failures = start()
    admit = Admit(5, b"\1\0\0\0", b"", 0, b"\1\0\0\0", Sampling(), Stopping(4))
    leader.allocate(10, 4, 100, 7)
    leader.apply(RowChanges([2], [(1, admit)], [(1, 0, np.array([1, 2], np.int32))]))
    leader.launch(plan())
    leader.stop()
    thread.join(20)
    assert not failures
    sizes, changes, launched = following.told
    assert sizes == (10, 4, 100, 7) == leading.told[0]
    assert (changes.removed, changes.added) == ([], []), "sampling state lives on rank 0 alone"
    assert [(row, first, numbers.tolist()) for row, first, numbers in changes.blocks] == [(1, 0, [1, 2])]
    for name in StepPlan.__slots__:
        np.testing.assert_array_equal(getattr(launched, name), getattr(plan(), name))


def test_a_follower_ends_when_its_leader_is_gone() -> None:
    leader, _, _, thread, failures = start()
    for wire in leader.followers:
        wire.close()
    thread.join(20)
    assert [type(error) for error in failures] == [GroupBroken]


def test_the_leader_learns_that_a_follower_is_gone() -> None:
    leader, _, following, thread, _ = start()

    def fail(plan: StepPlan) -> None:
        raise RuntimeError("out of memory")

    following.launch = fail  # type: ignore[method-assign]
    leader.launch(plan())
    thread.join(20)
    with pytest.raises(GroupBroken):
        leader.launch(plan())
    leader.stop()


def test_strangers_at_the_port_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "GREETING_TIMEOUT_S", 0.05)
    callers: list[socket.socket] = []

    class Group:
        """Of two ranks; the second one comes behind three strangers."""

        rank = 0
        world_size = 2

        def broadcast_(self, greeting: torch.Tensor) -> torch.Tensor:
            port, *secret = greeting.tolist()
            for said in (b"", None, bytes(16), bytes(secret)):
                caller = socket.create_connection(("localhost", port))
                if said is None:
                    caller.close()
                else:
                    caller.sendall(said)
                callers.append(caller)
            return greeting

    (wire,) = gather_followers(Group(), "localhost", torch.device("cpu"))  # type: ignore[arg-type]
    wire.send(b"plan")
    callers[-1].settimeout(20)
    assert callers[-1].recv(100)[4:] == b"plan"
    wire.close()
    for caller in callers:
        caller.close()
