"""Warm-up: on CUDA run the worst legal step; size the KV cache by what is left; measure the speeds planning needs.

Done once on the device's thread; the answer is kept.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from tgi.errors import StartupError
from tgi.server.attention.host_blocks import staging_bytes
from tgi.server.batch.step import RowChanges, Scoring, StepPlan
from tgi.server.config import ShardConfig
from tgi.server.engine.engine import Limits
from tgi.server.engine.leader import LeaderDevice
from tgi.server.engine.plan import PrefillBudget
from tgi.server.models.model import RowKeeper
from tgi.server.platforms.cpu import free_memory as host_memory
from tgi.server.platforms.platform import Platform
from tgi.shard_client.messages import Admit, Sampling, Stopping, WarmupRequest, WarmupResult

log = logging.getLogger(__name__)

MIB = 1 << 20
GIB = 1 << 30
# A CPU's memory belongs to other programs too: a KV cache that nobody asked for stays modest.
CPU_KV_SHARE = 4  # a quarter of what the weights leave
CPU_KV_LIMIT = 2 * GIB
GAP_S = {"cpu": 0.2, "cuda": 0.05}  # longest step while rows decode
LONGEST_STEP_S = 1.0  # longest step at all, where prompts can be read in pieces
RUN_AHEAD_S = 0.05
WINDOW_RANGE = (4, 64)
SPEED_PROMPT = 256  # tokens of the prompt that measures prefill speed: enough to leave the launch cost behind
SPEED_DECODES = 4
PLAIN = Sampling(do_sample=True, temperature=0.9, top_k=10, top_p=0.9, seed=1)
# Whatever takes memory per row: what some rows need later is left free, though it is not taken before.
EVERYTHING = replace(
    PLAIN,
    typical_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    watermark=True,
    raw_logprobs=True,
    logit_bias=((0, 1.0),),
    bad_words=((0, 1),),
)
SCORED_TOPS = 5  # alternatives at each prompt token of the worst step
DEFAULT_MAX_POSITION = 4096  # for a config that names none


def prefill_budget(
    asked: int, gap_tokens: int, prefill_rate: float, chunked: bool, scale: float = 1.0, padded: bool = False
) -> PrefillBudget:
    """Pure: the tokens of one step. `asked` is `max_batch_prefill_tokens`; where prompts can be read in pieces a slow
    machine takes smaller ones, since nobody can come between while a step runs, not even to cancel it. `scale`: below 1
    after a group of ranks ran out of memory."""
    if not chunked:
        asked = max(1, int(asked * scale))
        return PrefillBudget(alone=asked, beside_decode=asked, chunked=False, padded=padded)
    alone = max(1, int(scale * min(asked, max(gap_tokens, int(prefill_rate * LONGEST_STEP_S)))))
    return PrefillBudget(alone=alone, beside_decode=max(1, int(scale * min(gap_tokens, alone))), chunked=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    max_input_tokens: int
    max_total_tokens: int
    num_blocks: int


def size_cache(
    request: WarmupRequest,
    *,
    block_size: int,
    bytes_per_block: int,
    kv_bytes: int,
    at_most_bytes: int,
    max_position: int,
    longest: int | None = None,
) -> Sizes:
    """Pure: how many blocks, and the length limits that follow.

    `kv_bytes` is what the cache gets unless asked otherwise, `at_most_bytes` what it can get at all. `max_position` is
    the length of a row unless asked otherwise, `longest` what it can be at all (None: no end). Raises
    StartupError with the numbers when the asked lengths or tokens do not fit.
    """
    if longest is not None:
        max_position = min(max_position, longest)
        if request.max_total_tokens is not None and request.max_total_tokens > longest:
            raise StartupError(
                f"--max-total-tokens {request.max_total_tokens} is more than the {longest} positions that this "
                "model has learned; lower it, or leave it out"
            )
    blocks_possible = at_most_bytes // bytes_per_block
    if request.max_batch_total_tokens is not None:
        usable = -(-request.max_batch_total_tokens // block_size)
        if usable + 1 > blocks_possible:
            needed = (usable + 1) * bytes_per_block
            raise StartupError(
                f"--max-batch-total-tokens {request.max_batch_total_tokens} needs {needed / MIB:.0f} MiB "
                f"for the KV cache, but {at_most_bytes / MIB:.0f} MiB are free: "
                f"at most {max(0, blocks_possible - 1) * block_size} tokens fit; lower it, or leave it out"
            )
    else:
        usable = max(0, kv_bytes // bytes_per_block - 1)
        wanted = -(-request.max_total_tokens // block_size) if request.max_total_tokens is not None else 1
        if usable < wanted:
            usable = max(0, min(wanted, blocks_possible - 1))
    tokens = usable * block_size
    max_total = request.max_total_tokens if request.max_total_tokens is not None else min(tokens, max_position)
    if max_total > tokens or max_total < 2:
        raise StartupError(
            f"Not enough memory to handle `max_total_tokens={max_total}`: the KV cache holds {tokens} tokens "
            f"({at_most_bytes / MIB:.0f} MiB free); lower --max-total-tokens, "
            f"{'free memory' if request.max_batch_total_tokens is None else 'or raise --max-batch-total-tokens'}"
        )
    max_input = request.max_input_tokens if request.max_input_tokens is not None else max_total - 1
    if max_input >= max_total:
        raise StartupError(f"`max_input_tokens` ({max_input}) must be < `max_total_tokens` ({max_total})")
    return Sizes(max_input, max_total, usable + 1)


def size_host_cache(asked_bytes: int, *, bytes_per_block: int, world_size: int, free_bytes: int) -> int:
    """Pure: how many blocks each rank keeps on the host. `asked_bytes` and `free_bytes` are of all ranks together.

    Raises StartupError with the numbers when it does not fit, or holds nothing.
    """
    num_blocks = asked_bytes // world_size // bytes_per_block
    if asked_bytes > free_bytes:
        raise StartupError(
            f"--host-cache-bytes {asked_bytes} asks for {asked_bytes / MIB:.0f} MiB of host memory, but "
            f"{free_bytes / MIB:.0f} MiB are free; lower it, or leave it out"
        )
    if asked_bytes and not num_blocks:
        raise StartupError(
            f"--host-cache-bytes {asked_bytes} does not hold a single block: "
            f"{world_size} x {bytes_per_block} bytes; raise it, or leave it out"
        )
    return num_blocks


class WarmUp:
    """Sizes the cache of one device once; a later call returns the same answer."""

    def __init__(self, device: LeaderDevice, config: ShardConfig, platform: Platform, max_position: int | None) -> None:
        self._device = device
        self._runner = device.runner
        self._config = config
        self._platform = platform
        self._max_position = config.max_total_tokens or max_position or DEFAULT_MAX_POSITION

    def run(self, request: WarmupRequest) -> tuple[WarmupResult, Limits]:
        built_for = self._config.max_total_tokens
        if built_for is not None and (request.max_total_tokens or 0) > built_for:
            raise StartupError(
                f"--max-total-tokens {request.max_total_tokens} is more than the MAX_TOTAL_TOKENS of {built_for} that "
                "this shard was started with; give both the same"
            )
        runner = self._runner
        shape = runner.model.cache_shape
        backend = runner.backend
        bytes_per_block = shape.token_bytes * backend.block_size + backend.bytes_per_block(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, runner.dtype, shape.value_dim
        )
        on_cpu = runner.device.type == "cpu"
        at_most = self._free_bytes() - self._row_bytes(request)
        if not bytes_per_block:
            # Nothing grows with a text: a block costs no memory, and every row may have all it wants.
            request, bytes_per_block = self._with_room_for_all_rows(request), 1
        if not on_cpu:
            at_most = max(0, at_most - self._worst_step(request))
        num_host_blocks = self._host_blocks(request, bytes_per_block)
        if num_host_blocks:
            # On a CPU the blocks come out of the same memory.
            at_most -= staging_bytes(bytes_per_block) + on_cpu * num_host_blocks * bytes_per_block
            at_most = max(0, at_most)
        kv_bytes = min(at_most // CPU_KV_SHARE, CPU_KV_LIMIT) if on_cpu else at_most
        sizes = size_cache(
            request,
            block_size=backend.block_size,
            bytes_per_block=bytes_per_block,
            kv_bytes=kv_bytes,
            at_most_bytes=at_most,
            max_position=self._max_position,
            longest=shape.max_positions,
        )
        self._device.allocate(sizes.num_blocks, request.max_rows, sizes.max_total_tokens, num_host_blocks)
        decode_s, prefill_rate = self._speeds(sizes)
        window = min(max(math.floor(RUN_AHEAD_S / decode_s), WINDOW_RANGE[0]), WINDOW_RANGE[1])
        gap_tokens = max(backend.block_size, int(prefill_rate * GAP_S.get(runner.device.type, 0.05)))
        budget = prefill_budget(
            request.max_batch_prefill_tokens,
            gap_tokens,
            prefill_rate,
            self._config.prefill_chunking,
            self._config.budget_scale,
            padded=isinstance(runner.model, RowKeeper) and runner.model.requires_padding,
        )
        log.info(
            "Warmed up: %d KV tokens in %d blocks (%.0f MiB), decode step %.1f ms, prefill %.0f tokens/s, window %d",
            (sizes.num_blocks - 1) * backend.block_size,
            sizes.num_blocks,
            sizes.num_blocks * bytes_per_block / MIB,
            decode_s * 1e3,
            prefill_rate,
            window,
        )
        if num_host_blocks:
            log.info(
                "Evicted blocks go to the host: room for %d KV tokens (%.0f MiB per shard)",
                num_host_blocks * backend.block_size,
                num_host_blocks * bytes_per_block / MIB,
            )
        result = WarmupResult(
            max_input_tokens=sizes.max_input_tokens,
            max_total_tokens=sizes.max_total_tokens,
            max_batch_total_tokens=(sizes.num_blocks - 1) * backend.block_size,
            num_blocks=sizes.num_blocks,
            block_size=backend.block_size,
            max_rows=request.max_rows,
        )
        limits = Limits(
            window=window,
            budget=budget,
            num_blocks=sizes.num_blocks,
            kv_epoch=secrets.randbits(64),
            num_host_blocks=num_host_blocks,
            world_size=self._config.world_size,
            decode_s=decode_s,
            token_s=1 / prefill_rate,
        )
        return result, limits

    def _row_bytes(self, request: WarmupRequest) -> int:
        """Memory that a row takes however long its text is, for all rows. Raises StartupError where it is not there."""
        each, free = self._runner.model.cache_shape.row_bytes, self._free_bytes()
        needed = each * (request.max_rows + 1)
        if needed > free:
            raise StartupError(
                f"{request.max_rows} requests at a time need {needed / MIB:.0f} MiB for their states, but "
                f"{free / MIB:.0f} MiB are free: at most {max(0, free // each - 1)} fit; lower --max-batch-size"
            )
        return needed

    def _with_room_for_all_rows(self, request: WarmupRequest) -> WarmupRequest:
        if request.max_batch_total_tokens is not None:
            return request
        longest = request.max_total_tokens or self._max_position
        return replace(request, max_batch_total_tokens=request.max_rows * longest)

    def _host_blocks(self, request: WarmupRequest, bytes_per_block: int) -> int:
        return size_host_cache(
            request.host_cache_bytes,
            bytes_per_block=bytes_per_block,
            world_size=self._config.world_size,
            free_bytes=int(host_memory() * self._config.wiggle_room),
        )

    def _free_bytes(self) -> int:
        """What the KV cache may take on every rank, in bytes."""
        return self._device.smallest(free_bytes(self._platform, self._runner.device, self._config))

    def _worst_step(self, request: WarmupRequest) -> int:
        """Bytes that the largest legal step needs beside weights and cache: it is run once, on a cache made for it,
        with all its rows sampling, using every control, and wanting their prompts' logprobs."""
        model, backend, tokens = self._runner.model, self._runner.backend, request.max_batch_prefill_tokens
        longest = min(tokens, model.cache_shape.max_positions or tokens)
        num_rows = max(1, min(request.max_rows, tokens // 2))
        shapes = [(num_rows, min(tokens // num_rows, longest))]
        if isinstance(model, RowKeeper) and not model.can_chunk:
            # Attention of its own may take the square of a text's length.
            shapes.append((1, min(longest, request.max_total_tokens or longest)))
        most = 0
        try:
            for num_rows, each in shapes:
                blocks_each = -(-each // backend.block_size)
                self._device.allocate(1 + blocks_each * num_rows, num_rows, each)
                torch.cuda.reset_peak_memory_stats(self._runner.device)
                before = torch.cuda.memory_allocated(self._runner.device)
                self._prompts(num_rows, each, blocks_each, EVERYTHING, scored=True)
                most = max(most, torch.cuda.max_memory_allocated(self._runner.device) - before)
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"Not enough memory to handle {tokens} prefill tokens. You need to decrease --max-batch-prefill-tokens"
            ) from error
        return most

    def _speeds(self, sizes: Sizes) -> tuple[float, float]:
        """(seconds of the fastest decode step at batch 1, prompt tokens per second)."""
        block_size = self._runner.backend.block_size
        room = min(sizes.max_total_tokens, (sizes.num_blocks - 1) * block_size)
        length = max(1, min(SPEED_PROMPT, room - SPEED_DECODES - 1))
        blocks = min(sizes.num_blocks - 1, -(-(length + SPEED_DECODES + 1) // block_size))
        fastest_prompt = min(self._prompts(1, length, blocks) for _ in range(2))
        decodes = min(SPEED_DECODES, blocks * block_size - length)
        fastest_decode = min((self._decode(length + index) for index in range(decodes)), default=fastest_prompt)
        self._device.apply(RowChanges(removed=[1], added=[], blocks=[]))
        return max(fastest_decode, 1e-4), length / max(fastest_prompt, 1e-6)

    def _prompts(
        self, num_rows: int, length: int, blocks_each: int, sampling: Sampling = PLAIN, scored: bool = False
    ) -> float:
        """Read `num_rows` prompts in one step; seconds. Rows 1… stay, blocks 1… are theirs."""
        vocab_size = self._runner.model.vocab_size
        prompt = (np.arange(length) * 7919 % vocab_size).astype(np.uint32)
        rows = np.arange(1, num_rows + 1, dtype=np.int64)
        added = [
            (row, Admit(row, prompt.tobytes(), b"", 0, b"", sampling, Stopping(max_new_tokens=length)))
            for row in rows.tolist()
        ]
        blocks = np.arange(1, num_rows * blocks_each + 1, dtype=np.int32).reshape(num_rows, blocks_each)
        self._device.apply(RowChanges([], added, [(row, 0, blocks[row - 1]) for row in rows.tolist()]))
        scoring = None
        if scored:
            targets = np.tile(prompt[1:], num_rows).astype(np.int64)
            scoring = Scoring(np.full(num_rows, length - 1, np.int64), targets, SCORED_TOPS)
        return self._timed(
            StepPlan(
                number=0,
                handles=rows.astype(np.uint64),
                rows=rows,
                starts=np.zeros(num_rows, np.int64),
                query_lens=np.full(num_rows, length, np.int64),
                samples=np.ones(num_rows, np.bool_),
                from_device=np.zeros(num_rows, np.bool_),
                ids=np.tile(prompt, num_rows).astype(np.int64),
                scoring=scoring,
            )
        )

    def _decode(self, position: int) -> float:
        one = np.ones(1, np.int64)
        return self._timed(
            StepPlan(
                number=0,
                handles=np.ones(1, np.uint64),
                rows=one,
                starts=np.full(1, position, np.int64),
                query_lens=one,
                samples=np.ones(1, np.bool_),
                from_device=np.ones(1, np.bool_),
                ids=np.zeros(1, np.int64),
            )
        )

    def _timed(self, plan: StepPlan) -> float:
        started = time.perf_counter()
        self._device.collect(self._device.launch(plan))
        return time.perf_counter() - started


def free_bytes(platform: Platform, device: torch.device, config: ShardConfig) -> int:
    """Memory of this rank that the KV cache may take, wiggle room left out."""
    free = platform.free_memory(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        _, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1 - config.cuda_memory_fraction * config.wiggle_room) * total))
    # Ranks on one CPU share its memory.
    return int(free * config.wiggle_room) // config.world_size
