"""Evicted prefixes go to the host and come back; what nobody saw happen is not believed in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.scheduling import Link, joined, make_request, submit
from tests.fakes.scripted_shard import PlainShard, alone
from tgi.router.memory.moves import Moves
from tgi.router.scheduling.block_moves import UnconfirmedMoves
from tgi.router.validation.request import ValidRequest
from tgi.shard_client.messages import Command

VOCABULARY = 50
POOL_BLOCKS = 20


def joined_with_a_host(block_size: int = 16, num_host_blocks: int = 100) -> Link:
    return joined(
        PlainShard(
            num_blocks=POOL_BLOCKS + 1, block_size=block_size, prefill_budget=512, num_host_blocks=num_host_blocks
        )
    )


def filling(link: Link, number: int) -> ValidRequest:
    """A prompt that takes more than half of the pool, unlike those of other numbers."""
    size = link.core.allocator.block_size
    return make_request([(number + 7 * position) % VOCABULARY for position in range(12 * size)], 4)


def ask(link: Link, request: ValidRequest) -> int:
    """Run it alone; the answer is right. -> positions that the shard computed for it."""
    before = link.shard.num_computed  # pyright: ignore[reportAttributeAccessIssue]
    _, sink = submit(link, request)
    link.run()
    link.check()
    assert sink.ids == alone(request, VOCABULARY)
    return link.shard.num_computed - before  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_what_was_evicted_comes_back_by_copy(block_size: int) -> None:
    link = joined_with_a_host(block_size)
    first, second = filling(link, 1), filling(link, 2)
    cold = ask(link, first)
    ask(link, second)
    assert link.core.stats.offloaded_blocks == link.core.stats.evicted_blocks > 0
    warm = ask(link, first)
    assert warm <= block_size + 4
    assert cold > 11 * block_size
    stats = link.core.stats
    assert stats.returned_blocks >= 4
    assert 0 < stats.blocks_host <= stats.offloaded_blocks - stats.returned_blocks
    assert stats.blocks_live == 0


def test_a_short_piece_is_computed_again() -> None:
    """Three blocks are not worth a copy, and their host blocks are free once they are in the cache anew."""
    link = joined_with_a_host()
    ask(link, filling(link, 1))
    ask(link, make_request([3] * 10 * 16, 4))
    assert link.core.stats.offloaded_blocks == 3
    ask(link, filling(link, 1))
    assert link.core.stats.returned_blocks == 0
    link.check()


def test_a_full_host_drops_the_oldest() -> None:
    link = joined_with_a_host(num_host_blocks=12)
    for number in range(5):
        ask(link, filling(link, number))
    assert link.core.stats.blocks_host == 12
    assert ask(link, filling(link, 0)) > 11 * 16, "long gone"
    assert ask(link, filling(link, 4)) < 11 * 16, "the last before it"


def test_a_flush_empties_both() -> None:
    link = joined_with_a_host()
    for number in range(3):
        ask(link, filling(link, number))
    link.core.flush_cache()
    stats = link.core.stats
    assert (stats.blocks_host, stats.blocks_cached) == (0, 0)
    link.check()
    assert ask(link, filling(link, 1)) > 11 * 16


def test_another_kv_cache_means_another_host() -> None:
    link = joined_with_a_host()
    for number in range(3):
        ask(link, filling(link, number))
    offloaded = link.core.stats.offloaded_blocks
    link.shard.renew_cache(2)  # pyright: ignore[reportAttributeAccessIssue]
    link.open()
    stats = link.core.stats
    assert stats.blocks_host == 0
    assert stats.offloaded_blocks == offloaded, "counted on"
    assert ask(link, filling(link, 1)) > 11 * 16


def test_without_one_nothing_is_moved() -> None:
    link = joined(PlainShard(num_blocks=POOL_BLOCKS + 1, prefill_budget=512))
    for number in range(3):
        ask(link, filling(link, number))
    assert link.core.stats.evicted_blocks > 0
    assert link.core.stats.offloaded_blocks == 0
    assert not any(command.moves for command in link.shard.log)  # pyright: ignore[reportAttributeAccessIssue]


def _with_moves(link: Link) -> Iterator[Command]:
    return (command for command in link.commands if command.moves)


@pytest.mark.parametrize("has_arrived", [False, True], ids=["never-arrived", "arrived"])
@pytest.mark.parametrize("is_return", [False, True], ids=["out", "back"])
def test_copies_on_the_way_when_the_stream_breaks_are_not_believed_in(has_arrived: bool, is_return: bool) -> None:
    link = joined_with_a_host()
    first, second, third = (filling(link, number) for number in range(3))
    ask(link, first)
    if is_return:
        ask(link, second)
    moving = first if is_return else second
    _, sink = submit(link, moving)
    link.say()
    (command,) = _with_moves(link)
    assert (0 in command.moves.to_host) == is_return
    if has_arrived:
        link.hear()
    link.open()  # the same KV cache: the tree stays, but for what those copies were to be
    link.check()
    link.run()
    assert sink.ids == alone(moving, VOCABULARY)
    for request in (first, second, third, second, first):
        ask(link, request)


def test_what_was_confirmed_stays_over_a_break() -> None:
    link = joined_with_a_host()
    ask(link, filling(link, 1))
    ask(link, filling(link, 2))
    ask(link, make_request([1], 12))  # steps go by
    used = link.core.stats.blocks_host
    assert used > 0
    link.open()
    assert link.core.stats.blocks_host == used
    assert ask(link, filling(link, 1)) <= 16 + 4


def test_a_step_beyond_the_window_confirms() -> None:
    class Noting:
        def __init__(self) -> None:
            self.forgotten: list[Moves] = []

        def forget(self, moves: Iterator[Moves]) -> None:
            self.forgotten = list(moves)

    moves = [Moves(bytes([1]), bytes(4), bytes([number, 0, 0, 0])) for number in range(3)]
    for step_number, doubtful in ((7, moves), (8, moves[1:]), (9, moves[2:]), (12, [])):
        unconfirmed, allocator = UnconfirmedMoves(), Noting()
        for seen, some in zip((3, 4, 7), moves):
            unconfirmed.say(seen, some)
        unconfirmed.say(7, Moves())
        unconfirmed.confirm(step_number, window=4)
        unconfirmed.stream_lost(allocator)  # pyright: ignore[reportArgumentType]
        assert allocator.forgotten == doubtful
