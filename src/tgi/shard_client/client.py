"""The connection to rank 0: unary calls and the one stream, over a Unix socket. Knows no policy: it neither retries nor
reconnects, it says Unavailable.

Everything belongs to the event loop in which it was made.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import Any, NoReturn, Self, TypeVar

import grpc
import grpc.aio
from grpc.aio import EOF  # pyright: ignore[reportAttributeAccessIssue] (missing from its stubs)

from tgi.errors import StartupError, Unavailable
from tgi.proto.v4 import generate_pb2 as pb
from tgi.proto.v4 import generate_pb2_grpc as rpc
from tgi.shard_client.codec import Codec
from tgi.shard_client.messages import OWNER_KEY, Command, Health, ShardInfo, Step, WarmupRequest, WarmupResult

GENERATE = "/generate.v4.ShardService/Generate"
OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A shard that starts again is noticed soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Each client has its own socket: closing one never disturbs another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
SETTLE_S = 1.0
INFO_TIMEOUT_S = 10.0  # the answer is ready made

T = TypeVar("T")


class ShardClient:
    """Unary calls raise Unavailable when the shard is not there, does not answer in time, or fails."""

    def __init__(self, uds_path: str, channel: grpc.aio.Channel) -> None:
        self.uds_path = uds_path
        self._channel = channel
        self._stub: Any = rpc.ShardServiceStub(channel)
        self._codec = Codec()
        self._owner = secrets.token_hex(8)
        self._streams: set[ShardStream] = set()

    @classmethod
    def connect(cls, uds_path: str) -> Self:
        """A client of the socket at `uds_path` (rank 0's own). Returns at once; the first call connects."""
        return cls(uds_path, grpc.aio.insecure_channel(f"unix:{uds_path}", options=OPTIONS))

    async def info(self) -> ShardInfo:
        return self._codec.info(await self._answer(self._stub.Info(pb.InfoRequest(), timeout=INFO_TIMEOUT_S)))

    async def warmup(self, request: WarmupRequest) -> WarmupResult:
        """Takes as long as it takes. Raises StartupError when what is asked for does not fit the machine."""
        return self._codec.warmup_result(await self._answer(self._stub.Warmup(self._codec.warmup_request(request))))

    async def health(self, timeout: float) -> Health:  # noqa: ASYNC109 (gRPC's own deadline, which travels along)
        """`timeout`: seconds after which a silent shard counts as unavailable."""
        return self._codec.health(await self._answer(self._stub.Health(pb.HealthRequest(), timeout=timeout)))

    async def clear_cache(self) -> None:
        await self._answer(self._stub.ClearCache(pb.ClearCacheRequest()))

    async def service_discovery(self) -> list[str]:
        answer = await self._answer(self._stub.ServiceDiscovery(pb.ServiceDiscoveryRequest()))
        return list(answer.urls)

    def stream(self) -> ShardStream:
        """Open the stream. It ends whatever stream the shard had, and begins with Step 0."""
        stream = ShardStream(self._channel, self._codec, self.uds_path, self._owner, self._streams.discard)
        self._streams.add(stream)
        return stream

    async def close(self) -> None:
        """Close the streams, then the socket."""
        for stream in list(self._streams):
            await stream.close()
        await self._channel.close(grace=None)
        await _settle()

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            _raise(error, self.uds_path)


class ShardStream:
    """Commands go in by `send`, Steps come out by iteration (one reader). Both ends keep the order.

    Iteration raises Unavailable when the stream breaks or the shard ends it, and stops after `close()`. To be closed in
    either case.
    """

    def __init__(self, channel: grpc.aio.Channel, codec: Codec, uds_path: str, owner: str, on_close: Any) -> None:
        self._codec = codec
        self._uds_path = uds_path
        self._on_close = on_close
        self._waiting: deque[bytes] = deque()
        self._has_commands = asyncio.Event()
        self._closed = False
        # Serialised here, so that a command may be reused by its sender.
        self._call: Any = channel.stream_stream(GENERATE, None, pb.Step.FromString)(metadata=((OWNER_KEY, owner),))
        self._writer = asyncio.create_task(self._write(), name="shard-commands")

    def send(self, command: Command) -> None:
        """Never waits and never raises for a broken stream: who iterates learns of that. The command is copied."""
        if not self._closed and not self._writer.done():
            self._waiting.append(self._codec.command(command).SerializeToString())
            self._has_commands.set()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_commands.wait()
                self._has_commands.clear()
                while self._waiting:
                    await self._call.write(self._waiting.popleft())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self._waiting.clear()  # broken: the reader is told

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        if self._closed:
            raise StopAsyncIteration
        try:
            message = await self._call.read()
        except asyncio.CancelledError:
            # Either our task or the call was cancelled: only the latter by close().
            if self._closed and self._call.cancelled():
                raise StopAsyncIteration from None
            raise
        except grpc.aio.AioRpcError as error:
            if self._closed:
                raise StopAsyncIteration from None
            _raise(error, self._uds_path)
        if message is EOF:
            if self._closed:
                raise StopAsyncIteration
            raise Unavailable(f"the model server at {self._uds_path} has ended the stream")
        try:
            return self._codec.step(message)
        except ValueError as error:
            raise Unavailable(
                f"the model server at {self._uds_path} sent a step that cannot be read: {error}"
            ) from error

    async def close(self) -> None:
        """End the stream; the shard drops its rows. What was sent and is still waiting here is dropped."""
        if self._closed:
            return
        self._closed = True
        self._waiting.clear()
        self._on_close(self)
        self._call.cancel()
        self._writer.cancel()
        await asyncio.wait([self._writer])
        await self._call.code()


async def _settle() -> None:
    """Wait for gRPC's own tasks: those of cancelled calls end when its core has noticed, a moment after the channel is
    closed, and a loop that ends before that complains."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + SETTLE_S
    while loop.time() < give_up_at:
        names = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
        if not any(name.startswith("_AioCall.") for name in names):
            return
        await asyncio.sleep(0.001)


def _raise(error: grpc.aio.AioRpcError, uds_path: str) -> NoReturn:
    details = " ".join((error.details() or "").split())
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise StartupError(details) from error
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            raise Unavailable(f"the model server at {uds_path} cannot be reached ({details})") from error
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            raise Unavailable(f"the model server at {uds_path} did not answer in time") from error
        case _:
            raise Unavailable(f"the model server at {uds_path} failed: {details}") from error
