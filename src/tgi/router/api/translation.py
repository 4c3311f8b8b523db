"""What the routes that translate another protocol into chats have in common: the way of a chat behind its translation,
names of fields in errors, an answer's parts in runs, and events that have a name. Knows neither protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from starlette.requests import Request

from tgi.errors import InvalidRequest
from tgi.router.api.chat_prompt import ChatPrompt
from tgi.router.api.headers import priority_of, traceparent_of
from tgi.router.api.openai_answer import encode
from tgi.router.api.openai_request import parameters_of
from tgi.router.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning
from tgi.router.infer import Call
from tgi.router.schema.chat import ChatRequest
from tgi.router.schema.extensions import SharedFields
from tgi.router.validation.door import Door
from tgi.router.validation.request import ValidRequest
from tgi.router.validation.validator import Wish


def shared_fields(body: SharedFields) -> dict[str, Any]:
    """What a chat takes as it is."""
    return {name: getattr(body, name) for name in SharedFields.__struct_fields__}


async def validated(request: Request, chat: ChatRequest, prompt: ChatPrompt, call: Call, door: Door) -> ValidRequest:
    """Raises InvalidRequest."""
    return await call.validate(
        Wish(
            prompt.text,
            parameters_of(chat, priority_of(request, chat.priority), chat.max_tokens, chat.top_logprobs),
            door,
            bool(chat.stream),
            call.received_at,
            traceparent_of(request),
            grammar=prompt.grammar,
        )
    )


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside speak of the fields that the client used. `names`: by those of a chat, where they differ."""
    try:
        yield
    except InvalidRequest as error:
        text = str(error)
        for of_chat, name in names.items():
            text = re.sub(rf"`{of_chat}\b", f"`{name}", text)
        error.args = (text,)
        error.param = names.get(error.param or "", error.param)
        raise


@dataclass(slots=True)
class Run:
    """Parts of an answer that belong together: a thought, a text between other parts, or a call."""

    kind: type[Reasoning] | type[Content] | type[CallBegin]
    call: CallBegin | None  # of a call
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a call: its arguments."""
        return "".join(self.pieces)


class Runs:
    """The parts of one answer in runs, as they come."""

    __slots__ = ("all",)

    def __init__(self) -> None:
        self.all: list[Run] = []

    def add(self, part: Part) -> bool:
        """Does a new run begin with this part?"""
        match part:
            case CallBegin():
                self.all.append(Run(CallBegin, part))
                return True
            case CallArguments(_, text):
                self.all[-1].pieces.append(text)  # a call's arguments follow it
                return False
            case Reasoning(text) | Content(text):
                begins = not self.all or self.all[-1].kind is not part.__class__
                if begins:
                    self.all.append(Run(part.__class__, None))
                self.all[-1].pieces.append(text)
                return begins


def shown(parts: Iterable[Part]) -> Iterator[Part]:
    """Those that say something."""
    return (part for part in parts if isinstance(part, CallBegin) or part.text)


def named_event(event: Struct) -> bytes:
    """Of a struct whose tag is the event's name."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))
