"""Streams in other protocols say what their plain answers say, wherever the answer's text is cut into tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.tokenizer import byte_tokenizer
from tgi.enums import FinishReason
from tgi.router.api import messages_frames, responses_frames
from tgi.router.api.sse import Frames
from tgi.router.backend import Finish, Times, TokenEvent
from tgi.router.chat.answer import AnswerParser, make_answer_parser
from tgi.router.chat.reasoning import BY_NAME
from tgi.router.chat.tool_formats import JSON
from tgi.router.infer import Collector
from tgi.router.schema.responses import ReasoningConfig, ResponseObject, TextConfig

SCHEMAS = {"f": {"type": "object", "properties": {"a": {}}}, "g": {"type": "object", "properties": {}}}

PIECES = st.sampled_from(
    [
        "Hi",
        " ",
        "\n",
        "{",
        "<th",
        "é😀",
        '{"name": "f", "arguments": {"a": [1, "}"]}}',
        '{"name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {"a"',
    ]
)
TEXTS = st.builds(
    lambda thought, pieces: thought + "".join(pieces),
    st.sampled_from(["", "<think>Hm\n</think>", "<think>Hm"]),
    st.lists(PIECES, max_size=5),
)
CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=8)
REASONS = st.sampled_from([FinishReason.EOS_TOKEN, FinishReason.LENGTH])
EXAMPLE = '<think>Hm</think>Hi {"name": "f", "arguments": {"a": 1}} Hi'


def parser() -> AnswerParser | None:
    """Ids that do not differ between two readings of one answer."""
    ids = iter(range(100))
    return make_answer_parser(JSON, BY_NAME["think"], "", SCHEMAS, lambda: f"call-{next(ids)}")


def tokens_of(text: str, cuts: list[int], reason: FinishReason) -> list[TokenEvent]:
    events, at = [], 0
    while at < len(text):
        size = cuts[len(events) % len(cuts)]
        events.append(TokenEvent(len(events) + 1, text[at : at + size], -0.25, special=False))
        at += size
    finish = Finish(reason, text, len(events) + 1, 1, 1, None, None, Times(0, 0, 0, 0, 0))
    return [*events, TokenEvent(257, "</s>", -0.5, special=True, finish=finish)]


def play(frames: Frames, tokens: Sequence[TokenEvent]) -> tuple[Collector, list[dict[str, Any]]]:
    """A whole answer, and the events of its stream."""

    async def main() -> Collector:
        collector = Collector()
        for token in tokens:
            collector.token(token)
        return collector

    data = b"".join([*map(frames.token, tokens), frames.close()]).decode()
    *blocks, rest = data.split("\n\n")
    assert rest == ""
    return asyncio.run(main()), [json.loads(block.partition("\ndata: ")[2]) for block in blocks]


def plain(value: msgspec.Struct) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(value))


@example(EXAMPLE, [1], FinishReason.EOS_TOKEN)
@given(TEXTS, CUTS, REASONS)
def test_messages(text: str, cuts: list[int], reason: FinishReason) -> None:
    look = messages_frames.Look("msg_1", "m", "r", num_prompt=1, max_tokens=1)
    collector, events = play(messages_frames.MessageFrames(look, parser()), tokens_of(text, cuts, reason))
    whole = plain(messages_frames.message(look, collector, parser()))
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping["type"], stop["type"]) == ("message_start", "ping", "message_stop")
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    is_open = False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        assert event["index"] == len(blocks) - (kind != "start")
        assert is_open == (kind != "start")
        is_open = kind != "stop"
        if kind == "start":
            blocks.append(dict(event["content_block"]))
        elif kind == "delta":
            match event["delta"]:
                case {"type": "text_delta", "text": more}:
                    blocks[-1]["text"] += more
                case {"type": "thinking_delta", "thinking": more}:
                    blocks[-1]["thinking"] += more
                case {"type": "signature_delta", "signature": signature}:
                    blocks[-1]["signature"] = signature
                case {"type": "input_json_delta", "partial_json": more}:
                    inputs[event["index"]] = inputs.get(event["index"], "") + more
    assert not is_open
    for index, arguments in inputs.items():
        try:
            blocks[index]["input"] = json.loads(arguments)
        except ValueError:
            assert whole["content"][index]["input"] == {}
    message = start["message"] | delta["delta"] | {"usage": delta["usage"], "content": blocks}
    assert message == whole


@example(EXAMPLE, [1], FinishReason.EOS_TOKEN, 2)
@given(TEXTS, CUTS, REASONS, st.sampled_from([None, 0]))
def test_responses(text: str, cuts: list[int], reason: FinishReason, num_alternatives: int | None) -> None:
    start = ResponseObject(
        id="resp_1",
        created_at=1,
        instructions=None,
        max_output_tokens=None,
        model="m",
        parallel_tool_calls=True,
        prompt_cache_key=None,
        reasoning=ReasoningConfig(),
        safety_identifier=None,
        temperature=1.0,
        text=TextConfig(),
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        user=None,
        metadata={},
    )
    look = responses_frames.Look(start, byte_tokenizer(), num_alternatives)
    collector, events = play(responses_frames.ResponseFrames(look, parser()), tokens_of(text, cuts, reason))
    whole = plain(responses_frames.response(look, collector, parser()))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *middle, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert last["response"] | {"completed_at": None} == whole | {"completed_at": None}
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in middle:
        assert event["output_index"] == len(items) - (event["type"] != "response.output_item.added")
        assert len(done) == event["output_index"]
        match event:
            case {"type": "response.output_item.added", "item": item}:
                items.append(item)
            case {"type": "response.content_part.added", "part": part}:
                items[-1]["content"].append(part)
            case {"type": "response.function_call_arguments.delta", "delta": more}:
                items[-1]["arguments"] += more
            case {"delta": more}:
                part = items[-1]["content"][event["content_index"]]
                part["text"] += more
                part.get("logprobs", []).extend(event.get("logprobs", []))
            case {"type": "response.output_item.done", "item": item}:
                items[-1]["status"] = item["status"]
                assert items[-1] == item
                done.append(item)
    assert done == whole["output"]
