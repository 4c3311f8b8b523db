"""What a streamed token costs the router, alone: the real router process between a scripted shard and raw clients.

256 streams over TCP, one event per token. The shard gives every stream a token per step: first paced, so that each
event is written by itself, then as fast as the window allows, so that steps merge. CPU is the router process's own,
from its first to its last event; the other two processes have the rest of the machine. "Request in, first event out" is
of one request at a time, with a 128-token prompt: shard and wire answer at once and are part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.load import Load, percentile, prompt
from benchmarks.process import Child, free_port, running
from benchmarks.record import Figure, argument_parser, report
from benchmarks.server_process import READY, program
from tgi.hub import BUNDLED_MODEL, locate
from tgi.text.tokenizer import load_tokenizer

STREAMS = 256
LIMIT_S = 300  # longest wait for what must come
FEW, MANY = 64, 1_024  # open streams between which memory is compared
ANSWER = "Rivers carry what the mountains lose, and the sea keeps none of it for long. "
EVENT = b"data:"


@dataclass(frozen=True, slots=True)
class Router:
    child: Child
    port: int


@contextlib.contextmanager
def routing(step_ms: float) -> Iterator[Router]:
    """The router in front of a scripted shard that makes a step every `step_ms`."""
    tokenizer = load_tokenizer(locate(BUNDLED_MODEL))
    ids = memoryview(tokenizer.encode(ANSWER).ids).cast("I").tolist()
    with tempfile.TemporaryDirectory() as directory:
        path, port = str(Path(directory) / "shard-0"), free_port()
        shard = [sys.executable, "-m", "benchmarks.scripted_process", "--socket", path]
        shard += ["--vocab-size", str(tokenizer.vocab_size), "--step-ms", str(step_ms), "--token-ids", *map(str, ids)]
        router = [program("text-generation-router"), "--master-shard-uds-path", path]
        router += ["--tokenizer-name", BUNDLED_MODEL, "--hostname", "127.0.0.1", "--port", str(port)]
        router += ["--max-concurrent-requests", "2048"]
        with running(shard, "listening"), running(router, READY) as child:
            yield Router(child, port)


def request(max_new_tokens: int, index: int, words: int = 20, keep_alive: bool = False) -> bytes:
    inputs = prompt(Load(1, 1, prompt_words=words), index)
    parameters = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = json.dumps({"inputs": inputs, "parameters": parameters}).encode()
    connection = b"keep-alive" if keep_alive else b"close"
    head = b"POST /generate_stream HTTP/1.1\r\nHost: localhost\r\nConnection: %s\r\n" % connection
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Reader(asyncio.Protocol):
    """Sends one request and counts the events of its answer."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._tail = b""
        self.began = asyncio.Event()
        self.events = 0
        self.first = self.last = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data  # an event's mark may be cut in two
        self.events += data.count(EVENT)
        self._tail = data[-len(EVENT) + 1 :]
        self.last = time.perf_counter()
        self.first = self.first or self.last
        if self.events:
            self.began.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


async def read_streams(port: int, streams: int, tokens: int) -> list[Reader]:
    """All streams at once, to their ends."""
    loop = asyncio.get_running_loop()
    ends, readers = [], []
    for index in range(streams):
        end = loop.create_future()
        reader = Reader(request(tokens, index), end)
        await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", port)
        ends.append(end)
        readers.append(reader)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*ends)
    lost = [reader.events for reader in readers if reader.events != tokens]
    assert not lost, f"{len(lost)} streams have another number of events than {tokens}: {lost[:5]}"
    return readers


def cost(step_ms: float, tokens: int) -> tuple[float, float]:
    """CPU microseconds per token, and tokens per second by the clock."""
    with routing(step_ms) as router:
        uvloop.run(read_streams(router.port, STREAMS, 8))  # nothing of the start is measured
        before = router.child.cpu_s()
        readers = uvloop.run(read_streams(router.port, STREAMS, tokens))
        cpu_s = router.child.cpu_s() - before
    seconds = max(reader.last for reader in readers) - min(reader.first for reader in readers)
    return 1e6 * cpu_s / (STREAMS * tokens), STREAMS * tokens / seconds


def added_ms(port: int, rounds: int) -> list[float]:
    """From the request's last byte sent to the first event received, one request after the other."""
    times = []
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(rounds):
            connection.sendall(request(1, index, words=127, keep_alive=True))
            sent, received, first = time.perf_counter(), b"", 0.0
            while not received.endswith(b"0\r\n\r\n"):
                data = connection.recv(1 << 16)
                assert data, f"the router closed the connection after {received!r}"
                received += data
                if not first and EVENT in received:
                    first = time.perf_counter()
            assert b" 200 " in received.split(b"\r\n")[0], received
            times.append(1e3 * (first - sent))
    return times


async def memory_per_stream(router: Router) -> float:
    """Bytes of the router's own memory for each stream that is open, tokens flowing slowly."""
    loop = asyncio.get_running_loop()
    readers, transports, sizes = [], [], []
    for count in (FEW, MANY):
        while len(readers) < count:
            reader = Reader(request(10_000, len(readers)), loop.create_future())
            transport, _ = await loop.create_connection(lambda reader=reader: reader, "127.0.0.1", router.port)
            transports.append(transport)
            readers.append(reader)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(reader.began.wait() for reader in readers))
        sizes.append(router.child.memory_bytes())
    for transport in transports:
        transport.abort()
    return (sizes[1] - sizes[0]) / (MANY - FEW)


def main() -> None:
    parser = argument_parser(__doc__, "router_stream")
    parser.add_argument("--tokens", type=int, default=1_500, help="per stream (default: 1,500)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="pace of the paced run (default: 10)")
    parser.add_argument("--rounds", type=int, default=500, help="requests of the idle router (default: 500)")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    paced_us, paced_rate = cost(arguments.step_ms, arguments.tokens)
    merged_us, merged_rate = cost(0.0, 2 * arguments.tokens)
    with routing(0.0) as router:
        added_ms(router.port, 50)
        added = added_ms(router.port, arguments.rounds)
    with routing(200.0) as router:
        stream_bytes = uvloop.run(memory_per_stream(router))
    figures = [
        Figure("one event per write", paced_us, "µs CPU per token", "<= 10", f"at {paced_rate:,.0f} tokens/s"),
        Figure("steps merged", merged_us, "µs CPU per token", "<= 5.5", f"at {merged_rate:,.0f} tokens/s"),
        Figure("request in, first event out, p50", percentile(added, 50), "ms", "<= 1.5"),
        Figure("request in, first event out, p99", percentile(added, 99), "ms", "<= 5"),
        Figure("memory per open stream", stream_bytes / 1e3, "kB", "<= 20"),
    ]
    report(arguments, "router_stream", f"Router alone: {STREAMS} streams", figures)


if __name__ == "__main__":
    main()
