"""A chat request as the model will read it, and how its answer is to be read. For every route that takes chats."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from tgi.errors import InvalidRequest
from tgi.router.api.headers import client_of, priority_of, traceparent_of
from tgi.router.api.openai_request import grammar_of, parameters_of
from tgi.router.api.services import Services
from tgi.router.chat.answer import AnswerParser
from tgi.router.chat.constraint import either
from tgi.router.chat.messages import Messages, template_messages
from tgi.router.chat.reasoning import after_thinking
from tgi.router.chat.tools import ToolPlan, ToolTemplate, plan_tools
from tgi.router.infer import Call
from tgi.router.schema.chat import ChatRequest
from tgi.router.validation.door import Door
from tgi.router.validation.grammar import GrammarWish
from tgi.router.validation.request import ValidRequest
from tgi.router.validation.validator import Wish


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    continued: str  # the end of `text` that the answer goes on with; "" where it is a new message
    plan: ToolPlan
    grammar: GrammarWish | None

    def parser(self) -> AnswerParser | None:
        """For one answer; None where all its text is content."""
        return self.plan.parser_for_answer(self.text, self.continued)


async def prepare_chat(services: Services, body: ChatRequest, is_long: bool) -> ChatPrompt:
    """`is_long`: of the request's body. Raises InvalidRequest, TemplateFailed and ToolFailed among it."""
    template = services.tools

    def read() -> tuple[ToolPlan, GrammarWish | None, Messages]:
        plan, wish = _plan(body, template)
        return plan, wish, plan.messages(template_messages(body.messages))

    plan, wish, messages = await asyncio.to_thread(read) if is_long or _reads_schemas(body) else read()
    rendered = await services.template.render_aside(
        messages,
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
    grammar = await asyncio.to_thread(
        after_thinking, wish, template.reasoning, text, template.special_tokens, continued
    )
    return ChatPrompt(text, continued, plan, grammar)


async def validate_chat(
    request: Request, body: ChatRequest, prompt: ChatPrompt, call: Call, door: Door
) -> ValidRequest:
    """Raises InvalidRequest, in the words of `door`."""
    # OpenAI's newer name wins where both are sent.
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return await call.validate(
        Wish(
            prompt.text,
            parameters_of(body, priority_of(request, body.priority), max_tokens, body.top_logprobs),
            door,
            bool(body.stream),
            call.received_at,
            traceparent_of(request),
            grammar=prompt.grammar,
            client=client_of(request, body.user),
        )
    )


def _reads_schemas(body: ChatRequest) -> bool:
    """Which may take many milliseconds."""
    guides = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, body.structured_outputs)
    wishes = (body.response_format, *guides)
    return body.tool_choice not in (None, "auto", "none") or any(wish is not None for wish in wishes)


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
