"""What the handlers work with, made once by main.py and kept in the application's state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request

from tgi.observability.metrics import Metrics
from tgi.router.api.sse import Pulse
from tgi.router.chat.template import ChatTemplate
from tgi.router.chat.tools import ToolTemplate
from tgi.router.infer import Infer
from tgi.router.schema.info import Info


class Offsets(Protocol):
    """Ids (u32) and, for each, (start, stop) in characters."""

    @property
    def ids(self) -> bytes: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class OffsetEncoder(Protocol):
    """Text to ids with their places, off the event loop (`tgi.text.pool`)."""

    async def encode(self, text: str, add_special_tokens: bool = True, with_offsets: bool = False) -> Offsets: ...


class Vocabulary(Protocol):
    """Ids to text and bytes (`tgi.text.tokenizer`)."""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Services:
    infer: Infer
    encoder: OffsetEncoder
    vocabulary: Vocabulary
    template: ChatTemplate
    tools: ToolTemplate
    metrics: Metrics
    pulse: Pulse
    info: Info
    system_fingerprint: str
    compute_type: str
    payload_limit: int  # bytes
    compat_return_full_text: bool  # default of POST /
    refresh_metrics: Callable[[], None]  # gauges that are only read when somebody looks


def services_of(request: Request) -> Services:
    return request.app.state.services
