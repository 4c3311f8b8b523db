"""A closed-loop load on a server of this machine: each of a number of clients asks again when its answer has ended.

Speaks TGI's /generate_stream, counts one token per event, takes times where the client reads. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from benchmarks.record import Figure, argument_parser, report

LOOPBACK = ("127.0.0.1", "localhost", "::1")
NOUNS = """
river stone garden window letter morning market winter village bridge harbor forest island summer engine paper music
table kitchen doctor teacher soldier farmer captain brother sister mother father cousin animal horse bird fish tree
flower mountain valley desert ocean cloud storm thunder silver golden yellow orange purple
"""


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients do. Prompt lengths are in words, of about one token each."""

    clients: int
    requests: int
    prompt_words: int = 121
    shared_words: int = 0  # a beginning that all prompts share
    max_tokens: int = 128
    seed: int = 0
    grammar: Callable[[int], dict[str, Any]] | None = None  # of the request with this number, as /generate takes it


@dataclass(slots=True)
class Answer:
    """Moments of one request in seconds, by time.perf_counter()."""

    sent: float
    tokens: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    load: Load
    seconds: float
    answers: list[Answer]

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error is not None]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.tokens) for answer in self.good) / self.seconds

    def first_token_ms(self, percent: float) -> float:
        return 1_000 * percentile([answer.tokens[0] - answer.sent for answer in self.good], percent)

    def gap_ms(self, percent: float) -> float:
        gaps = [b - a for answer in self.good for a, b in zip(answer.tokens, answer.tokens[1:])]
        return 1_000 * percentile(gaps, percent)

    def prompt_tokens(self) -> float:
        return percentile([answer.prompt_tokens for answer in self.good], 50)

    def figures(self, label: str, target: str = "", first_token_target: str = "") -> list[Figure]:
        note = f"{len(self.good)} requests of {self.prompt_tokens():.0f} + {self.load.max_tokens} tokens"
        note += f", {len(self.errors)} failed: {self.errors[0]}" if self.errors else ""
        return [
            Figure(f"{label}, output", self.tokens_per_s, "tokens/s", target, note),
            Figure(f"{label}, first token p50", self.first_token_ms(50), "ms", first_token_target),
            Figure(f"{label}, first token p99", self.first_token_ms(99), "ms"),
            Figure(f"{label}, between tokens p50", self.gap_ms(50), "ms"),
            Figure(f"{label}, between tokens p99", self.gap_ms(99), "ms"),
        ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie (nearest rank); NaN where there are none."""
    ordered = sorted(values)
    return ordered[round(percent / 100 * (len(ordered) - 1))] if ordered else float("nan")


def prompt(load: Load, index: int) -> str:
    nouns, own, shared = NOUNS.split(), random.Random(f"{load.seed}/{index}"), random.Random("shared")
    words = [shared.choice(nouns) for _ in range(load.shared_words)]
    return " ".join(words + [own.choice(nouns) for _ in range(load.prompt_words)])


async def run(url: str, load: Load) -> Outcome:
    """Run the load against `url` (http://127.0.0.1:port)."""
    if urlsplit(url).hostname not in LOOPBACK:
        raise SystemExit(f"{url} is not on this machine: the load generator speaks to loopback addresses only")
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        answers: list[Answer] = []
        indices = iter(range(load.requests))
        began = time.perf_counter()
        await asyncio.gather(*(_client(session, url, load, indices, answers) for _ in range(load.clients)))
        return Outcome(load, time.perf_counter() - began, answers)


async def _client(
    session: aiohttp.ClientSession, url: str, load: Load, indices: Iterator[int], answers: list[Answer]
) -> None:
    for index in indices:
        answer = await _ask(session, url, load, index)
        answers.append(answer)


async def _ask(session: aiohttp.ClientSession, url: str, load: Load, index: int) -> Answer:
    parameters: dict[str, Any] = {"max_new_tokens": load.max_tokens, "ignore_eos": True, "details": True}
    if load.grammar is not None:
        parameters["grammar"] = load.grammar(index)
    body = {"inputs": prompt(load, index), "parameters": parameters}
    answer, last = Answer(time.perf_counter()), b""
    try:
        async with session.post(f"{url}/generate_stream", json=body) as response:
            if response.status != 200:
                answer.error = f"{response.status} {await response.text()}"
                return answer
            async for line in response.content:
                if line.startswith(b"data:"):
                    answer.tokens.append(time.perf_counter())
                    last = line
        event = json.loads(last[5:]) if answer.tokens else {}
        if not event.get("details"):
            answer.error = event.get("error", "the stream ended early")
        else:
            answer.prompt_tokens = event["details"]["input_length"]
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def load_of(arguments: argparse.Namespace) -> Load:
    return Load(
        clients=arguments.clients,
        requests=arguments.requests or max(4, 2 * arguments.clients),
        prompt_words=arguments.prompt_words,
        shared_words=arguments.shared_words,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
    )


def main() -> None:
    parser = argument_parser(__doc__, "load")
    parser.add_argument("--url", default="http://127.0.0.1:3000", help="where the server listens (loopback only)")
    parser.add_argument("-c", "--clients", type=int, default=1)
    parser.add_argument("-n", "--requests", type=int, default=0, help="in all (default: two per client, at least 4)")
    parser.add_argument("--prompt-words", type=int, default=121, help="words of a prompt's own (default: 121)")
    parser.add_argument("--shared-words", type=int, default=0, help="words that all prompts begin with")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    load = load_of(arguments)
    outcome = asyncio.run(run(arguments.url, load))
    report(arguments, "load", "Load on a running server", outcome.figures(f"{load.clients} clients"))
    if outcome.errors:
        raise SystemExit(f"{len(outcome.errors)} of {len(outcome.answers)} requests failed")


if __name__ == "__main__":
    main()
