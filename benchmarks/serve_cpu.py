"""The bundled model on this machine's CPU: tokens per second and first-token times over HTTP, and the start.

Starts the server twice: the first start may have to convert or compile, the second is what an operator waits for. Load
generator and server share the machine's cores. Prompts of about 122 tokens, 128 out, greedy, end of text ignored; and
1,000 shared prompt tokens with about 30 own, 32 out.
"""

from __future__ import annotations

import asyncio

from benchmarks import load
from benchmarks.load import Load
from benchmarks.record import Figure, argument_parser, report
from benchmarks.server_process import serving

TOKENS_PER_S = {1: ">= 100", 4: ">= 200", 8: ">= 350", 16: ">= 550", 32: ">= 800"}
FIRST_TOKEN_MS = {1: "<= 45", 32: "<= 450"}


async def measure(url: str, clients: list[int], rounds: int) -> list[Figure]:
    await load.run(url, Load(clients=2, requests=2, max_tokens=16, seed=-1))  # nothing of the start is measured
    figures = []
    for number in clients:
        outcome = await load.run(url, Load(clients=number, requests=max(4, rounds * number), seed=number))
        target, first_token_target = TOKENS_PER_S.get(number, ""), FIRST_TOKEN_MS.get(number, "")
        figures += outcome.figures(f"{number} streams", target, first_token_target)
    shared = Load(clients=8, requests=8 * rounds, prompt_words=30, shared_words=1_000, max_tokens=32)
    outcome = await load.run(url, shared)
    return figures + outcome.figures("8 streams, 1,000 shared", ">= 250")


def main() -> None:
    parser = argument_parser(__doc__, "serve_cpu")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=2, help="requests per client (default: 2)")
    parser.add_argument("options", nargs="*", metavar="FLAG", help="further flags for the launcher, after --")
    arguments = parser.parse_args()
    with serving(arguments.options) as server:
        first_start_s = server.launcher.start_s
    with serving(arguments.options) as server:
        figures = [
            Figure("first start to Connected", first_start_s, "s"),
            Figure("second start to Connected", server.launcher.start_s, "s", "<= 8"),
            *asyncio.run(measure(server.url, arguments.clients, arguments.rounds)),
        ]
    report(arguments, "serve_cpu", "SmolLM2-135M-Instruct on a CPU, over HTTP", figures)


if __name__ == "__main__":
    main()
