"""Servers that are broken on purpose, and streams that are watched meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.client import Answer, Client
from tests.e2e.servers import Whole, launched, until
from tests.e2e.workload import Comparison, Request, assert_whole, at_once
from tests.fakes.tokenizer import unpacked
from tgi.text.tokenizer import Tokenizer

SHARD, ROUTER = "text-generation-server", "text-generation-router"
HUNG_AFTER_S = 2
POOL = 32_768  # KV tokens: enough, and little to touch at a restart
LIKELY_S = 10.0  # of a restart on two cores; times are asserted with a factor of five


class Trap:
    """A fault of TGI_FAULTS that waits for `spring()`, and then happens once."""

    def __init__(self, directory: Path, kind: str, **triggers: object) -> None:
        self._armed = directory / f"{kind}.armed"
        self._done = directory / f"{kind}.done"
        words = [f"{name}={value}" for name, value in triggers.items()]
        self.spec = f"{kind}:" + ",".join([*words, f"armed={self._armed}", f"once={self._done}"])

    def spring(self) -> None:
        self._armed.touch()

    @property
    def has_sprung(self) -> bool:
        return self._done.exists()


class Switch:
    """A fault of TGI_FAULTS that happens again and again while it is on."""

    def __init__(self, directory: Path, kind: str, **triggers: object) -> None:
        self._armed = directory / f"{kind}.on"
        self.spec = f"{kind}:" + ",".join([*(f"{name}={value}" for name, value in triggers.items())])
        self.spec += f"{',' if triggers else ''}armed={self._armed}"

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._armed.touch()
        try:
            yield
        finally:
            self._armed.unlink()


@contextlib.contextmanager
def fragile(model: Path, faults: Sequence[str], *arguments: str) -> Iterator[Whole]:
    """A server that notices a hung shard within two seconds, with the faults in it."""
    options = ["--model-id", str(model), "--dtype", "float32", "--max-total-tokens", "1024"]
    options += ["--max-batch-total-tokens", str(POOL)]
    options += ["--hung-after", str(HUNG_AFTER_S), "--health-timeout", str(HUNG_AFTER_S), *arguments]
    with launched(*options, environment={"TGI_FAULTS": ";".join(faults)} if faults else None) as server:
        yield server


def kill(server: Whole, program: str, number: signal.Signals = signal.SIGKILL) -> int:
    """-> the process id that was"""
    pid = server.launcher.child(program)
    os.kill(pid, number)
    return pid


@dataclass(frozen=True)
class Undisturbed:
    """Requests, and what each answers when nothing happens."""

    tokenizer: Tokenizer
    requests: Sequence[Request]
    answers: Sequence[Answer]

    @classmethod
    async def measure(cls, client: Client, tokenizer: Tokenizer, requests: Sequence[Request]) -> Undisturbed:
        answers = await at_once(len(requests), [lambda r=request: r.send(client) for request in requests])
        for request, answer in zip(requests, answers):
            assert_whole(answer, request)
        return cls(tokenizer, requests, answers)

    def assert_same(self, answers: Sequence[Answer], what: str) -> None:
        comparison = Comparison(self.tokenizer)
        for request, found, alone in zip(self.requests, answers, self.answers, strict=True):
            assert_whole(found, request)
            comparison.compare(found, alone, request)
        comparison.report(what)

    def without(self, token_id: int, count: int) -> Undisturbed:
        """The first `count` in whose prompts and answers a token does not come."""
        pairs = [
            (request, answer)
            for request, answer in zip(self.requests, self.answers)
            if request.route == "generate"
            and token_id not in (*answer.ids, *unpacked(self.tokenizer.encode(request.text).ids))
        ][:count]
        assert len(pairs) == count, f"only {len(pairs)} requests do without token {token_id}"
        return Undisturbed(self.tokenizer, *zip(*pairs))


async def all_running(client: Client, num_events: int) -> None:
    """Until the streams have sent so many events together."""
    await until(lambda: client.num_events >= num_events, f"{num_events} events")


class Watch:
    """The longest pause between two events, of all streams of a client together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._task: asyncio.Task[None] | None = None
        self.longest_s = 0.0

    async def __aenter__(self) -> Watch:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        seen, since = self._client.num_events, time.monotonic()
        while True:
            await asyncio.sleep(0.002)
            now = time.monotonic()
            if self._client.num_events != seen:
                self.longest_s = max(self.longest_s, now - since)
                seen, since = self._client.num_events, now


class Faults:
    """Those of one server, as attributes."""

    slow: Switch  # so that the streams still run when something breaks

    @property
    def specs(self) -> list[str]:
        """For `fragile`."""
        return [fault.spec for fault in vars(self).values()]


async def broken_midway(
    server: Whole,
    faults: Faults,
    undisturbed: Undisturbed,
    early: int,
    what: str,
    disturb: Callable[[], Awaitable[None]],
) -> float:
    """Break the server when each stream has had about `early` tokens; all must end as if nothing had been.

    -> the longest pause of all of them together, seconds
    """
    with faults.slow.on():
        async with Client(server.url) as client, asyncio.TaskGroup() as group, Watch(client) as watch:
            tasks = [group.create_task(request.send(client)) for request in undisturbed.requests]
            await all_running(client, len(tasks) * early)
            ended = [task.result() for task in tasks if task.done()]
            assert not ended, f"streams that ended too soon to tell anything: {ended}"
            await disturb()
            await asyncio.wait(tasks)
    undisturbed.assert_same([task.result() for task in tasks], what)
    return watch.longest_s
