"""Both ends of the wire agree: what one writes the other reads, for any content."""

from __future__ import annotations

import math
import struct
from array import array
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi.proto.v4 import generate_pb2 as pb
from tgi.server.rpc.codec import Codec as ShardCodec
from tgi.shard_client.codec import Codec
from tgi.shard_client.messages import (
    Admit,
    BlockMoves,
    Command,
    Grammar,
    Health,
    Opening,
    PromptLogprobs,
    RowError,
    Sampling,
    ShardInfo,
    Step,
    Stopping,
    Timings,
    TopTokens,
    WarmupRequest,
    WarmupResult,
)

U8, U32, U64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
I32 = st.integers(-(2**31), 2**31 - 1)
F32 = st.floats(width=32, allow_nan=False)
IDS = st.lists(U32, max_size=5).map(lambda ids: struct.pack(f"<{len(ids)}I", *ids))
TEXT = st.text(max_size=8)

SAMPLING = st.builds(
    Sampling,
    do_sample=st.booleans(),
    temperature=F32,
    top_k=U32,
    top_p=F32,
    min_p=F32,
    typical_p=F32,
    repetition_penalty=F32,
    frequency_penalty=F32,
    presence_penalty=F32,
    watermark=st.booleans(),
    seed=U64,
    logit_bias=st.lists(st.tuples(U32, F32), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(U32, max_size=3).map(tuple), max_size=3).map(tuple),
    raw_logprobs=st.booleans(),
)
STOPPING = st.builds(
    Stopping,
    max_new_tokens=U32,
    min_new_tokens=U32,
    eos_ids=st.lists(U32, max_size=3).map(tuple),
    stop_ids=st.lists(U32, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
)
ADMIT = st.builds(
    Admit,
    handle=U64,
    prompt_ids=IDS,
    generated_ids=IDS,
    cached_len=U32,
    blocks=IDS,
    sampling=SAMPLING,
    stopping=STOPPING,
    priority=I32,
    top_n=U32,
    prompt_logprobs=st.booleans(),
    prompt_top_n=U32,
    adapter_id=TEXT,
    adapter_load=U32,
    grammar=st.none() | st.builds(Grammar, kind=TEXT, source=TEXT, begins_at=U32),
    traceparent=TEXT,
)
MOVES = st.lists(st.tuples(st.integers(0, 1), U32, U32), max_size=4).map(
    lambda moves: BlockMoves(
        bytes(to_host for to_host, _, _ in moves),
        struct.pack(f"<{len(moves)}I", *(source for _, source, _ in moves)),
        struct.pack(f"<{len(moves)}I", *(target for _, _, target in moves)),
    )
)
COMMAND = st.builds(
    Command,
    seen=U64,
    cancel=st.lists(U64, max_size=4),
    grow=st.lists(st.tuples(U64, IDS), max_size=4),
    admit=st.lists(ADMIT, max_size=2),
    moves=MOVES,
)


def column(code: Any, values: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[array[Any]]:
    return st.lists(values, min_size=size, max_size=size).map(lambda items: array(code, items))


@st.composite
def prompt_logprobs(draw: st.DrawFn) -> PromptLogprobs:
    positions, top_n = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    tops = positions * top_n
    columns = (column("f", F32, positions), column("I", U32, tops), column("f", F32, tops))
    return PromptLogprobs(draw(U64), draw(U32), *map(draw, columns))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rows, progress = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    num_tokens = draw(st.just(b"") | st.lists(st.integers(0, 3), min_size=rows, max_size=rows).map(bytes))
    tokens = sum(num_tokens) if num_tokens else rows
    top = st.integers(0, 3).flatmap(lambda n: st.builds(TopTokens, U64, U32, column("I", U32, n), column("f", F32, n)))
    return Step(
        number=draw(U64),
        kv_epoch=draw(U64),
        handles=draw(column("Q", U64, rows)),
        num_tokens=num_tokens,
        token_ids=draw(column("I", U32, tokens)),
        logprobs=draw(column("f", F32, tokens)),
        ends=draw(st.just(b"") | st.lists(U8, min_size=rows, max_size=rows).map(bytes)),
        progress_handles=draw(column("Q", U64, progress)),
        computed_len=draw(column("I", U32, progress)),
        top_tokens=draw(st.lists(top, max_size=2)),
        prompt_logprobs=draw(st.lists(prompt_logprobs(), max_size=2)),
        errors=draw(st.lists(st.builds(RowError, U64, TEXT, TEXT), max_size=2)),
        rows_running=draw(U32),
        rows_waiting=draw(U32),
        free_rows=draw(U32),
        timings=draw(st.builds(Timings, U64, U64, U64, U32, U32, U32)),
        opening=draw(st.none() | st.builds(Opening, U32, U32, U32, U32, U32)),
    )


@given(COMMAND)
def test_commands(command: Command) -> None:
    wire = Codec().command(command).SerializeToString()
    assert ShardCodec().command(pb.Command.FromString(wire)) == command


def test_moves_whose_columns_do_not_fit_are_refused() -> None:
    moves = pb.BlockMoves(to_host=b"\1\0", sources=b"\0" * 8, targets=b"\0" * 4)
    with pytest.raises(ValueError, match="block moves"):
        ShardCodec().command(pb.Command(moves=moves))


@given(steps())
def test_steps(step: Step) -> None:
    wire = ShardCodec().step(step).SerializeToString()
    assert Codec().step(pb.Step.FromString(wire)) == step


def test_values_that_are_no_numbers_travel_too() -> None:
    sent = Step(1, 1, array("Q", [7]), b"", array("I", [1]), array("f", [-math.inf]))
    sent.prompt_logprobs = [PromptLogprobs(7, 0, array("f", [math.nan]))]
    read = Codec().step(ShardCodec().step(sent))
    assert read.logprobs[0] == -math.inf
    assert math.isnan(read.prompt_logprobs[0].logprobs[0])


@pytest.mark.parametrize(
    "columns",
    [
        {"handles": b"\0" * 8},
        {"handles": b"\0" * 8, "token_ids": b"\0" * 4},
        {"handles": b"\0" * 8, "token_ids": b"\0" * 4, "logprobs": b"\0" * 4, "ends": b"\0\0"},
        {"handles": b"\0" * 8, "token_ids": b"\0" * 4, "logprobs": b"\0" * 4, "num_tokens": b"\1\1"},
        {"handles": b"\0" * 8, "token_ids": b"\0" * 4, "logprobs": b"\0" * 4, "num_tokens": b"\2"},
        {"handles": b"\0" * 7},
        {"progress_handles": b"\0" * 8},
        {"prompt_logprobs": [pb.PromptLogprobs(logprobs=b"\0" * 4, top_ids=b"\0" * 4)]},
        {"prompt_logprobs": [pb.PromptLogprobs(logprobs=b"\0" * 8, top_ids=b"\0" * 4, top_logprobs=b"\0" * 4)]},
        {"prompt_logprobs": [pb.PromptLogprobs(top_ids=b"\0" * 4, top_logprobs=b"\0" * 4)]},
    ],
)
def test_columns_that_do_not_fit_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Codec().step(pb.Step(**columns))  # pyright: ignore[reportArgumentType]


@given(st.builds(WarmupRequest, U32, U32, st.none() | U32, st.none() | U32, st.none() | U64, U64))
def test_warmup_requests(request: WarmupRequest) -> None:
    wire = Codec().warmup_request(request).SerializeToString()
    assert ShardCodec().warmup_request(pb.WarmupRequest.FromString(wire)) == request


@given(st.builds(WarmupResult, U32, U32, U64, U32, U32, U32))
def test_warmup_results(result: WarmupResult) -> None:
    assert Codec().warmup_result(ShardCodec().warmup_result(result)) == result


@given(
    st.builds(ShardInfo, TEXT, TEXT, TEXT, TEXT, U32, U32, st.booleans(), st.booleans(), U32, U32, U32, st.booleans())
)
def test_info(info: ShardInfo) -> None:
    assert asdict(Codec().info(ShardCodec().info(info))) == asdict(info)


@given(st.builds(Health, TEXT, U64, st.floats(allow_nan=False), st.floats(allow_nan=False)))
def test_health(health: Health) -> None:
    assert Codec().health(ShardCodec().health(health)) == health
