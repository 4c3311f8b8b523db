"""What a tokenizer's files say, whatever their format: the library's object and the facts beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tokenizers
from tokenizers import processors


@dataclass(slots=True)
class TokenizerSource:
    """Read once at start by `directory.py` or `gguf_vocabulary.py`, then owned by the Tokenizer."""

    backend: tokenizers.Tokenizer
    named_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token", "eos_token", "pad_token" … -> text
    eos_ids: tuple[int, ...] = ()  # of every file that names one
    chat_templates: dict[str, str] = field(default_factory=dict)  # "default" …

    def token_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)


def set_begin_and_end(source: TokenizerSource, add_bos: bool, add_eos: bool) -> None:
    """Make encoding with special tokens put BOS before and EOS behind the text, or not, as told.

    A token that the model does not have is not added.
    """
    bos = source.named_tokens.get("bos_token") if add_bos and source.token_id("bos_token") is not None else None
    eos = source.named_tokens.get("eos_token") if add_eos and source.token_id("eos_token") is not None else None
    pieces = [bos, "$A", eos]
    named = {text: source.backend.token_to_id(text) for text in (bos, eos) if text is not None}
    wanted = [named[text] for text in (bos, eos) if text is not None]
    if source.backend.encode("", add_special_tokens=True).ids == wanted:
        return  # its own post-processor does so already
    source.backend.post_processor = processors.TemplateProcessing(
        single=[piece for piece in pieces if piece is not None],
        pair=None,
        special_tokens=list(named.items()),
    )


def templates_of(value: object) -> dict[str, str]:
    """`chat_template` of a JSON file: one text, or a list of `{"name", "template"}`."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return {
            entry["name"]: entry["template"]
            for entry in value
            if isinstance(entry, Mapping)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
    return {}
