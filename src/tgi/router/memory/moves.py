"""Moves: copies of whole blocks between the KV cache and the host's memory, as columns. Knows not who makes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moves:
    """To be made in this order."""

    to_host: bytes = b""  # u8; 1: from the cache to the host, 0: back
    sources: bytes = b""  # u32, where the block is
    targets: bytes = b""  # u32, where it goes

    def __len__(self) -> int:
        return len(self.to_host)


NONE = Moves()
