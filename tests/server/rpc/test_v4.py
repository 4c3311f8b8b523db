"""generate.v4 over a real socket: a stream that breaks ends alone."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tests.server.engine.test_service import REQUEST, Running
from tgi.errors import StartupError
from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.server.engine.faults import Tamper
from tgi.server.rpc.interceptors import ErrorInterceptor
from tgi.server.rpc.v4 import V4Service

WAIT_S = 20.0
POOL = 4  # threads, made as they are needed


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    with pytest.raises(StartupError):  # its first warm-up fails
        made.shard.warmup(REQUEST)
    made.shard.warmup(REQUEST)
    yield made
    made.loop.stop()
    made.thread.join(20)


@pytest.fixture
def stub(running: Running, tmp_path: Path) -> Iterator[rpc.ShardServiceStub]:
    server = grpc.server(futures.ThreadPoolExecutor(POOL), interceptors=[ErrorInterceptor()])
    V4Service(running.shard, []).add_to(server)
    url = f"unix:{tmp_path / 's'}"
    server.add_insecure_port(url)
    server.start()
    with grpc.insecure_channel(url) as channel:
        yield rpc.ShardServiceStub(channel)
    server.stop(0).wait()


@pytest.mark.parametrize("fault", ["cut", "unreadable"])
def test_a_broken_stream_ends_and_the_next_one_opens(running: Running, stub: rpc.ShardServiceStub, fault: str) -> None:
    tamper = Tamper()

    def unreadable(step):
        raise ValueError("a step cannot be encoded")

    tamper.ask("cut")
    running.shard.tamper = tamper if fault == "cut" else unreadable
    with pytest.raises(grpc.RpcError) as caught:
        next(stub.Generate(iter([pb.Command()])))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    running.shard.tamper = None
    assert next(stub.Generate(iter([pb.Command()]))).HasField("opening")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts what /proc shows")
@pytest.mark.parametrize("how", ["cancelled", "closed", "cut"])
def test_streams_opened_in_a_loop_leave_nothing(running: Running, stub: rpc.ShardServiceStub, how: str) -> None:
    """Neither threads nor descriptors, however they end."""

    def one() -> None:
        running.shard.tamper = None
        commands: queue.SimpleQueue[pb.Command | None] = queue.SimpleQueue()
        commands.put(pb.Command())
        if how == "cut":
            running.shard.tamper = Tamper()
            running.shard.tamper.ask("cut")
        call = stub.Generate(iter(commands.get, None))
        if how == "cut":
            with pytest.raises(grpc.RpcError):
                next(call)
        else:
            assert next(call).HasField("opening")
            call.cancel() if how == "cancelled" else commands.put(None)
        commands.put(None)
        list(all_that_comes(call))

    def left() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for _ in range(8):  # most of gRPC's own threads and descriptors are there
        one()
    before = left()
    for _ in range(40):
        one()
    deadline = time.monotonic() + WAIT_S
    while running.loop.call(lambda: running.loop.has_stream) or any(
        now > then + POOL for now, then in zip(left(), before)
    ):
        assert time.monotonic() < deadline, (before, left())
        time.sleep(0.01)


def all_that_comes(call: Iterator[pb.Step]) -> Iterator[pb.Step]:
    with contextlib.suppress(grpc.RpcError):
        yield from call
