"""The grammar of an answer that may take either of two shapes. Knows no tools and no requests."""

from __future__ import annotations

from tgi.errors import InvalidRequest
from tgi.router.chat.lark import renamed_start
from tgi.router.chat.reasoning import as_rules
from tgi.router.validation.grammar import GrammarWish


def either(wish: GrammarWish, calls: GrammarWish) -> GrammarWish:
    """Text as `wish` has it, or what `calls` spells. Raises InvalidRequest where the two cannot be one grammar."""
    if wish.kind == "lark":
        raise InvalidRequest(
            f"`{wish.param}` and `tools` exclude each other: leave one out, or set `tool_choice` to `none`", wish.param
        )
    source = f"start: shape | calls\n{renamed_start(calls.value, 'calls')}\n{as_rules(wish, 'shape')}\n"
    return GrammarWish("lark", source, wish.param)
