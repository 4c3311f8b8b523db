"""What it costs rank 0 to tell another rank its plan over a socket: to encode and send, and until it has arrived.

The way of a plan is hidden behind rank 0's own launch (milliseconds), so a shared-memory ring would save nothing.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from benchmarks.record import Figure, argument_parser, report
from tgi.server.batch.step import RowChanges, StepPlan
from tgi.server.distributed.group import SingleRank
from tgi.server.engine.leader import LeaderDevice, Wire, follow

BATCHES = (1, 256)
ROUNDS = 2_000


class Listener:
    """Stands where a ModelRunner stands; tells when a plan has arrived."""

    depth = 1
    group = SingleRank()
    device = torch.device("cpu")

    def __init__(self, on_launch: Callable[[], None]) -> None:
        self._on_launch = on_launch

    def apply(self, changes: RowChanges) -> None:
        pass

    def launch(self, plan: StepPlan) -> None:
        self._on_launch()


def decode_plan(rows: int) -> StepPlan:
    ones = np.ones(rows, np.int64)
    return StepPlan(
        number=1,
        handles=np.arange(1, rows + 1).astype(np.uint64),
        rows=np.arange(1, rows + 1),
        starts=ones * 100,
        query_lens=ones,
        samples=np.ones(rows, np.bool_),
        from_device=np.ones(rows, np.bool_),
        ids=ones,
    )


def measure(rows: int) -> tuple[float, float]:
    """(µs that the leader spends, µs until the follower has the plan), medians."""
    with socket.create_server(("localhost", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    arrived = threading.Semaphore(0)
    moments: list[float] = []

    def on_arrival() -> None:
        moments.append(time.perf_counter())
        arrived.release()

    follower = Listener(on_arrival)
    thread = threading.Thread(target=follow, args=(follower, Wire(theirs), 0))
    thread.start()
    leader = LeaderDevice(Listener(lambda: None), [Wire(ours)])  # pyright: ignore[reportArgumentType]
    plan = decode_plan(rows)
    spent: list[float] = []
    delays: list[float] = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        leader.launch(plan)
        spent.append((time.perf_counter() - started) * 1e6)
        arrived.acquire()
        delays.append((moments[-1] - started) * 1e6)
    leader.stop()
    thread.join()
    return statistics.median(spent), statistics.median(delays)


def main() -> None:
    arguments = argument_parser(__doc__, "plan_transport").parse_args()
    figures: list[Figure] = []
    for rows in BATCHES:
        spent_us, delay_us = measure(rows)
        figures.append(Figure(f"plan sent, {rows} rows", round(spent_us, 1), "µs", note="rank 0's own time"))
        figures.append(Figure(f"plan received, {rows} rows", round(delay_us, 1), "µs", note="threads of one process"))
    report(arguments, "plan_transport", "Plans from rank 0 to another rank over TCP", figures)


if __name__ == "__main__":
    main()
