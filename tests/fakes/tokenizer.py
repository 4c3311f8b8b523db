"""Small tokenizers without a model: one token per byte, a SentencePiece-like one, and a writer of GGUF metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tgi.text.source import TokenizerSource, set_begin_and_end
from tgi.text.tokenizer import Tokenizer

BOS, EOS, TURN_END = "<s>", "</s>", "<|im_end|>"
SPECIAL = (BOS, EOS, TURN_END)
BOS_ID, EOS_ID, TURN_END_ID = 256, 257, 258

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer(
    extra: Sequence[str] = (), chat_template: str | None = CHAT_TEMPLATE, adds_bos: bool = False
) -> Tokenizer:
    """Id b is byte b; then the special tokens; then `extra`, each a token of its own that encoding never makes."""
    source = _byte_source(extra, chat_template)
    set_begin_and_end(source, add_bos=adds_bos, add_eos=False)
    return Tokenizer(source)


def write_byte_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """The same as files of a model directory."""
    directory.mkdir(parents=True, exist_ok=True)
    source = _byte_source((), chat_template)
    source.backend.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def ids_of(text: str | bytes) -> list[int]:
    """The byte tokenizer's ids of a text without special tokens."""
    return list(text.encode() if isinstance(text, str) else text)


def packed(ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(ids)}I", *ids)


def unpacked(ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // 4}I", ids))


def byte_alphabet() -> list[str]:
    """The character that stands for each byte, in the order of the bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _byte_source(extra: Sequence[str], chat_template: str | None) -> TokenizerSource:
    alphabet = byte_alphabet()
    vocab = {character: byte for byte, character in enumerate(alphabet)} | {
        token: 256 + i for i, token in enumerate(SPECIAL)
    }
    for token in extra:
        spelled = "".join(alphabet[byte] for byte in token.encode())
        assert spelled not in vocab, token
        vocab[spelled] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return TokenizerSource(
        backend,
        named_tokens={"bos_token": BOS, "eos_token": EOS},
        eos_ids=(EOS_ID, TURN_END_ID),
        chat_templates={} if chat_template is None else {"default": chat_template},
    )


# GGUF value types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


def write_gguf(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF file with metadata and no tensors. Values: bool, int, float, str, and lists of them."""
    body = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body)
    return path


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _kind(value[0])
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_scalar(kind, one) for one in value)
    kind = _kind(value)
    return struct.pack("<I", kind) + _scalar(kind, value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    return {int: _I32, float: _F32, str: _STRING}[type(value)]


def _scalar(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _string(value)
    return struct.pack({_BOOL: "<?", _I32: "<i", _F32: "<f"}[kind], value)


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_PIECES = {"▁": -9.0, "a": -9.1, "b": -9.2, "c": -9.3, "▁a": -1.0, "ab": -2.0, "bc": -1.5, "▁abc": -0.5, "abc": -3.0}


def sentencepiece(**more: Any) -> dict[str, Any]:
    """GGUF metadata of a small SentencePiece vocabulary: <unk>, <s>, </s>, the 256 bytes, then SPM_PIECES."""
    pieces = list(SPM_PIECES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*SPM_TOKENS, *pieces],
        "tokenizer.ggml.scores": [0.0] * len(SPM_TOKENS) + list(SPM_PIECES.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
