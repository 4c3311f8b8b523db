"""The whole way on a real model: the pool is filled, a prefix evicted and brought back, and the answer is the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import GREEDY, TinyShard, pack
from tgi.errors import StartupError
from tgi.router.memory.radix import RadixAllocator
from tgi.server.engine.plan import PrefillBudget
from tgi.server.engine.warmup import size_host_cache
from tgi.shard_client.messages import Admit, BlockMoves, Command, Stopping

NEW = 6
MIB = 1 << 20


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


class Server:
    """Allocator and engine joined, one request at a time."""

    def __init__(self, shard: TinyShard, num_host_blocks: int) -> None:
        self.engine = shard.engine
        self.engine.open()
        self.allocator = RadixAllocator(shard.num_blocks, shard.block_size, num_host_blocks)
        self.handle = 0

    def answer(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """The ids, and how many tokens of the prompt were computed for them."""
        packed = pack(prompt)
        allocation = self.allocator.allocate(packed, len(prompt) + NEW)
        assert allocation is not None
        self.handle += 1
        admit = Admit(self.handle, packed, b"", allocation.cached_len, allocation.blocks, GREEDY, Stopping(NEW))
        moves = self.allocator.take_moves()
        moves = BlockMoves(moves.to_host, moves.sources, moves.targets)
        self.engine.apply(Command(admit=[admit], moves=moves))
        ids: list[int] = []
        computed = 0
        while self.engine.has_rows:
            step = self.engine.step()
            assert step is not None
            ids += step.token_ids
            computed += step.timings.prefill_tokens
        self.allocator.free(allocation, packed + pack(ids[:-1]), len(prompt) + NEW - 1)
        self.allocator.check([])
        return ids, computed


@pytest.mark.parametrize(("attention", "block_size"), [("torch", 1), ("torch", 16), ("cpu", 64), ("torch", 256)])
def test_a_prefix_that_was_evicted_comes_back_with_the_same_answer(
    model_path: Path, attention: str, block_size: int
) -> None:
    length = max(96, 2 * block_size)
    pool = (length + NEW) * 3 // 2 // block_size + 2  # for one of them and a half
    shard = TinyShard(
        model_path,
        attention=attention,
        block_size=block_size,
        num_blocks=pool,
        num_host_blocks=4 * pool,
        budget=PrefillBudget(alone=512, beside_decode=512, chunked=True),
    )
    prompts = [[(number * 31 + 7 * position) % 400 for position in range(length + 1)] for number in range(3)]
    cold = [Server(shard, 0).answer(prompt) for prompt in prompts]
    assert all(computed == len(prompt) for prompt, (_, computed) in zip(prompts, cold))
    server = Server(shard, 4 * pool)
    assert [server.answer(prompt) for prompt in prompts] == cold
    for _ in range(2):
        for prompt, (ids, _) in zip(prompts, cold):
            again, computed = server.answer(prompt)
            assert again == ids
            assert computed <= block_size + 1 < length
    assert server.allocator.num_returned * block_size >= 300


def test_blocks_that_are_not_there_are_refused_before_anything_changes(model_path: Path) -> None:
    shard = TinyShard(model_path, num_blocks=8, num_host_blocks=4)
    admit = shard.admit([1, 2, 3], 4)
    for to_host, source, target in ((1, 8, 0), (1, 0, 0), (1, 1, 4), (0, 4, 1), (0, 0, 8), (0, 0, 0)):
        moves = BlockMoves(bytes([to_host]), pack([source]), pack([target]))
        with pytest.raises(ValueError, match="block is to be moved"):
            shard.engine.apply(Command(admit=[admit], moves=moves))
    assert not shard.engine.has_rows


def test_host_memory_is_shared_by_the_ranks_and_refused_with_the_numbers() -> None:
    sizes = {"bytes_per_block": MIB, "world_size": 2, "free_bytes": 100 * MIB}
    assert size_host_cache(0, **sizes) == 0
    assert size_host_cache(65 * MIB, **sizes) == 32
    with pytest.raises(StartupError, match="asks for 101 MiB of host memory, but 100 MiB are free; lower it"):
        size_host_cache(101 * MIB, **sizes)
    with pytest.raises(StartupError, match="does not hold a single block: 2 x 1048576 bytes"):
        size_host_cache(2 * MIB - 1, **sizes)
