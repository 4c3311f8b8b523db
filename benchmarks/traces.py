"""Arrival traces: who asks what, when, and how long the answer will be. Pure functions of a seed.

A trace says nothing about servers. Token ids are random; what requests have in common (a chat's history, a system
prompt) they have in common id by id, so prefix caches see the real thing. Lengths are log-normal: most answers are
short, a few are very long. Chat lengths follow the means published for LMSYS-Chat-1M (Zheng et al., 2023, table 1): 2.0
turns a conversation, 69.5 tokens a prompt, 214.5 tokens an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from tgi.router.memory.packed import ID_BYTES


@dataclass(frozen=True, slots=True)
class Turn:
    """One request, and the answer it will get."""

    prompt: bytes  # u32 ids, the whole of it: a chat's later turn begins with the earlier ones and their answers
    answer: bytes  # u32 ids; the model ends it by itself after the last
    pause_s: float = 0.0  # from the end of the answer before to this request

    @property
    def num_prompt(self) -> int:
        return len(self.prompt) // ID_BYTES

    @property
    def num_answer(self) -> int:
        return len(self.answer) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; a single request is a conversation of one turn."""

    begins_s: float
    turns: tuple[Turn, ...]
    client: str = ""  # for whom, where several share the server
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    conversations: tuple[Conversation, ...]  # by time
    lengths_known: bool = False  # every request says its answer's length as its `max_tokens`; else that is unset

    @property
    def window_s(self) -> float:
        """The last conversation's beginning: until then the load is on."""
        return self.conversations[-1].begins_s

    @property
    def turns(self) -> Iterator[Turn]:
        return (turn for conversation in self.conversations for turn in conversation.turns)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts. `spread` is the standard deviation of the logarithm: at 1.0 one in a hundred is ten
    times the median."""

    mean: float
    spread: float
    most: int = 1 << 20

    def draw(self, random: Random, most: int | None = None) -> int:
        length = random.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return max(1, min(round(length), self.most if most is None else min(most, self.most)))


CHAT_PROMPT = Lengths(69.5, 1.0, most=2_000)
CHAT_ANSWER = Lengths(214.5, 1.0)
CHAT_TURNS = 2.0  # mean; geometric
CHAT_PAUSE_S = 8.0  # mean; exponential
DOCUMENT = Lengths(3_000, 0.4)
DOCUMENT_SHARE = 0.25
SYSTEM_PROMPT = 1_500  # tokens
JOB = 8  # questions that an application asks at once
NEWEST_SHARE = 0.75


def known(trace: Trace) -> Trace:
    """The same trace from clients who say how long each answer will be."""
    return replace(trace, lengths_known=True)


def poisson(seed: int, *, requests: int, rate: float, limit: int) -> Trace:
    """Single questions at random moments, `rate` a second. `limit`: tokens of prompt and answer together."""
    random = Random(seed)
    times = _moments(random, requests, rate)
    return Trace(_single(times, (_question(random, limit) for _ in range(requests))))


def bursts(seed: int, *, requests: int, size: int, every_s: float, limit: int) -> Trace:
    """`size` single questions at the same moment, again and again."""
    random = Random(seed)
    times = [index // size * every_s for index in range(requests)]
    return Trace(_single(times, (_question(random, limit) for _ in times)))


def chats(seed: int, *, requests: int, rate: float, limit: int) -> Trace:
    """Conversations, `rate` new ones a second, until there are about so many requests. Everyone reads the answer before
    asking on, so a slow server is asked later."""
    random = Random(seed)
    times = _moments(random, max(1, round(requests / CHAT_TURNS)), rate)
    return Trace(tuple(Conversation(at, tuple(_chat(random, limit))) for at in times))


def documents(seed: int, *, requests: int, rate: float, limit: int) -> Trace:
    """Single questions, a quarter of them about a long document that comes along."""
    random = Random(seed)
    most = limit * 3 // 4

    def turn() -> Turn:
        if random.random() >= DOCUMENT_SHARE:
            return _question(random, limit)
        return _turn(random, _ids(random, DOCUMENT.draw(random, most)), limit)

    times = _moments(random, requests, rate)
    return Trace(_single(times, (turn() for _ in times)))


def shared_prompts(seed: int, *, requests: int, rate: float, apps: int, limit: int) -> Trace:
    """Questions to `apps` applications, each with a system prompt of its own, which come up one after the other. An
    application asks several questions at the same moment; three times in four it is the newest that asks, else any."""
    random = Random(seed)
    systems = [_ids(random, SYSTEM_PROMPT) for _ in range(apps)]
    jobs = -(-requests // JOB)
    talks: list[Conversation] = []
    for job, at in enumerate(_moments(random, jobs, rate / JOB)):
        newest = job * apps // jobs
        system = systems[newest if random.random() < NEWEST_SHARE else random.randrange(newest + 1)]
        talks += [Conversation(at, (_turn(random, system + _said(random, limit), limit),)) for _ in range(JOB)]
    return Trace(tuple(talks[:requests]))


def flooded(seed: int, *, requests: int, rate: float, limit: int) -> Trace:
    """Two clients: one sends nine tenths of all at once, in five floods; the other a question at a time, steadily."""
    random = Random(seed)
    quiet = [
        Conversation(at, (_question(random, limit),), "quiet")
        for at in _moments(random, max(1, requests // 10), rate / 10)
    ]
    until = quiet[-1].begins_s
    flood = [
        Conversation(until * (index * 5 // requests) / 5, (_question(random, limit),), "flood")
        for index in range(requests - len(quiet))
    ]
    return Trace(tuple(sorted([*flood, *quiet], key=lambda talk: talk.begins_s)))


def ranked(seed: int, *, requests: int, rate: float, limit: int) -> Trace:
    """Poisson arrivals of two priorities: one in five is of the higher."""
    trace = poisson(seed, requests=requests, rate=rate, limit=limit)
    random = Random(seed + 1)
    return replace(
        trace,
        conversations=tuple(replace(talk, priority=int(random.random() < 0.2)) for talk in trace.conversations),
    )


def _moments(random: Random, count: int, rate: float) -> list[float]:
    """Poisson arrivals, the first at 0."""
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + random.expovariate(rate))
    return times


def _single(times: Iterable[float], turns: Iterable[Turn]) -> tuple[Conversation, ...]:
    return tuple(Conversation(at, (turn,)) for at, turn in zip(times, turns))


def _question(random: Random, limit: int) -> Turn:
    return _turn(random, _said(random, limit), limit)


def _chat(random: Random, limit: int) -> Iterator[Turn]:
    history, pause_s = b"", 0.0
    while True:
        history += _said(random, limit)
        turn = _turn(random, history, limit, pause_s)
        yield turn
        history += turn.answer
        # A conversation that has filled half of what the server takes ends there.
        if random.random() < 1 / CHAT_TURNS or len(history) > limit * ID_BYTES // 2:
            return
        pause_s = random.expovariate(1 / CHAT_PAUSE_S)


def _said(random: Random, limit: int) -> bytes:
    """What somebody types."""
    return _ids(random, CHAT_PROMPT.draw(random, limit // 4))


def _turn(random: Random, prompt: bytes, limit: int, pause_s: float = 0.0) -> Turn:
    answer = _ids(random, CHAT_ANSWER.draw(random, limit - len(prompt) // ID_BYTES))
    return Turn(prompt, answer, pause_s)


def _ids(random: Random, count: int) -> bytes:
    return random.randbytes(count * ID_BYTES)
