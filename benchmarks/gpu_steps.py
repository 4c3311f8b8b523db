"""Host time per step of the engine on a CUDA device: planning and launching, while the device runs ahead.

The bundled model in bfloat16, decoding rows of about 128 tokens. Needs a GPU; no server is started.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.record import Figure, argument_parser, report

BATCHES = (1, 64)
PROMPT = 96
NEW = 120
SKIP = 16  # steps of warm-up: the allocator, lazily loaded kernels


def measure(rows: int) -> tuple[float, float]:
    """(median host µs of plan + launch, median µs from one collected step to the next)."""
    import torch

    from tests.fakes.tiny_shard import TinyShard
    from tgi.hub import BUNDLED_MODEL, locate
    from tgi.server.engine.plan import PrefillBudget
    from tgi.shard_client.messages import Command

    shard = TinyShard(
        locate(BUNDLED_MODEL),
        device="cuda:0",
        attention="paged",
        dtype=torch.bfloat16,
        num_blocks=rows * 20 + 1,
        max_rows=rows,
        budget=PrefillBudget(8192, 8192, True),
    )
    engine = shard.engine
    engine.apply(Command(admit=[shard.admit([row + 5] * PROMPT, NEW) for row in range(rows)]))
    host: list[float] = []
    between: list[float] = []
    last = time.perf_counter()
    while True:
        started = time.perf_counter()
        plan = engine.plan() if engine.num_in_flight < engine.depth else None
        if plan is not None:
            engine.launch(plan)
            host.append((time.perf_counter() - started) * 1e6)
        if engine.num_in_flight and (engine.num_in_flight >= engine.depth or plan is None):
            engine.collect()
            now = time.perf_counter()
            between.append((now - last) * 1e6)
            last = now
        elif plan is None:
            break
    return statistics.median(host[SKIP:]), statistics.median(between[SKIP:])


def main() -> None:
    arguments = argument_parser(__doc__, "gpu_steps").parse_args()
    figures: list[Figure] = []
    for rows in BATCHES:
        host_us, step_us = measure(rows)
        figures.append(Figure(f"host time per step, batch {rows}", round(host_us, 1), "µs", note="plan and launch"))
        figures.append(Figure(f"decode step, batch {rows}", round(step_us, 1), "µs", note="eager, torch attention"))
    report(arguments, "gpu_steps", "Engine steps on a GPU", figures)


if __name__ == "__main__":
    main()
