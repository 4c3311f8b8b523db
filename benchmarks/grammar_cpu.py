"""What a grammar costs on this machine's CPU, with the bundled model over HTTP: tokens per second with and without one,
and how much later the first token of a request with a new schema comes.

With and without take turns, so that both see the same machine. All answers have 128 tokens: the schema asks for more
objects than fit, and the end of text is ignored where there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks import load
from benchmarks.load import Load, Outcome
from benchmarks.record import Figure, argument_parser, report
from benchmarks.server_process import serving

KINDS = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "array", "items": {"type": "number"}})


def people(_: int) -> dict[str, Any]:
    """A list that no answer of this benchmark completes."""
    fields = {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}, "city": {"type": "string"}}
    person = {"type": "object", "properties": fields, "required": list(fields)}
    schema = {
        "type": "object",
        "properties": {"people": {"type": "array", "items": person, "minItems": 64}},
        "required": ["people"],
    }
    return {"type": "json", "value": schema}


def ten_fields(seed: int) -> Callable[[int], dict[str, Any]]:
    """Schemas that no request before has brought."""

    def grammar(index: int) -> dict[str, Any]:
        fields = {f"field_{seed}_{index}_{number}": KINDS[number % len(KINDS)] for number in range(10)}
        return {"type": "json", "value": {"type": "object", "properties": fields, "required": list(fields)}}

    return grammar


async def throughput(url: str, clients: int, rounds: int) -> list[Figure]:
    plain = Load(clients=clients, requests=2 * clients, max_tokens=128)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds):
        for constrained in (False, True):
            # New prompts for both: the same ones again would be read from the prefix cache.
            seed = 1_000 * clients + 2 * turn + constrained
            wish = replace(plain, seed=seed, grammar=people if constrained else None)
            speeds[constrained].append(_whole(await load.run(url, wish)).tokens_per_s)
    without, with_grammar = median(speeds[False]), median(speeds[True])
    label = f"{clients} stream{'s' if clients > 1 else ''}"
    return [
        Figure(f"{label}, without a grammar", without, "tokens/s"),
        Figure(f"{label}, with a JSON schema", with_grammar, "tokens/s"),
        Figure(f"{label}, loss", 100 * (1 - with_grammar / without), "%", "<= 10"),
    ]


async def first_token(url: str, turns: int) -> list[Figure]:
    """Short turns: the machine's own pace drifts by more than what is measured."""
    plain = Load(clients=1, requests=10, max_tokens=2)
    delays: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns):
        for constrained in (False, True):
            wish = replace(plain, seed=2 * turn + constrained, grammar=ten_fields(turn) if constrained else None)
            delays[constrained].append(_whole(await load.run(url, wish)).first_token_ms(50))
    without, with_schema = median(delays[False]), median(delays[True])
    return [
        Figure("first token, without a grammar", without, "ms"),
        Figure("first token, with a new schema of 10 fields", with_schema, "ms"),
        Figure("first token, later by", with_schema - without, "ms", "<= 10"),
    ]


def _whole(outcome: Outcome) -> Outcome:
    if outcome.errors:
        raise SystemExit(f"{len(outcome.errors)} of {len(outcome.answers)} requests failed: {outcome.errors[0]}")
    return outcome


async def measure(url: str, clients: list[int], rounds: int) -> list[Figure]:
    await load.run(url, Load(clients=2, requests=4, max_tokens=16, seed=-1, grammar=people))  # nothing of the start
    figures = [figure for number in clients for figure in await throughput(url, number, rounds)]
    return figures + await first_token(url, 5 * rounds)


def main() -> None:
    parser = argument_parser(__doc__, "grammar_cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind (default: 3)")
    arguments = parser.parse_args()
    with serving() as server:
        figures = asyncio.run(measure(server.url, arguments.clients, arguments.rounds))
    report(arguments, "grammar_cpu", "Grammars with SmolLM2-135M-Instruct on a CPU, over HTTP", figures)


if __name__ == "__main__":
    main()
