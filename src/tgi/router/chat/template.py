"""A model's chat templates: which one a chat takes, and what it is given.

Knows plain dicts for messages; knows no tokenizer and no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import jinja2

from tgi.errors import InvalidRequest, TemplateFailed
from tgi.router.chat.dialect import Dialect, dialect_of
from tgi.router.chat.ending import CONTINUE, ending_of
from tgi.router.chat.messages import Messages, in_dialect, with_developer_as_system
from tgi.router.chat.sandbox import Sandbox, new_sandbox, run

LONG_CHAT = 16_384
"""Characters. A longer chat is rendered beside the event loop: it may take more than a millisecond."""

VALUE_COST = 16
"""Characters that every value counts for besides its length: many empty messages take their time too."""

DEFAULT, TOOL_USE = "default", "tool_use"

OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", CONTINUE})

# What a template's expressions may raise over messages that it did not expect, and its source when it is compiled.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt of one chat."""

    text: str
    continued: str | None  # the end of `text` that the answer goes on with; None: it is a new message

    @property
    def continues(self) -> bool:
        return self.continued is not None


@dataclass(frozen=True, slots=True)
class _Template:
    source: str
    dialect: Dialect
    compiled: jinja2.Template


class Options(TypedDict, total=False):
    """Keywords of `ChatTemplate.render`."""

    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | str | None
    variables: Mapping[str, Any] | None
    name: str | None


class ChatTemplate:
    """One model's templates. A missing or broken one is an error of each chat, never of the server."""

    failure: str | None = None
    """Why chats are refused that name no template; None where they are not."""

    source: str = ""
    """Text of the template that a chat with tools takes; "" where there is none."""

    uses_tools: bool = False
    """Does that template read the variable `tools`?"""

    def __init__(self, sources: Mapping[str, str] | str | None, tokens: Mapping[str, str]) -> None:
        """`sources`: a text, or texts by name ("default", "tool_use" …); `tokens`: "bos_token" … for them to write."""
        sources = {DEFAULT: sources} if isinstance(sources, str) else sources or {}
        sandbox = new_sandbox()
        self._tokens = dict(tokens)
        self._templates = {name: _compiled(source, sandbox) for name, source in sources.items()}
        try:
            self._find(None, with_tools=False)
        except TemplateFailed as error:
            self.failure = str(error)
        with contextlib.suppress(TemplateFailed):
            template = self._find(None, with_tools=True)
            self.source, self.uses_tools = template.source, template.dialect.uses_tools

    def render(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str | None = None,
        variables: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> Rendered:
        """The prompt of a chat, given as by `template_messages`.

        Where neither flag is given a last message of the assistant is continued, as in TGI, else a new one begins.
        `continue_final_message` may name the field to go on with. `variables` reach the template by name. `name` is
        that of one of the model's templates. Raises InvalidRequest for flags, variables and names that cannot be,
        TemplateFailed with the template's own message.
        """
        template = self._find(name, with_tools=bool(tools))
        _check_variables(variables)
        ending = ending_of(messages, add_generation_prompt, continue_final_message)
        given: dict[str, Any] = {**self._tokens, **(variables or {}), "tools": tools or None, "documents": documents}
        given["add_generation_prompt"] = ending.add_generation_prompt

        def prompt_of(messages: Messages) -> str:
            given["messages"] = in_dialect(ending.mark(messages), template.dialect)
            return ending.cut(_run(template.compiled, given))

        prompt = _with_developers(messages, prompt_of)
        return Rendered(prompt, ending.written(prompt))

    async def render_aside(self, messages: Messages, **options: Unpack[Options]) -> Rendered:
        """As `render`, in a thread when the chat is long."""
        if _is_long([messages, options]):
            return await asyncio.to_thread(self.render, messages, **options)
        return self.render(messages, **options)

    def _find(self, name: str | None, with_tools: bool) -> _Template:
        """As transformers chooses."""
        found = self._templates.get(name or (TOOL_USE if with_tools and TOOL_USE in self._templates else DEFAULT))
        if isinstance(found, _Template):
            return found
        if found is not None:
            raise TemplateFailed(found)
        names = ", ".join(f"`{name}`" for name in self._templates)
        if name is not None:
            raise InvalidRequest(
                f"`chat_template` must be the name of one of this model's templates ({names or 'it has none'})",
                "chat_template",
            )
        if names:
            raise TemplateFailed(f"none of this model's templates is the default; name one as `chat_template`: {names}")
        raise TemplateFailed(
            "template not found: this model has no chat template; use /generate, or give one with "
            "--chat-template or --tokenizer-config-path"
        )


def _compiled(source: str, sandbox: Sandbox) -> _Template | str:
    """The template, or why there is none."""
    try:
        dialect = dialect_of(sandbox.parse(source))
        if not dialect.content_as_parts:
            source = _as_flat_content(source)
        return _Template(source, dialect, sandbox.from_string(source))
    except _TEMPLATE_ERRORS as error:
        return f"the model's chat template does not compile: {_message(error)}"


def _as_flat_content(source: str) -> str:
    """Content reaches templates as one text; some look into the first part of a list without ever going through one."""
    return source.replace("messages[0]['content'][0]['text']", "messages[0]['content']")


def _run(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    try:
        return run(template, variables)
    except _TEMPLATE_ERRORS as error:
        raise TemplateFailed(_message(error), "messages") from error


def _message(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _check_variables(variables: Mapping[str, Any] | None) -> None:
    for name in OWN_VARIABLES.intersection(variables or ()):
        raise InvalidRequest(
            f"`chat_template_kwargs` cannot set `{name}`: give it as a field of the request", "chat_template_kwargs"
        )


def _with_developers(messages: Messages, prompt_of: Callable[[Messages], str]) -> str:
    """The role `developer` as it is; where the template refuses it or leaves its text out, as `system`."""
    texts = [str(message.get("content") or "") for message in messages if message.get("role") == "developer"]
    if not texts:
        return prompt_of(messages)
    refusal: TemplateFailed | None = None
    try:
        prompt = prompt_of(messages)
        if all(text.strip() in prompt for text in texts):
            return prompt
    except TemplateFailed as error:
        refusal = error
    try:
        return prompt_of(with_developer_as_system(messages))
    except TemplateFailed as error:
        raise refusal or error from None


def _is_long(value: Any) -> bool:
    room = LONG_CHAT
    waiting = [value]
    while waiting and room >= 0:
        value = waiting.pop()
        room -= VALUE_COST
        if isinstance(value, str):
            room -= len(value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return room < 0
