"""Words that an answer may not hold -> sequences of token ids. Knows an encoder, no parameters."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Container, Sequence

from tgi.errors import InvalidRequest
from tgi.router.validation.encoder import Encoder
from tgi.router.validation.parameters import MAX_BAD_WORD_TOKENS

FIELD = "bad_words"
_AT_ONCE = 16  # words, before others get their turn of the event loop: under a millisecond


async def encode_bad_words(words: Sequence[str], encoder: Encoder, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Each word as it is at the beginning of a text and behind a blank: their tokens differ. Raises InvalidRequest.

    A sequence that the model cannot write is left out, and one that ends with another of them, which is never complete.
    """
    found: dict[tuple[int, ...], str] = {}
    for index, word in enumerate(words):
        if index and index % _AT_ONCE == 0:
            await asyncio.sleep(0)
        bare = word.lstrip(" ")
        for text in (bare, " " + bare):
            ids = await _encode(text, encoder)
            if ids and max(ids) < vocab_size:
                found[ids] = word
    shortest = {ids: word for ids, word in found.items() if not _ends_with_another(ids, found)}
    for ids, word in shortest.items():
        if len(ids) > MAX_BAD_WORD_TOKENS:
            limit = f"`{FIELD}` supports words of up to {MAX_BAD_WORD_TOKENS} tokens"
            raise InvalidRequest(f"{limit}. Given: {word[:40]!r} of {len(ids)}", FIELD)
    return tuple(shortest)


async def _encode(text: str, encoder: Encoder) -> tuple[int, ...]:
    try:
        return tuple(array("I", (await encoder.encode(text, False)).ids))
    except InvalidRequest as error:
        error.param = FIELD
        raise


def _ends_with_another(ids: tuple[int, ...], others: Container[tuple[int, ...]]) -> bool:
    return any(ids[start:] in others for start in range(1, len(ids)))
