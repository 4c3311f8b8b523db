"""Encoding beside the event loop. A long text never holds up the loop, nor a short text behind it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from tgi.text.tokenizer import SHORT_TEXT, Encoding, Tokenizer

LONG_TEXT = 16_384  # characters; encoding more takes over 5 ms


class EncodePool:
    """A few threads. The shortest texts (0.2 ms) are encoded on the spot: a change of threads costs as much."""

    def __init__(self, tokenizer: Tokenizer, num_workers: int) -> None:
        """`num_workers` threads: one is kept for texts that are not long, unless there is only one."""
        if num_workers < 1:
            raise ValueError("num_workers must be at least 1")
        self._tokenizer = tokenizer
        self._quick = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self._slow = ThreadPoolExecutor(num_workers - 1, "encode-long") if num_workers > 1 else self._quick

    async def encode(self, text: str, add_special_tokens: bool = True, with_offsets: bool = False) -> Encoding:
        """As Tokenizer.encode; `with_offsets` makes them here rather than when they are read."""
        if len(text) <= SHORT_TEXT:
            return self._tokenizer.encode(text, add_special_tokens)
        pool = self._slow if len(text) > LONG_TEXT else self._quick
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, self._tokenizer.encode, text, add_special_tokens, with_offsets)

    def close(self) -> None:
        """Texts that wait are dropped; one that is being encoded ends by itself."""
        for pool in {self._quick, self._slow}:
            pool.shutdown(wait=False, cancel_futures=True)
