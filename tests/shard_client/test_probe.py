"""Health asked without an event loop, of a real server on a Unix socket."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tgi.errors import Unavailable
from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.shard_client.messages import Health
from tgi.shard_client.probe import HealthProbe


class Service(rpc.ShardServiceServicer):
    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        self.asked.set()
        self.may_answer.wait(30)
        return pb.HealthResponse(phase="running", step=412, since_s=2.5, hung_after_s=30.0, finished=9)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "shard-0")


@pytest.fixture
def service(path: str) -> Iterator[Service]:
    service = Service()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    rpc.add_ShardServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield service
    service.may_answer.set()
    server.stop(None).wait()


def test_the_answer(path: str, service: Service) -> None:
    probe = HealthProbe(path)
    assert probe.ask(30.0) == probe.ask(30.0) == Health("running", 412, 2.5, 30.0, finished=9)
    probe.close()
    with pytest.raises(Unavailable, match="closed"):
        probe.ask(30.0)


def test_nobody_there(path: str) -> None:
    probe = HealthProbe(path)
    with pytest.raises(Unavailable, match="UNAVAILABLE"):
        probe.ask(30.0)
    probe.close()


def test_no_answer_in_time(path: str, service: Service) -> None:
    service.may_answer.clear()
    probe = HealthProbe(path)
    with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
        probe.ask(0.05)
    probe.close()


def test_close_ends_a_question_that_waits(path: str, service: Service) -> None:
    service.may_answer.clear()
    probe = HealthProbe(path)
    with futures.ThreadPoolExecutor(1) as pool:
        question = pool.submit(probe.ask, 30.0)
        assert service.asked.wait(30)
        probe.close()
        with pytest.raises(Unavailable):
            question.result(30)
