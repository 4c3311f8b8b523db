"""Token arithmetic of scheduling: pure functions of numbers, without entries, queues or blocks in them."""

from __future__ import annotations

PORTION = 16  # tokens; the least a row is given at a time, so that small blocks do not mean a grant per token
SHARING_WORTH = 256  # tokens; a request waits for a stranger's prefix only if it saves at least these


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def window_tokens(window: int, speculated: int) -> int:
    """Room each row has beyond the Step that the router calls seen (rule 6)."""
    return (window + 2) * (1 + speculated)


def room_wanted(num_tokens: int, room: int, window: int, limit: int) -> int:
    """Room for a row of `num_tokens` that has `room`: the window beyond, by a portion at least, never past `limit`.

    All in tokens; `window` as from window_tokens, `limit` the most tokens the row can ever have.
    """
    if room >= min(num_tokens + window, limit):
        return room
    return min(max(num_tokens + window, room + PORTION), limit)


def would_stop(num_tokens: int, room: int, speculated: int, limit: int) -> bool:
    """Is there room for fewer than two more steps? Only then another row is made to give way."""
    return room < min(num_tokens + 2 * (1 + speculated), limit)


def admission_reserve(num_rows: int, block_size: int) -> int:
    """Blocks that stay available after an admission: one portion for every row that runs already.

    In whole blocks for each row, not for all together: rows ask for blocks one by one. Sharing the rounding would let
    14 % more chats run where blocks are of 64 tokens, for 5 % more output; but rows then give way to each other, and
    the longest pause of a stream grows from 0.3 s to 3 s, and to 10 s with shared prompts (benchmarks/simulator, CPU).
    """
    return num_rows * blocks_for(PORTION, block_size)


def least_admission(
    num_rows: int, waiting_tokens: int, waiting_served_ratio: float, max_waiting_tokens: int
) -> int | None:
    """How many must wait before prefill may interrupt `num_rows` decoding rows, where prefill cannot be chunked.

    `waiting_tokens` counts decode steps since the last admission. None: they have decoded for long enough.
    """
    if waiting_tokens >= max_waiting_tokens:
        return None
    return int(num_rows * waiting_served_ratio)
