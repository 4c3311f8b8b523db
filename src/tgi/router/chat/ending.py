"""How a chat's prompt ends: with the head of a new message, behind the last one, or in the middle of it.

A text that is to be continued is marked before the template runs; what the template writes behind the mark is cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tgi.errors import InvalidRequest, TemplateFailed
from tgi.router.chat.messages import REASONING_FIELDS, Messages

CONTINUE = "continue_final_message"

# Private-use characters that no template looks for.
_MARK = "\ue07a\ue0c5\ue07a"


@dataclass(frozen=True, slots=True)
class Ending:
    add_generation_prompt: bool
    fields: tuple[str, ...] = ()  # of the last message, those that hold the text to be continued
    text: str | None = None  # which is to be continued; None: a new message, or none at all
    keeps_blanks: bool = False  # at the text's end, as far as the template does

    def mark(self, messages: Messages) -> Messages:
        """Leaves those given alone."""
        if self.text is None:
            return messages
        # The blank tells whether the template keeps those at the text's end.
        marked = self.text + _MARK + (" " if self.keeps_blanks else "")
        return [*messages[:-1], {**messages[-1], **dict.fromkeys(self.fields, marked)}]

    def cut(self, prompt: str) -> str:
        """Raises TemplateFailed where the template left out what was to be continued."""
        if self.text is None:
            return prompt
        head, mark, rest = prompt.rpartition(_MARK)
        if not mark or (self.keeps_blanks and self.text.strip() not in prompt):
            raise TemplateFailed(
                "the chat template does not write the whole message that is to be continued", "messages"
            )
        return head.rstrip() if self.keeps_blanks and not rest.startswith(" ") else head

    def written(self, prompt: str) -> str | None:
        """The text to be continued as it stands at the end of `prompt`: the template may have stripped it."""
        if self.text is None or prompt.endswith(self.text):
            return self.text
        return self.text.strip()


def ending_of(messages: Messages, add_generation_prompt: bool | None, continues: bool | str | None) -> Ending:
    """TGI's habit where neither flag is given: a last message of the assistant is continued, its blanks aside.

    `continues` may name the field to go on with. Raises InvalidRequest, as transformers raises, for flags that exclude
    each other and for a last message without that field.
    """
    if add_generation_prompt and continues:
        raise InvalidRequest(
            "`add_generation_prompt` and `continue_final_message` exclude each other: one begins a new message, "
            "the other goes on with the last",
            CONTINUE,
        )
    last = messages[-1] if messages else {}
    if continues:
        fields = _fields_to_continue(last, "content" if continues is True else continues)
        return Ending(False, fields, last[fields[0]], keeps_blanks=True)
    if add_generation_prompt is None and continues is None and _is_open(last):
        return Ending(False, ("content",), last["content"].rstrip())
    return Ending(add_generation_prompt is not False)


def _is_open(message: dict[str, Any]) -> bool:
    return message.get("role") == "assistant" and bool(message.get("content")) and not message.get("tool_calls")


def _fields_to_continue(message: dict[str, Any], field: str) -> tuple[str, ...]:
    """`field`, and the other names under which the same thoughts stand in the message."""
    if field != "content" and field not in REASONING_FIELDS:
        raise InvalidRequest(f"`{CONTINUE}` must be a boolean, `content` or `{REASONING_FIELDS[0]}`", CONTINUE)
    text = message.get(field)
    if text is None:
        raise InvalidRequest(f"`{CONTINUE}` is set, but the last message has no `{field}`", CONTINUE)
    if field == "content":
        return (field,)
    return tuple(name for name in REASONING_FIELDS if message.get(name) == text)
