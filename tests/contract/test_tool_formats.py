"""Every format of tool calls, as openai's client reads it: streamed answers cut at every character, and plain ones.

The model is scripted, its chat template says which format it writes. Each choice of a request is cut elsewhere, so that
one stream shows all places at once, mixed as a busy server mixes them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.fakes.app import App, serving
from tests.fakes.backend import EOS, Said, Script, ScriptedBackend
from tests.router.chat.answers import EMPTY, PLAIN, TOOLS, WRITERS, Call, Writer
from tgi.enums import FinishReason
from tgi.router.chat.tool_formats import FORMATS
from tgi.router.validation.parameters import Limits

# What of a family's template tells its format.
TAUGHT = {
    "hermes": "<tool_call></tool_call>",
    "qwen3_coder": "<tool_call><function=f><parameter=p>",
    "llama3_json": '<|start_header_id|> {"name": f, "parameters": p}',
    "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS]",
    "mistral_v11": "[TOOL_CALLS]f[ARGS]",
    "gemma": "```tool_code\nf()\n```",
    "granite": "<|tool_call|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "json": "",
}
TEMPLATE = (
    "{%% for m in messages %%}{{ m.role }}: {{ m.content }}\n{%% endfor %%}"
    "{%% if tools %%}{{ tools | tojson }} {{ %r }}{%% endif %%}"
)
MAX_CHOICES = 512
LIMITS = Limits(max_input_tokens=2_000, max_total_tokens=4_000, vocab_size=300)
LEAD = "Let me see."
CALLS: list[Call] = [PLAIN, EMPTY]
ASKED: dict[str, Any] = {
    "model": "tgi",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()],
}

each_writer = pytest.mark.parametrize("writer", WRITERS, ids=str)


class Served:
    def __init__(self, app: App, client: openai.OpenAI) -> None:
        self._backend = app.backend
        self._client = client

    def plain(self, *scripts: Script) -> ChatCompletion:
        """A choice for each script."""
        self._play(scripts)
        return self._client.chat.completions.create(**ASKED, n=len(scripts))

    def streamed(self, *scripts: Script) -> list[ChatCompletionChunk]:
        self._play(scripts)
        return list(self._client.chat.completions.create(**ASKED, n=len(scripts), stream=True))

    def _play(self, scripts: Sequence[Script]) -> None:
        number = count()
        self._backend.script = lambda _: scripts[next(number)]


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, Served]]:
    """A server for each format, by the format's name."""
    with contextlib.ExitStack() as stack:

        def serve(taught: str) -> Served:
            app = stack.enter_context(
                serving(
                    ScriptedBackend(),
                    chat_template=TEMPLATE % taught,
                    max_concurrent_requests=MAX_CHOICES,
                    limits=LIMITS,
                )
            )
            url = f"http://127.0.0.1:{app.port}/v1"
            return Served(app, stack.enter_context(openai.OpenAI(base_url=url, api_key="-", max_retries=0)))

        yield {name: serve(taught) for name, taught in TAUGHT.items()}


def script(*pieces: str, reason: FinishReason = FinishReason.EOS_TOKEN) -> Script:
    return Script([*map(Said, pieces), *([EOS] if reason is FinishReason.EOS_TOKEN else [])], reason)


def accumulated(chunks: Sequence[ChatCompletionChunk]) -> ChatCompletion:
    """As the client itself puts a stream together."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(chunk)
    return state.get_final_completion()  # pyright: ignore[reportReturnType]


def told(answer: ChatCompletion) -> list[tuple[str | None, list[Call], str]]:
    """Content, calls and reason of each choice; of the ids, which are drawn, only that there are different ones."""
    found: list[tuple[str | None, list[Call], str]] = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        calls = choice.message.tool_calls or []
        assert choice.message.role == "assistant"
        assert all(call.type == "function" and call.id for call in calls)
        assert len({call.id for call in calls}) == len(calls)
        read: list[Call] = [
            (call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"
        ]
        found.append((choice.message.content, read, choice.finish_reason))
    return found


def assert_shape(chunks: Sequence[ChatCompletionChunk], num_choices: int) -> None:
    """A call's first piece has id and name, the others neither; the reason stands in a choice's last chunk, alone."""
    named: set[tuple[int, int]] = set()
    over: set[int] = set()
    for chunk in chunks:
        (choice,) = chunk.choices
        assert choice.index not in over
        for piece in choice.delta.tool_calls or ():
            key = choice.index, piece.index
            function = piece.function
            assert function is not None
            assert [piece.id is None, piece.type is None, function.name is None] == [key in named] * 3
            named.add(key)
            assert choice.finish_reason is None
        if choice.finish_reason is not None:
            over.add(choice.index)
    assert over == set(range(num_choices))


def test_a_template_for_every_format() -> None:
    assert set(TAUGHT) == {format.name for format in FORMATS}


@pytest.mark.fault("TGI#2794", "vllm#9209", "vllm#27572", "vllm#31501", "vllm#44098")
@pytest.mark.row("G: 2 openai client", "B: tools, tool_choice, tool_prompt")
@each_writer
def test_calls_are_read_wherever_the_text_is_cut(served: dict[str, Served], writer: Writer) -> None:
    server, text = served[writer.format.name], f"{LEAD}\n\n{writer.write(CALLS)}"
    cuts = [script(text[:at], text[at:]) for at in range(1, len(text))]
    scripts = [script(text), script(*text), *cuts]
    chunks = server.streamed(*scripts)
    assert_shape(chunks, len(scripts))
    whole = (LEAD, CALLS, "tool_calls")
    assert told(accumulated(chunks)) == [whole] * len(scripts)
    assert told(server.plain(*scripts[:2], cuts[len(cuts) // 2])) == [whole] * 3


@each_writer
def test_a_call_alone_has_no_content(served: dict[str, Served], writer: Writer) -> None:
    server, text = served[writer.format.name], writer.write(CALLS)
    whole = (None, CALLS, "tool_calls")
    assert told(accumulated(server.streamed(script(*text)))) == [whole]
    assert told(server.plain(script(*text))) == [whole]


@each_writer
def test_marks_that_are_special_tokens_are_read_too(served: dict[str, Served], writer: Writer) -> None:
    """They are no text of the answer, but for the parser."""
    text = writer.write(CALLS)
    marks = {mark for mark in writer.format.marks if mark in text}
    pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    said = Script([*(Said(piece, special=piece in marks) for piece in pieces if piece), EOS])
    server = served[writer.format.name]
    whole = (None, CALLS, "tool_calls")
    assert told(accumulated(server.streamed(said))) == [whole]
    assert told(server.plain(said)) == [whole]


@pytest.mark.fault("TGI#2145")
@each_writer
def test_a_call_that_the_length_cuts_off_is_none_to_be_made(served: dict[str, Served], writer: Writer) -> None:
    """Wherever that is: what there is stays, streamed as plain, and the reason is the true one."""
    server, text = served[writer.format.name], writer.write([PLAIN])
    scripts = [script(text[:at], reason=FinishReason.LENGTH) for at in range(1, len(text))]

    def pieces(answer: ChatCompletion) -> list[tuple[str, list[tuple[str, str]]]]:
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        return [
            (
                choice.message.content or "",
                [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],  # pyright: ignore
            )
            for choice in sorted(answer.choices, key=lambda choice: choice.index)
        ]

    state = ChatCompletionStreamState()
    for chunk in server.streamed(*scripts):
        state.handle_chunk(chunk)
    snapshot = state.current_completion_snapshot
    assert pieces(snapshot) == pieces(server.plain(*scripts))
