"""What routes have in common that translate another protocol into chats: fields, names in errors, and events that have
a name. Knows no protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from tgi.errors import InvalidRequest
from tgi.router.api.openai_answer import encode
from tgi.router.schema.shared_fields import SharedFields


def shared_fields(body: SharedFields) -> dict[str, Any]:
    """What a chat takes as it is."""
    return {name: getattr(body, name) for name in SharedFields.__struct_fields__}


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
