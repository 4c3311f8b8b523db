"""Health of one rank, asked without an event loop. Knows no policy: it neither waits nor judges."""

from __future__ import annotations

from typing import Any

import grpc

from tgi.errors import Unavailable
from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.shard_client.client import OPTIONS
from tgi.shard_client.codec import Codec
from tgi.shard_client.messages import Health


class HealthProbe:
    """A connection to the socket at `uds_path`, made by the first question. May be closed from another thread."""

    def __init__(self, uds_path: str) -> None:
        self._uds_path = uds_path
        self._channel = grpc.insecure_channel(f"unix:{uds_path}", options=OPTIONS)
        self._stub: Any = rpc.ShardServiceStub(self._channel)
        self._codec = Codec()

    def ask(self, timeout_s: float) -> Health:
        """Raises Unavailable when nobody answers within `timeout_s`, at once when nobody is there or after `close`."""
        try:
            return self._codec.health(self._stub.Health(pb.HealthRequest(), timeout=timeout_s))
        except grpc.RpcError as error:
            raise Unavailable(f"the model server at {self._uds_path} does not answer ({_code(error)})") from error
        except ValueError as error:  # gRPC's word for a call on a closed channel
            raise Unavailable(f"the connection to {self._uds_path} is closed") from error

    def close(self) -> None:
        """A question that waits ends with Unavailable."""
        self._channel.close()


def _code(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else type(error).__name__
