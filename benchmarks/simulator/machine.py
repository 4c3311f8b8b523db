"""What a simulated machine is: how long a step takes, how much KV it holds, how its engine plans.

A step's time is a sum: a base (launch, weights), each decoding row, each token of context that attention reads, each
prompt token computed. Both policies run on the same machine; neither is charged for its router.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tgi.server.engine.plan import PrefillBudget

# As warm-up has them (server/engine/warmup.py, which needs torch): a test compares.
LONGEST_STEP_S = 1.0
RUN_AHEAD_S = 0.05
WINDOW_RANGE = (4, 64)


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes."""

    decode_rows: int
    context_tokens: int  # positions that attention reads, all rows together
    prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    base_s: float
    row_s: float
    context_s: float
    prefill_s: float
    gap_s: float  # longest step beside decoding rows that the engine plans
    lag: int  # steps launched before one is collected, beyond the one that runs
    block_size: int  # ours, of the default attention backend there
    tgi_block_size: int  # TGI's, likewise
    pool_tokens: int  # KV, the same for both policies
    max_total_tokens: int
    max_batch_prefill_tokens: int
    max_rows: int

    def seconds(self, work: Work) -> float:
        return (
            self.base_s
            + work.decode_rows * self.row_s
            + work.context_tokens * self.context_s
            + work.prefill_tokens * self.prefill_s
        )

    @property
    def window(self) -> int:
        """Steps that the engine runs ahead of the router."""
        steps = math.floor(RUN_AHEAD_S / (self.base_s + self.row_s))
        return min(max(steps, WINDOW_RANGE[0]), WINDOW_RANGE[1])

    @property
    def budget(self) -> PrefillBudget:
        rate = 1 / self.prefill_s
        gap_tokens = max(self.block_size, int(rate * self.gap_s))
        alone = min(self.max_batch_prefill_tokens, max(gap_tokens, int(rate * LONGEST_STEP_S)))
        return PrefillBudget(alone=alone, beside_decode=min(gap_tokens, alone), chunked=True)

    def num_blocks(self, block_size: int) -> int:
        """Block 0, which both reserve, comes on top: both have the same tokens."""
        return self.pool_tokens // block_size + 1


# Llama-3.1-8B shape, bf16, one H200, as vLLM 0.26 runs it (measured 2026-11-29): decode steps at batch 1, 32, 128 and
# 256 with a context of about 200 take 4.90, 5.46, 6.82 and 10.42 ms; decode attention over 256 rows of 1,024 tokens
# takes 273 µs a layer of 32; a prompt of 8,192 tokens is read at 39,760 tokens/s. The pool is small, 4 GiB at 128 KiB
# a token: policies differ only where memory is short, and a larger pool needs but a larger load to be so.
H200 = Machine(
    name="H200",
    base_s=4.85e-3,
    row_s=12e-6,
    context_s=33e-9,
    prefill_s=25e-6,
    gap_s=0.05,
    lag=1,
    block_size=16,
    tgi_block_size=1,
    pool_tokens=32_768,
    max_total_tokens=8_192,
    max_batch_prefill_tokens=4_096,
    max_rows=512,
)

# SmolLM2-135M-Instruct on two CPU cores (benchmarks/results/serve_cpu.json, commit 6c6cac307c8c): 19.0, 28.0, 41.3 and
# 68.6 ms between tokens with 1, 8, 16 and 32 streams at a context of about 190, half of the slope being attention; 136
# ms to the first token of 122.
CPU = Machine(
    name="CPU",
    base_s=17.4e-3,
    row_s=0.8e-3,
    context_s=4.2e-6,
    prefill_s=0.97e-3,
    gap_s=0.2,
    lag=0,
    block_size=64,
    tgi_block_size=64,
    pool_tokens=16_384,
    max_total_tokens=4_096,
    max_batch_prefill_tokens=1_024,
    max_rows=512,
)
