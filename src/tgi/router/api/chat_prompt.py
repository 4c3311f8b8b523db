"""A chat request as the model will read it, and how its answer is to be read. For every route that takes chats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tgi.errors import InvalidRequest
from tgi.router.api.openai_request import grammar_of
from tgi.router.api.services import Services
from tgi.router.chat.answer import AnswerParser
from tgi.router.chat.constraint import either
from tgi.router.chat.messages import template_messages
from tgi.router.chat.reasoning import after_thinking
from tgi.router.chat.tools import ToolPlan, ToolTemplate, plan_tools
from tgi.router.schema.chat import ChatRequest
from tgi.router.validation.grammar import GrammarWish

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    continued: str  # the end of `text` that the answer goes on with; "" where it is a new message
    plan: ToolPlan
    grammar: GrammarWish | None

    def parser(self) -> AnswerParser | None:
        """For one answer; None where all its text is content."""
        return self.plan.parser_for_answer(self.text, self.continued)


async def prepare_chat(services: Services, body: ChatRequest) -> ChatPrompt:
    """Raises InvalidRequest, TemplateFailed and ToolFailed among it."""
    template = services.tools
    plan, wish = await _run(body, lambda: _plan(body, template))
    rendered = await services.template.render_aside(
        plan.messages(template_messages(body.messages)),
        tools=plan.template_tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=_variables(body),
        name=body.chat_template,
    )
    text, continued = rendered.text, rendered.continued or ""
    if wish is None:
        return ChatPrompt(text, continued, plan, None)
    grammar = await _run(
        body, lambda: after_thinking(wish, template.reasoning, text, template.special_tokens, continued)
    )
    return ChatPrompt(text, continued, plan, grammar)


async def _run(body: ChatRequest, work: Callable[[], T]) -> T:
    """Beside the event loop where schemas are read, which may take many milliseconds."""
    is_free = body.response_format is None and body.tool_choice in (None, "auto", "none") and not _guides(body)
    return work() if is_free else await asyncio.to_thread(work)


def _guides(body: ChatRequest) -> bool:
    guides = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, body.structured_outputs)
    return any(guide is not None for guide in guides)


def _variables(body: ChatRequest) -> dict[str, Any]:
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    return {**effort, **(body.chat_template_kwargs or {})}


def _plan(body: ChatRequest, template: ToolTemplate) -> tuple[ToolPlan, GrammarWish | None]:
    """What the tools mean, and what the answer has to be, thinking apart: a call, text of a certain shape, or, with
    tools at will, either."""
    plan = plan_tools(body.tools, body.tool_choice, body.tool_prompt, body.parallel_tool_calls, template)
    wish = grammar_of(body)
    if wish is None:
        return plan, plan.grammar
    if plan.grammar is not None:
        raise InvalidRequest(
            f"`{wish.param}` and `tool_choice` exclude each other: an answer that must call a tool has no other shape",
            wish.param,
        )
    if not body.tools or body.tool_choice == "none" or template.format is None:
        return plan, wish
    must_call = plan_tools(body.tools, "required", None, body.parallel_tool_calls, template)
    assert must_call.grammar is not None
    return plan, either(wish, must_call.grammar)
