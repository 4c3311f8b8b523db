"""Random requests of every kind, and what must hold of their answers however they were run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tests.e2e.client import Answer, Client
from tgi.server.sampling.noise import gumbel_noise
from tgi.text.tokenizer import Tokenizer

T = TypeVar("T")

WORDS = (
    *("the", "capital", "of", "France", "hello", "world", "question", "answer", "people", "1", "22", "333"),
    *("naïve", "日本語", "😀", "zebra,", "quartz!", "\n\n", "-", "(", ")"),
)
SMALL_MARGIN = 0.01  # of float32 logits, noise included: below it another order of sums may choose another token
MOST_EXCUSED = 0.001  # divergences per token


@dataclass(frozen=True, slots=True)
class Request:
    route: str  # "generate" or "chat"
    text: str
    stream: bool
    parameters: dict[str, Any]

    async def send(self, client: Client, stream: bool | None = None) -> Answer:
        stream = self.stream if stream is None else stream
        if self.route == "chat":
            messages = [{"role": "user", "content": self.text}]
            return await client.chat(messages, stream, **self.parameters)
        return await client.generate(self.text, stream, **self.parameters)


def random_text(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest)))


def random_requests(count: int, seed: int, longest_prompt: int, longest_answer: int) -> list[Request]:
    """`longest_prompt` in words, `longest_answer` in tokens.

    Greedy and sampled, plain and streamed, with stop strings, truncated, on both routes. What is sampled on the native
    route tells all of its choices, at most 5 tokens each, so that `Comparison` can tell how close they were.
    """
    rng = random.Random(seed)
    # Several begin alike, so that prefixes are shared under pressure.
    shared = " ".join(rng.choice(WORDS) for _ in range(longest_prompt))
    requests: list[Request] = []
    for index in range(count):
        text = random_text(rng, longest_prompt)
        if rng.random() < 0.3:
            text = f"{shared} {text}"
        parameters: dict[str, Any] = {}
        route = rng.choice(("generate", "generate", "chat"))
        # Long ones come together, so that they outgrow at the same time what they were admitted with; many short ones
        # join and leave meanwhile.
        is_long = index % 32 < 8
        length = rng.randint(longest_answer // 2, longest_answer) if is_long else rng.randint(1, longest_answer // 6)
        parameters["max_tokens" if route == "chat" else "max_new_tokens"] = length
        if rng.random() < 0.5:
            parameters |= {
                "temperature": rng.choice((0.5, 0.8, 1.0, 1.3)),
                "top_k": rng.randint(2, 5),
                "seed": rng.randrange(2**64),
            }
            if rng.random() < 0.4:
                parameters["top_p"] = rng.choice((0.7, 0.95))
            if route == "generate":
                parameters |= {"do_sample": True, "top_n_tokens": 5}
        elif route == "chat":
            parameters["temperature"] = 0
        elif rng.random() < 0.7:
            parameters["top_n_tokens"] = 2
        if not is_long and rng.random() < 0.3:
            parameters["stop"] = rng.sample(["e", "th", " a", "é", "you", "\n", "s "], rng.randint(1, 3))
        if is_long or rng.random() < 0.4:
            parameters["ignore_eos"] = True
        if route == "generate" and rng.random() < 0.25:
            parameters["truncate"] = rng.randint(1, 60)
        if rng.random() < 0.15:
            parameters["cache"] = False
        if rng.random() < 0.2:
            parameters["priority"] = rng.choice((-1, 1))
        requests.append(Request(route, text, rng.random() < 0.5, parameters))
    return requests


async def at_once(limit: int, jobs: Iterable[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Results in the order of `jobs`, at most `limit` of them running."""
    permits = asyncio.Semaphore(limit)

    async def run(job: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with permits:
            return await job()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(job)) for job in jobs]
    return [task.result() for task in tasks]


def assert_whole(answer: Answer, request: Request) -> None:
    """What holds of every answer by itself."""
    assert "".join(answer.pieces) == answer.text, request
    most = request.parameters["max_tokens" if request.route == "chat" else "max_new_tokens"]
    if request.route == "generate":
        assert 1 <= len(answer.ids) <= most
        assert answer.finish in ("length", "eos_token", "stop_sequence")
        assert (answer.finish == "length") <= (len(answer.ids) == most)
        assert (answer.finish == "stop_sequence") == (answer.stop_reason is not None)
        assert answer.stop_reason is None or answer.text.endswith(answer.stop_reason)
    else:
        assert answer.finish in ("length", "stop")
        assert answer.stop_reason is None or answer.stop_reason not in answer.text
    assert answer.seed == request.parameters.get("seed"), request


@dataclass
class Comparison:
    """Answers against those of undisturbed runs; how many differences were excused, and why not more."""

    tokenizer: Tokenizer
    tokens: int = 0
    excused: int = 0

    def compare(self, found: Answer, alone: Answer, request: Request) -> None:
        """Equal, or different only from a position on where two tokens were almost equally good."""
        self.tokens += len(alone.ids) or len(alone.text)
        if found.told == alone.told:
            return
        position = next(
            (index for index, (a, b) in enumerate(zip(found.ids, alone.ids)) if a != b),
            min(len(found.ids), len(alone.ids)),
        )
        assert position < len(alone.top), f"{request}\n{found}\n{alone}"
        _, gap = self.choice(alone, position, request)
        assert gap < SMALL_MARGIN, f"margin {gap} at {position}: {request}\n{found}\n{alone}"
        self.excused += 1

    def choice(self, answer: Answer, position: int, request: Request) -> tuple[int, float]:
        """The best token at `position` and by how much it wins, in logits with noise. `answer` must tell its tops."""
        ids, logprobs = zip(*answer.top[position])
        scores = torch.tensor(logprobs, dtype=torch.float32)
        seed, temperature = request.parameters.get("seed"), 1.0
        if seed is not None:
            prompt = min(len(self.tokenizer.encode(request.text)), request.parameters.get("truncate", 1 << 30))
            signed = seed - (1 << 64) if seed >= 1 << 63 else seed
            noise = gumbel_noise(torch.tensor([signed]), torch.tensor([prompt + position]), max(ids) + 1)[0]
            scores = scores + noise[list(ids)]
            temperature = request.parameters["temperature"]
        if len(ids) == 1:
            return ids[0], float("inf")
        values, places = scores.topk(2)
        return ids[int(places[0])], float(values[0] - values[1]) * temperature

    def report(self, what: str) -> None:
        print(f"{what}: {self.excused} divergences excused in {self.tokens} tokens")
        assert self.excused <= self.tokens * MOST_EXCUSED


def summary(requests: Sequence[Request]) -> str:
    streams = sum(request.stream for request in requests)
    sampled = sum("seed" in request.parameters for request in requests)
    return f"{len(requests)} requests, {streams} streamed, {sampled} sampled"
