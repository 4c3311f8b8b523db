"""generate.v4 over a real socket: a stream that breaks ends alone."""

from __future__ import annotations

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
    server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=[ErrorInterceptor()])
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
    assert next(stub.Generate(iter([pb.Command()]))).kv_epoch == 1


def test_streams_opened_in_a_loop_leave_nothing(running: Running, stub: rpc.ShardServiceStub) -> None:
    for _ in range(20):
        call = stub.Generate(iter([pb.Command()]))
        assert next(call).kv_epoch == 1
        call.cancel()
    assert stub.Health(pb.HealthRequest()).finished == 0
