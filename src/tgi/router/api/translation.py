"""What routes have in common that translate another protocol into chats: fields, the way of a chat through validation,
names in errors, and events that have a name. Knows no protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct
from starlette.requests import Request

from tgi.errors import InvalidRequest
from tgi.router.api.chat_prompt import ChatPrompt
from tgi.router.api.headers import priority_of, traceparent_of
from tgi.router.api.openai_answer import encode
from tgi.router.api.openai_request import parameters_of
from tgi.router.infer import Call
from tgi.router.schema.chat import ChatRequest
from tgi.router.schema.shared_fields import SharedFields
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


def named_event(event: Struct) -> bytes:
    """Of a struct whose tag is the event's name."""
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), encode(event))
