"""generate.v4: the stream (commands in, steps out) and its unary calls. Knows the shard, not how it computes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import grpc

from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.outbox import Outbox
from tgi.server.engine.service import Shard
from tgi.server.rpc.codec import Codec
from tgi.shard_client.messages import OWNER_KEY

log = logging.getLogger(__name__)


class V4Service(rpc.ShardServiceServicer):
    def __init__(self, shard: Shard, urls: Sequence[str]) -> None:
        """`urls`: what ServiceDiscovery names, rank 0's socket alone."""
        self._shard = shard
        self._urls = list(urls)
        self._codec = Codec()

    def add_to(self, server: grpc.Server) -> None:
        rpc.add_ShardServiceServicer_to_server(self, server)

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        return self._codec.info(self._shard.info())

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        return self._codec.health(self._shard.health())

    def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    def Warmup(self, request: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:
        return self._codec.warmup_result(self._shard.warmup(self._codec.warmup_request(request)))

    def ClearCache(self, request: pb.ClearCacheRequest, context: grpc.ServicerContext) -> pb.ClearCacheResponse:
        self._shard.clear()
        return pb.ClearCacheResponse()

    def Generate(self, request_iterator: Iterator[pb.Command], context: grpc.ServicerContext) -> Iterator[pb.Step]:
        outbox = Outbox()
        self._shard.open_stream(outbox, str(dict(context.invocation_metadata()).get(OWNER_KEY, "")))
        # gRPC calls back from its own thread when the peer is gone, also while `take` waits.
        if not context.add_callback(lambda: outbox.close("the router has gone")):
            outbox.close("the router has gone")
        reader = threading.Thread(target=self._read, args=(request_iterator, outbox), name="v4-commands", daemon=True)
        reader.start()
        try:
            while (step := outbox.take()) is not None:
                yield self._codec.step(step if self._shard.tamper is None else self._shard.tamper(step))
            log.info("The stream is over: %s", outbox.closed_because)
        finally:
            self._shard.close_stream(outbox)

    def _read(self, requests: Iterator[pb.Command], outbox: Outbox) -> None:
        try:
            for message in requests:
                self._shard.post(outbox, self._codec.command(message))
        except grpc.RpcError:
            pass  # the peer is gone: the callback above has said so
        except Exception as error:
            outbox.close(f"a command could not be read: {error}")
            raise
        finally:
            # The router has closed its half: the stream is over.
            outbox.close("the router has ended the stream")


class FollowerService(rpc.ShardServiceServicer):
    """What ranks other than 0 answer: whether they come back from their steps."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._codec = Codec()

    def add_to(self, server: grpc.Server) -> None:
        rpc.add_ShardServiceServicer_to_server(self, server)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        return self._codec.health(self._liveness.read())
