"""Chat templates: a sandboxed Jinja environment as the authors of templates expect it, and the rendering of a chat.

Knows plain dicts for messages; knows no tokenizer and no HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tgi.errors import TemplateFailed

LONG_CHAT = 16_384
"""Characters. A longer chat is rendered beside the event loop: it may take more than a millisecond."""

MESSAGE_COST = 32
"""Characters that a message counts for besides its content: many empty ones take their time too."""

# Marks the end of the message that is to be continued; private-use characters that no template looks for.
_CUT = "\ue07a\ue0c5\ue07a"

# What a template's expressions may raise over messages that it did not expect.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

Messages = list[dict[str, Any]]


class ChatTemplate:
    """One model's template. A missing or broken one is an error of each chat, never of the server."""

    def __init__(self, source: str | None, tokens: Mapping[str, str]) -> None:
        """`tokens`: "bos_token", "eos_token" … as the template may write them."""
        self._tokens = dict(tokens)
        self._template: jinja2.Template | None = None
        self.failure: str | None = None
        if source is None:
            self.failure = "template not found: this model has no chat template; use /generate, or give one with "
            self.failure += "--tokenizer-config-path"
            return
        try:
            self._template = _environment().from_string(_as_flat_content(source))
        except _TEMPLATE_ERRORS as error:
            self.failure = f"the model's chat template does not compile: {error}"

    def render(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """The prompt of a chat. A last message of the assistant is left open, to be continued.

        `variables` reach the template by name, beside ours. Raises TemplateFailed with the template's own message.
        """
        template = self._template
        if template is None:
            raise TemplateFailed(self.failure or "template not found")
        last = messages[-1] if messages else {}
        continues = last.get("role") == "assistant" and bool(last.get("content"))
        if continues:
            messages = [*messages[:-1], {**last, "content": last["content"].rstrip() + _CUT}]
        given = {"tools": None, "documents": None, **self._tokens, **(variables or {})}
        given |= {"messages": messages, "add_generation_prompt": not continues}
        try:
            text = template.render(given)
        except _TEMPLATE_ERRORS as error:
            raise TemplateFailed(_message(error), "messages") from error
        if not continues:
            return text
        head, mark, _ = text.rpartition(_CUT)
        if not mark:
            raise TemplateFailed("the chat template does not write the assistant message to be continued", "messages")
        return head

    async def render_aside(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """As `render`, in a thread when the chat is long."""
        if sum(len(message.get("content") or "") + MESSAGE_COST for message in messages) <= LONG_CHAT:
            return self.render(messages, variables)
        return await asyncio.to_thread(self.render, messages, variables)


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _as_flat_content(source: str) -> str:
    """Content reaches templates as one text; some look into the first part of a list instead."""
    return source.replace("messages[0]['content'][0]['text']", "messages[0]['content']")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts keys; models were trained on neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _message(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"
