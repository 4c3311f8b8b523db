"""How long a prompt and its answer may be: arithmetic alone. Knows no tokenizer, no request and no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from tgi.errors import ContextTooLong, InvalidRequest

CHECKED_NEW_TOKENS = 1024
"""TGI's routes check no more than this of `max_new_tokens` against the limit; a longer wish is cut to what fits."""


@dataclass(frozen=True, slots=True)
class LengthRule:
    """The limits in tokens, and what a route calls the two numbers that they bound."""

    max_input: int
    max_total: int
    input_name: str = "inputs"
    output_name: str = "max_new_tokens"
    cut_to_fit: bool = True  # TGI's routes; else a wish beyond the limit is refused (`/v1`)


def check_truncate(truncate: int | None, rule: LengthRule) -> None:
    """Raises InvalidRequest unless `truncate` is within 1 and the longest input."""
    if truncate is not None and not 0 < truncate <= rule.max_input:
        raise InvalidRequest(
            f"`truncate` must be strictly positive and less than {rule.max_input}. Given: {truncate}", "truncate"
        )


def max_new_tokens(num_input: int, wish: int | None, rule: LengthRule) -> int:
    """How many tokens the answer of a prompt of `num_input` tokens may have: at least 1, at most `wish` and what fits.

    Raises ContextTooLong with both counts. `wish` is positive, or None for as many as fit.
    """
    room = rule.max_total - num_input
    if rule.cut_to_fit:
        checked = max(room, 0) if wish is None else min(wish, CHECKED_NEW_TOKENS)
        if checked > room:
            raise _total_too_long(num_input, checked if wish is None else wish, rule)
        if num_input > rule.max_input:
            raise _input_too_long(num_input, rule)
    else:
        # A prompt too long by itself must not be blamed on the answer's length, nor the other way round.
        if num_input > rule.max_input:
            raise _input_too_long(num_input, rule)
        if wish is not None and wish > room:
            raise _total_too_long(num_input, wish, rule)
    return room if wish is None else min(wish, room)


def _total_too_long(num_input: int, num_output: int, rule: LengthRule) -> ContextTooLong:
    return ContextTooLong(
        f"`{rule.input_name}` tokens + `{rule.output_name}` must be <= {rule.max_total}. "
        f"Given: {num_input} `{rule.input_name}` tokens and {num_output} `{rule.output_name}`",
        rule.output_name if num_input <= rule.max_input else rule.input_name,
    )


def _input_too_long(num_input: int, rule: LengthRule) -> ContextTooLong:
    return ContextTooLong(
        f"`{rule.input_name}` must have less than {rule.max_input} tokens. Given: {num_input}", rule.input_name
    )
