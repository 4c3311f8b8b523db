"""A client of both APIs for tests: sends one request, checks the framing of what comes, keeps what matters."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp

# Of one request: long enough for a slow machine under load, short enough for a test to end by itself.
REQUEST_S = 240.0


@dataclass(frozen=True, slots=True)
class Answer:
    """`pieces`: the visible texts as they came (a plain answer of /generate has them in its details)."""

    text: str
    pieces: tuple[str, ...]
    finish: str
    ids: tuple[int, ...] = ()  # native route only
    seed: int | None = None
    stop_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # /v1 only
    top: tuple[tuple[tuple[int, float], ...], ...] = ()  # (id, logprob) of the best, per token

    @property
    def told(self) -> tuple[object, ...]:
        """What must be the same however the request was run."""
        return self.text, self.ids, self.finish, self.seed, self.stop_reason, self.prompt_tokens


class Refused(AssertionError):
    """The server has answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Client:
    """Connections are not limited: a test decides how many requests run at once."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.num_events = 0  # of all streams so far
        self._session = aiohttp.ClientSession(
            url,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            headers=None if key is None else {"authorization": f"Bearer {key}"},
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def generate(self, inputs: str, stream: bool = False, **parameters: Any) -> Answer:
        """POST /generate or /generate_stream, with details."""
        body = {"inputs": inputs, "parameters": {"details": True, **parameters}}
        if stream:
            return _from_events([json.loads(event) async for event in self.events("/generate_stream", body)])
        answer = await self._post("/generate", body)
        details = answer["details"]
        assert details["generated_tokens"] == len(details["tokens"])
        return Answer(
            text=answer["generated_text"],
            pieces=tuple(token["text"] for token in details["tokens"] if not token["special"]),
            finish=details["finish_reason"],
            ids=tuple(token["id"] for token in details["tokens"]),
            seed=details["seed"],
            stop_reason=details.get("stop_reason"),
            top=tuple(_top(top) for top in details.get("top_tokens", ())),
        )

    async def chat(self, messages: list[dict[str, str]], stream: bool = False, **body: Any) -> Answer:
        body = {"messages": messages, "stream": stream, **body}
        if stream:
            body["stream_options"] = {"include_usage": True}
            events = [event async for event in self.events("/v1/chat/completions", body)]
            assert events.pop() == "[DONE]"
            return _from_chunks([json.loads(event) for event in events])
        answer = await self._post("/v1/chat/completions", body)
        choice, usage = answer["choices"][0], answer["usage"]
        return Answer(
            text=choice["message"]["content"],
            pieces=(choice["message"]["content"],),
            finish=choice["finish_reason"],
            seed=choice.get("seed"),
            stop_reason=choice.get("stop_reason"),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        )

    async def events(self, path: str, body: Any) -> AsyncIterator[str]:
        """Payloads of a stream as they come."""
        async with self._session.post(path, json=body) as response:
            await _accepted(response)
            assert response.content_type == "text/event-stream"
            async for line in response.content:
                text = line.decode().removesuffix("\n")
                if text.startswith("data: "):
                    self.num_events += 1
                    yield text.removeprefix("data: ")
                else:
                    assert text in ("", ":"), text

    async def get(self, path: str) -> int:
        async with self._session.get(path) as response:
            return response.status

    async def status(self, path: str, body: Any) -> int:
        async with self._session.post(path, json=body) as response:
            return response.status

    async def exchange(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and content of a plain answer, whatever it says."""
        async with self._session.post(path, json=body) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self._session.get(path) as response:
            assert response.status == 200
            return await response.text()

    async def metric(self, series: str) -> float:
        for line in (await self.text("/metrics")).splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        raise KeyError(series)

    async def _post(self, path: str, body: Any) -> Any:
        async with self._session.post(path, json=body) as response:
            await _accepted(response)
            return await response.json()


async def _accepted(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise Refused(response.status, await response.text())


def _from_events(events: list[Any]) -> Answer:
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    last = events[-1]
    assert last["details"]["generated_tokens"] == len(events)
    tokens = [event["token"] for event in events]
    tops = tuple(_top(event["top_tokens"]) for event in events if "top_tokens" in event)
    return Answer(
        text=last["generated_text"],
        pieces=tuple(token["text"] for token in tokens if not token["special"]),
        finish=last["details"]["finish_reason"],
        ids=tuple(token["id"] for token in tokens),
        seed=last["details"]["seed"],
        stop_reason=last["details"].get("stop_reason"),
        top=tops,
    )


def _from_chunks(chunks: list[Any]) -> Answer:
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks[-1]["usage"]
    assert chunks.pop()["choices"] == []
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    pieces = tuple(choice["delta"]["content"] for choice in choices)
    return Answer(
        text="".join(pieces),
        pieces=pieces,
        finish=choices[-1]["finish_reason"],
        seed=choices[-1].get("seed"),
        stop_reason=choices[-1].get("stop_reason"),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def _top(tokens: list[Any]) -> tuple[tuple[int, float], ...]:
    return tuple((token["id"], float("-inf") if token["logprob"] is None else token["logprob"]) for token in tokens)
