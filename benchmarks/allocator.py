"""What one request costs the prefix-sharing allocator: allocate for a prompt, then free it (which publishes it).

One thread, no sockets. Ids are made beforehand. "Pool full" means that the tree fills the pool, so that every
allocation evicts; its shape is that of TGI's own allocator benchmark: 262,144 positions, 7,936 random ids below 1,024,
and room for 13 more tokens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.record import Figure, argument_parser, report
from tgi.router.memory.radix import RadixAllocator

POSITIONS = 262_144
ROOM = 13  # tokens beyond the prompt
VOCABULARY = 1_024
WARM_UP = 20


def random_ids(generator: np.random.Generator, count: int) -> bytes:
    return generator.integers(0, VOCABULARY, count, dtype=np.uint32).tobytes()


def measure(allocator: RadixAllocator, prompts: Iterable[bytes]) -> float:
    """Median microseconds of allocate + free over the prompts, after a few that do not count."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for ids in prompts:
            num_tokens = len(ids) // 4
            began = time.perf_counter_ns()
            allocation = allocator.allocate(ids, num_tokens + ROOM)
            assert allocation is not None
            allocator.free(allocation, ids, num_tokens)
            times.append(time.perf_counter_ns() - began)
    finally:
        gc.enable()
    allocator.check(())
    return statistics.median(times[WARM_UP:]) / 1_000


def random_prompts(block_size: int, rounds: int) -> float:
    generator = np.random.default_rng(1)
    fill = POSITIONS // 7_936 + 1  # until every allocation evicts
    prompts = [random_ids(generator, 7_936) for _ in range(fill + WARM_UP + rounds)]
    allocator = RadixAllocator(POSITIONS // block_size, block_size)
    measure(allocator, prompts[:fill])
    return measure(allocator, prompts[fill:])


def full_hit(block_size: int, rounds: int, length: int) -> float:
    ids = random_ids(np.random.default_rng(2), length)
    allocator = RadixAllocator(POSITIONS // block_size, block_size)
    return measure(allocator, [ids] * (WARM_UP + rounds))


def shared_prefixes(block_size: int, rounds: int) -> float:
    generator = np.random.default_rng(3)
    prefixes = [random_ids(generator, 1_024) for _ in range(64)]
    prompts = [prefixes[i % 64] + random_ids(generator, 256) for i in range(64 + WARM_UP + rounds)]
    allocator = RadixAllocator(POSITIONS // block_size, block_size)
    measure(allocator, prompts[:64])
    return measure(allocator, prompts[64:])


WORKLOADS: list[tuple[str, Callable[[int, int], float], str]] = [
    ("7,936 random tokens, pool full", random_prompts, "<= 25"),
    ("full hit, 7,936 tokens", lambda block, rounds: full_hit(block, rounds, 7_936), "<= 8"),
    ("64 shared 1,024-token prefixes + 256 own", shared_prefixes, "<= 15"),
    ("full hit, 200,000 tokens", lambda block, rounds: full_hit(block, rounds, 200_000), "<= 100"),
]


def main() -> None:
    parser = argument_parser(__doc__, "allocator")
    parser.add_argument("--rounds", type=int, default=2_000, help="requests per workload (default: 2,000)")
    parser.add_argument("--block-size", type=int, nargs="+", default=[1, 16, 64], help="tokens (default: 1 16 64)")
    arguments = parser.parse_args()
    figures = [
        Figure(f"{name}, block {block_size}", workload(block_size, arguments.rounds), "µs", target)
        for name, workload, target in WORKLOADS
        for block_size in arguments.block_size
    ]
    report(arguments, "allocator", "Allocator: allocate and free, one thread", figures)


if __name__ == "__main__":
    main()
