"""Token ids -> text, one id at a time. Knows nothing of stop strings and of which tokens are special.

Where a token's bytes do not depend on its neighbours (byte-level BPE, SentencePiece) they are looked up and joined, so
that a character cut across tokens appears when its last byte does. For every other decoder a small window is decoded
twice. Leading blanks stay: generated text continues its prompt.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import tokenizers

MAX_CHARACTER_BYTES = 4
WINDOW_CONTEXT = 5  # ids of the prompt that a windowed decoder sees before the first generated one
REPLACEMENT = "\ufffd"

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    def push(self, token_id: int, /) -> str:
        """The text that became complete with this token. An id without a token gives nothing."""
        ...

    def finish(self) -> str:
        """What an unfinished character leaves: U+FFFD, or nothing."""
        ...


class Pieces(dict[int, "str | bytes"]):
    """Id -> its text, or its bytes where they are no whole characters. Filled as ids occur."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, token_id: int) -> str | bytes:
        raw = self._read(token_id)
        try:
            piece: str | bytes = raw.decode("utf-8")
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece


class PieceDetokenizer:
    """Joins pieces. Equal to decoding all bytes at once with errors="replace"."""

    __slots__ = ("_decoder", "_pending", "_pieces")

    def __init__(self, pieces: Pieces, prompt_ids: bytes = b"") -> None:
        self._pieces = pieces
        self._pending = False
        self._decoder: codecs.IncrementalDecoder | None = None
        if prompt_ids and pieces[_last_id(prompt_ids)].__class__ is bytes:
            # The prompt may end within a character, which the first generated token then completes.
            tail = memoryview(prompt_ids)[-4 * MAX_CHARACTER_BYTES :].cast("I")
            for token_id in tail:
                self.push(token_id)

    def push(self, token_id: int, /) -> str:
        piece = self._pieces[token_id]
        if piece.__class__ is str and not self._pending:
            return piece  # pyright: ignore[reportReturnType]
        decoder = self._decoder
        if decoder is None:
            decoder = self._decoder = _utf8("replace")
        text = decoder.decode(piece if isinstance(piece, bytes) else piece.encode())
        self._pending = bool(decoder.getstate()[0])
        return text

    def finish(self) -> str:
        if not self._pending or self._decoder is None:
            return ""
        self._pending = False
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For decoders that look at neighbours (WordPiece's blanks): decode the last ids with and without the new ones."""

    __slots__ = ("_backend", "_ids", "_num_read", "_size", "_text")

    def __init__(self, backend: tokenizers.Tokenizer, size: int, prompt_ids: bytes = b"") -> None:
        self._backend = backend
        self._size = size
        self._ids = list(memoryview(prompt_ids)[-4 * WINDOW_CONTEXT :].cast("I")) if prompt_ids else []
        self._num_read = len(self._ids)  # ids whose text has been given out
        self._text = self._decode(self._ids)

    def push(self, token_id: int, /) -> str:
        if not 0 <= token_id < self._size:
            return ""
        self._ids.append(token_id)
        whole = self._decode(self._ids)
        if whole.endswith(REPLACEMENT) and len(self._ids) - self._num_read < MAX_CHARACTER_BYTES:
            return ""
        return self._give(whole)

    def finish(self) -> str:
        return self._give(self._decode(self._ids)) if self._num_read < len(self._ids) else ""

    def _give(self, whole: str) -> str:
        text = whole[len(self._text) :]
        recent = self._decode(self._ids[self._num_read :])
        if recent:
            self._ids = self._ids[self._num_read :]
            self._text = recent
        else:  # ids without text are no context for those that follow
            self._text = whole
        self._num_read = len(self._ids)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=True) if ids else ""


def read_pieces(backend: tokenizers.Tokenizer, added: Mapping[int, str], size: int) -> Pieces | None:
    """The pieces of a tokenizer whose decoder treats every token alone, else None."""
    rule = _piece_rule(backend)
    if rule is None:
        return None

    def read(token_id: int) -> bytes:
        if token_id in added:
            return rule(added[token_id], True)
        token = backend.id_to_token(token_id) if 0 <= token_id < size else None
        return b"" if token is None else rule(token, False)

    return Pieces(read)


def _piece_rule(backend: tokenizers.Tokenizer) -> Callable[[str, bool], bytes] | None:
    """(token, was it added to the vocabulary) -> bytes."""
    decoder = backend.decoder
    if decoder is None:
        return None
    steps = _steps(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    blank = None
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": " "}:
                blank = pattern
            case {"type": "Metaspace", "replacement": str(pattern)}:
                blank = pattern
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0}:
                pass  # the blank before a whole text; generated text has none to lose
            case _:
                return None
    if blank is None:
        return None
    has_bytes = "ByteFallback" in kinds

    def rule(token: str, is_added: bool) -> bytes:
        if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(blank, " ").encode()

    return rule


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _byte_characters() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte is its own Latin-1 character, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()


def _byte_level_bytes(token: str, is_added: bool) -> bytes:
    if is_added:
        return token.encode()  # added tokens are spelled as they are, not in the alphabet
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()  # a token outside the alphabet stands for itself


def _last_id(ids: bytes) -> int:
    return int.from_bytes(ids[-4:], "little")
