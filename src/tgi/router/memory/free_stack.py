"""The free blocks of a pool as a stack of packed u32. Knows no rows and no prefixes."""

from __future__ import annotations

from array import array

from tgi.router.memory.packed import BLOCK_BYTES


class FreeStack:
    """Blocks first..num_blocks-1, the highest on top. Take and give cost a copy of the blocks concerned, no more."""

    __slots__ = ("_buffer", "num_free")

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        self._buffer = bytearray(array("I", range(first, num_blocks)).tobytes())
        self.num_free = num_blocks - first

    def take(self, count: int) -> bytearray:
        """The topmost `count` blocks, lowest place first. The caller has made sure that they are there."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked of {self.num_free}"
        end = self.num_free * BLOCK_BYTES
        self.num_free -= count
        return self._buffer[self.num_free * BLOCK_BYTES : end]

    def give(self, blocks: bytes | bytearray) -> None:
        begin = self.num_free * BLOCK_BYTES
        end = begin + len(blocks)
        assert end <= len(self._buffer), "more blocks given back than the pool has"
        self._buffer[begin:end] = blocks
        self.num_free += len(blocks) // BLOCK_BYTES

    def snapshot(self) -> bytes:
        """What is free, for checks."""
        return bytes(self._buffer[: self.num_free * BLOCK_BYTES])
