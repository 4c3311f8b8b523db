"""What validation needs of a tokenizer: text to ids, off the event loop (`tgi.text.pool`)."""

from __future__ import annotations

from typing import Protocol


class Encoded(Protocol):
    @property
    def ids(self) -> bytes: ...  # u32


class Encoder(Protocol):
    async def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Raises InvalidRequest for a text that is no Unicode."""
        ...
