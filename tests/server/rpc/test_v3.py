"""generate.v3 through a client made from its proto, over a scripted engine: every call, every fault, every status."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.fakes.shard import LOGPROB, Script, ScriptedModel, scripted_text, scripted_tokens
from tests.fakes.tokenizer import BOS_ID, EOS_ID, TURN_END_ID, ids_of, packed, write_byte_tokenizer
from tgi.enums import Phase
from tgi.errors import StartupError
from tgi.proto.v3 import generate_pb2 as pb
from tgi.proto.v3 import generate_pb2_grpc as rpc
from tgi.server.engine.service import StreamIsOpen
from tgi.server.rpc.interceptors import ErrorInterceptor
from tgi.server.rpc.v3 import V3Service
from tgi.shard_client.messages import Command, Health, Sampling, ShardInfo, Step, WarmupRequest, WarmupResult

LIVENESS_ID = 2**64 - 1
BLOCK = 4


class ScriptedEngine:
    """SteppableEngine over the scripted model."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.warm: WarmupResult | None = None
        self.warmups: list[WarmupRequest] = []
        self.commands: list[Command] = []
        self.chunks: list[dict[int, int]] = []
        self.stream_is_open = False
        self.state = Health(Phase.IDLE, 0, 0.0, 30.0)
        self.open()

    def open(self) -> None:
        """What a router's stream does to the rows, when it opens and when it ends."""
        self.model = ScriptedModel(self.script, 1, {})

    def info(self) -> ShardInfo:
        return ShardInfo("llama", "float32", "cpu", "flashdecoding-ipex", BLOCK, 49152, True, True, 0, 1, 2048, True)

    def health(self) -> Health:
        return self.state

    def warmup(self, request: WarmupRequest) -> WarmupResult:
        self.warmups.append(request)
        if request.max_total_tokens == 10**6:
            raise StartupError("Not enough memory; lower --max-total-tokens")
        if self.warm is None:
            blocks = self.script.num_blocks
            self.warm = WarmupResult(99, 100, (blocks - 1) * BLOCK, blocks, BLOCK, request.max_rows)
        return self.warm

    def step_by_hand(
        self, command: Command, handles: Sequence[int], chunk_lens: Mapping[int, int] | None = None
    ) -> Step | None:
        if self.stream_is_open:
            raise StreamIsOpen("a generate.v4 stream is open: generate.v3 calls are refused until it ends")
        self.commands.append(command)
        self.model.apply(command)
        if not handles:
            return None
        self.chunks.append(dict(chunk_lens or {}))
        return self.model.step(handles, chunk_lens)


@pytest.fixture
def script() -> Script:
    return Script(block_size=BLOCK, num_blocks=64)


@pytest.fixture
def engine(script: Script) -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine(script)
    yield engine
    assert engine.model.violations == []


@pytest.fixture
def stub(engine: ScriptedEngine, tmp_path: Path) -> Iterator[Any]:
    model = write_byte_tokenizer(tmp_path / "model")
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[ErrorInterceptor()])
    rpc.add_TextGenerationServiceServicer_to_server(V3Service(engine, model, ["unix:///x-0"], max_rows=32), server)
    server.add_insecure_port(f"unix:{tmp_path}/v3")
    server.start()
    with grpc.insecure_channel(f"unix:{tmp_path}/v3") as channel:
        yield rpc.TextGenerationServiceStub(channel)
    server.stop(None).wait()


def request(
    request_id: int, text: str = "hello", max_new: int = 3, stop: Sequence[str] = (), **more: Any
) -> pb.Request:
    parameters = more.pop("parameters", {})
    return pb.Request(
        id=request_id,
        inputs="ignored",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
        truncate=more.pop("truncate", 1000),
        parameters=pb.NextTokenChooserParameters(
            **{"temperature": 1.0, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0} | parameters
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(
            max_new_tokens=max_new, stop_sequences=stop, ignore_eos_token=more.pop("ignore_eos", False)
        ),
        **more,
    )


def prefill(stub: Any, batch_id: int, *requests: pb.Request, join: int | None = None) -> pb.PrefillResponse:
    cached = None if join is None else pb.CachedBatch(id=join)
    batch = pb.Batch(id=batch_id, requests=requests, size=len(requests))
    return stub.Prefill(pb.PrefillRequest(batch=batch, cached_batch=cached))


def decode(stub: Any, *batch_ids: int) -> pb.DecodeResponse:
    return stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=batch_id) for batch_id in batch_ids]))


def finish(stub: Any, response: pb.PrefillResponse | pb.DecodeResponse) -> dict[int, list[pb.Generation]]:
    """Decode until the batch ends; the generations by request."""
    found: dict[int, list[pb.Generation]] = {}
    while True:
        for generation in response.generations:
            found.setdefault(generation.request_id, []).append(generation)
        if not response.HasField("batch"):
            return found
        response = decode(stub, response.batch.id)


def status(call: Any, *arguments: Any, **more: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments, **more)
    error: Any = raised.value
    return error.code(), error.details()


def prompt(text: str) -> bytes:
    return packed(ids_of(text))


@pytest.mark.row("D: gRPC v3 wire compatibility")
def test_one_request_from_prefill_to_its_end(stub: Any) -> None:
    response = prefill(stub, 7, request(1))
    assert (response.batch.id, list(response.batch.request_ids), response.batch.size) == (7, [1], 1)
    assert (response.batch.max_tokens, response.batch.current_tokens) == (2 * BLOCK, 1)
    assert response.total_ns >= response.forward_ns > 0
    assert not response.HasField("concat_ns")
    generations = finish(stub, response)[1]
    expected = scripted_tokens(prompt("hello"), 3)
    assert [list(one.tokens.ids) for one in generations] == [[token] for token in expected]
    assert [one.tokens.texts[0] for one in generations] == [chr(token) for token in expected]
    assert all(list(one.tokens.logprobs) == [LOGPROB] for one in generations)
    assert all(list(one.tokens.is_special) == [False] for one in generations)
    assert not any(one.HasField("prefill_tokens") for one in generations)
    assert [one.HasField("generated_text") for one in generations] == [False, False, True]
    last = generations[-1].generated_text
    assert (last.text, last.generated_tokens) == (scripted_text(prompt("hello"), 3), 3)
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert not last.HasField("seed")


def test_a_finished_batch_is_not_stored(stub: Any) -> None:
    assert not prefill(stub, 1, request(1, max_new=1)).HasField("batch")
    assert status(decode, stub, 1) == (grpc.StatusCode.INTERNAL, "Batch ID 1 not found in cache.")


def test_info_discovery_and_health(stub: Any, engine: ScriptedEngine) -> None:
    info = stub.Info(pb.InfoRequest())
    assert (info.dtype, info.device_type, info.block_size, info.attention_impl) == (
        "torch.float32",
        "cpu",
        BLOCK,
        "flashdecoding-ipex",
    )
    assert (info.requires_padding, info.support_chunking, info.use_prefix_caching, info.speculate) == (
        False,
        True,
        True,
        0,
    )
    assert not info.HasField("window_size")
    assert list(stub.ServiceDiscovery(pb.ServiceDiscoveryRequest()).urls) == ["unix:///x-0"]
    stub.Health(pb.HealthRequest())
    for state in (Health(Phase.FAILED, 3, 1.0, 30.0), Health(Phase.RUNNING, 3, 31.0, 30.0)):
        engine.state = state
        assert status(stub.Health, pb.HealthRequest())[0] is grpc.StatusCode.INTERNAL


def test_warmup_sizes_the_cache(stub: Any, engine: ScriptedEngine) -> None:
    asked = pb.WarmupRequest(batch=pb.Batch(requests=[request(0)]), max_prefill_tokens=256, max_total_tokens=100)
    answer = stub.Warmup(asked)
    assert (answer.max_supported_total_tokens, answer.max_input_tokens, answer.max_total_tokens) == (252, 99, 100)
    assert engine.warmups == [WarmupRequest(256, 32, None, 100)]
    refused = pb.WarmupRequest(max_prefill_tokens=256, max_total_tokens=10**6)
    assert status(stub.Warmup, refused) == (
        grpc.StatusCode.INTERNAL,
        "Not enough memory; lower --max-total-tokens",
    )


def test_a_prefill_before_any_warmup_sizes_the_cache_itself(stub: Any, engine: ScriptedEngine) -> None:
    assert len(finish(stub, prefill(stub, 0, request(1)))[1]) == 3
    assert engine.warmups == [WarmupRequest(4096, 32)]


def test_two_batches_join_and_part(stub: Any, engine: ScriptedEngine) -> None:
    prefill(stub, 1, request(1, "a", 6), request(2, "b", 6))
    joined = prefill(stub, 2, request(3, "c", 6), join=1)
    assert (joined.batch.id, list(joined.batch.request_ids), joined.HasField("concat_ns")) == (1, [1, 2, 3], True)
    prefill(stub, 5, request(4, "d", 6))
    both = decode(stub, 5, 1)
    assert (both.batch.id, list(both.batch.request_ids), both.HasField("concat_ns")) == (5, [4, 1, 2, 3], True)
    assert both.batch.current_tokens == 4
    kept = stub.FilterBatch(pb.FilterBatchRequest(batch_id=5, request_ids=[3, 1])).batch
    assert (kept.id, list(kept.request_ids)) == (5, [3, 1])
    assert engine.commands[-1].cancel == [4, 2]
    found = finish(stub, decode(stub, 5))
    assert found.keys() == {1, 3}
    assert found[1][-1].generated_text.text == scripted_text(prompt("a"), 6)
    assert found[3][-1].generated_text.text == scripted_text(prompt("c"), 6)


def test_filtering_wants_requests_that_are_there(stub: Any, engine: ScriptedEngine) -> None:
    for wanted in ([], [9], [1, 9]):
        prefill(stub, 1, request(1, max_new=5))
        code, details = status(stub.FilterBatch, pb.FilterBatchRequest(batch_id=1, request_ids=wanted))
        assert (code, "does not hold" in details) == (grpc.StatusCode.INTERNAL, True)
        assert not engine.model.rows
    assert status(stub.FilterBatch, pb.FilterBatchRequest(batch_id=1, request_ids=[1]))[1].startswith("Batch ID 1")


def test_clearing_one_batch_and_all(stub: Any, engine: ScriptedEngine) -> None:
    for batch_id in (1, 2, 3):
        prefill(stub, batch_id, request(batch_id, max_new=5))
    stub.ClearCache(pb.ClearCacheRequest(id=2))
    stub.ClearCache(pb.ClearCacheRequest(id=99))
    assert len(engine.model.rows) == 2
    assert status(decode, stub, 2)[0] is grpc.StatusCode.INTERNAL
    assert decode(stub, 1).HasField("batch")
    stub.ClearCache(pb.ClearCacheRequest())
    assert not engine.model.rows
    assert status(decode, stub, 1)[0] is grpc.StatusCode.INTERNAL


def test_a_batch_that_nobody_can_name_any_more_leaves_no_row(stub: Any, engine: ScriptedEngine) -> None:
    prefill(stub, 1, request(1, max_new=5))
    assert status(decode, stub, 1, 99) == (grpc.StatusCode.INTERNAL, "Batch ID 99 not found in cache.")
    assert not engine.model.rows
    prefill(stub, 1, request(2, max_new=5))
    assert list(prefill(stub, 1, request(3, max_new=5)).batch.request_ids) == [3], "the id means another batch now"
    assert len(engine.model.rows) == 1


# --- blocks and the cache ---------------------------------------------------------------------------------------------


def blocks_of(engine: ScriptedEngine) -> dict[int, list[int]]:
    return {handle: row.blocks for handle, row in engine.model.rows.items()}


def test_requests_without_blocks_are_lent_some_from_1_on(stub: Any, engine: ScriptedEngine) -> None:
    prefill(stub, 1, request(1, "hello", 4), request(2, "hello", 5))  # 8 and 9 tokens are stored
    assert blocks_of(engine) == {1: [1, 2], 2: [3, 4, 5]}
    stub.ClearCache(pb.ClearCacheRequest(id=1))
    prefill(stub, 2, request(3, "hello", 4))
    assert blocks_of(engine) == {3: [1, 2]}
    code, details = status(prefill, stub, 3, request(4, "hello", 4), request(5, "hello", 1000))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "251 blocks are needed, but only 59 are free")
    assert len(prefill(stub, 4, request(6, "a", 240)).batch.request_ids) == 1  # what was lent meanwhile is back


def test_the_routers_blocks_are_used_and_its_slots_ignored(stub: Any, engine: ScriptedEngine) -> None:
    response = prefill(stub, 1, request(1, blocks=[9, 4], slots=[1, 2, 3], max_new=3))
    assert blocks_of(engine) == {1: [9, 4]}
    assert response.batch.max_tokens == 8
    code, details = status(prefill, stub, 2, request(2, blocks=[9], max_new=3))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "request 2: 7 tokens need 2 blocks of 4, it has 1")


def test_cached_tokens_are_used_in_whole_blocks(stub: Any, engine: ScriptedEngine) -> None:
    text = "abcdefghij"  # 10 tokens: 2 blocks and 2 more
    finish(stub, prefill(stub, 1, request(1, text, 2, blocks=[1, 2, 3])))
    for cache_len, cached in ((9, 8), (8, 8), (7, 4), (0, 0)):  # the length minus one is what a full hit is told
        response = prefill(stub, 2, request(2, text, 2, blocks=[1, 2, 4], cache_len=cache_len))
        assert engine.commands[-1].admit[0].cached_len == cached
        assert finish(stub, response)[2][-1].generated_text.text == scripted_text(prompt(text), 2)
    code, details = status(prefill, stub, 3, request(3, text, 2, cache_len=10))
    assert (code, details) == (grpc.StatusCode.INTERNAL, "request 3: cache_len 10 must be below its 10 tokens")


def test_the_first_chunk_is_as_long_as_asked_and_the_rest_follows(stub: Any, engine: ScriptedEngine) -> None:
    text = "abcdefghijklmnopqrst"  # 20 tokens
    stub.Warmup(pb.WarmupRequest(max_prefill_tokens=8))
    finish(stub, prefill(stub, 1, request(1, text, 1, blocks=[1, 2, 3, 4, 5])))
    long = request(2, text, 2, blocks=[1, 11, 12, 13, 14, 15], cache_len=6, chunk_len=3)
    first = prefill(stub, 2, long, request(3, "x", 9, blocks=[21, 22, 23]))
    assert engine.chunks[-1] == {2: 2 + 3}  # 6 of the cache are one block and 2 to compute again
    assert [one.request_id for one in first.generations] == [3]
    assert list(first.batch.request_ids) == [2, 3]
    assert first.batch.current_tokens == 7 + 1  # all of the budget that the other row leaves
    second = decode(stub, 2)
    assert engine.chunks[-1] == {2: 7}
    assert second.batch.current_tokens == 4 + 1
    third = decode(stub, 2)
    assert [one.request_id for one in third.generations] == [2, 3]
    assert finish(stub, third)[2][-1].generated_text.text == scripted_text(prompt(text), 2)


def test_the_liveness_probe_runs_on_the_scratch_block(stub: Any, engine: ScriptedEngine) -> None:
    prefill(stub, 1, request(1, max_new=200))  # most of the blocks are in use
    probe = request(LIVENESS_ID, "liveness", 1, truncate=1, blocks=[0], slots=[0], cache_len=0)
    response = prefill(stub, LIVENESS_ID, probe)
    assert [one.request_id for one in response.generations] == [LIVENESS_ID]
    assert not response.HasField("batch")
    admit = engine.commands[-1].admit[0]
    assert (admit.blocks, admit.prompt_ids) == (packed([0]), prompt("s"))


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"add_special_tokens": True}, [*b"hello"]),
        ({"truncate": 2}, [*b"lo"]),
        ({"truncate": 0}, [*b"hello"]),
    ],
)
def test_the_prompt_is_encoded_and_cut_as_asked(
    stub: Any, engine: ScriptedEngine, more: dict[str, Any], ids: list[int]
) -> None:
    prefill(stub, 1, request(1, **more))
    assert engine.commands[-1].admit[0].prompt_ids == packed(ids)


def test_a_request_without_chunks_is_read_from_its_inputs(stub: Any, engine: ScriptedEngine) -> None:
    one = request(1)
    one.ClearField("input_chunks")
    prefill(stub, 1, one)
    assert engine.commands[-1].admit[0].prompt_ids == prompt("ignored")


def test_images_are_refused(stub: Any) -> None:
    one = request(1)
    one.input_chunks.chunks.append(pb.InputChunk(image=pb.Image(data=b"x", mimetype="image/png")))
    assert status(prefill, stub, 1, one) == (grpc.StatusCode.INTERNAL, "request 1: this model takes no images")


@pytest.mark.row("E: Stopping criteria order")
def test_end_tokens(stub: Any, script: Script) -> None:
    script.eos_at = lambda prompt_ids: 2
    generations = finish(stub, prefill(stub, 1, request(1, max_new=3)))[1]  # on the last token allowed: EOS wins
    last = generations[-1]
    assert last.generated_text.finish_reason == pb.FINISH_REASON_EOS_TOKEN
    assert last.generated_text.text == scripted_text(prompt("hello"), 2)
    assert last.generated_text.generated_tokens == 3
    assert (list(last.tokens.texts), list(last.tokens.is_special)) == (["</s>"], [True])
    ignored = finish(stub, prefill(stub, 2, request(2, max_new=4, ignore_eos=True)))[2]
    assert ignored[-1].generated_text.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.row("E: Incremental detokenization")
def test_a_stop_string_ends_the_row_and_stays_in_the_text(stub: Any, engine: ScriptedEngine, script: Script) -> None:
    answer = ids_of("oné👍 STOP x")
    script.token = lambda prompt_ids, index: answer[index % len(answer)]
    first = prefill(stub, 1, request(1, max_new=99, stop=["never", "STOP"]), request(2, max_new=99))
    generations: list[pb.Generation] = [one for one in first.generations if one.request_id == 1]
    while not generations[-1].HasField("generated_text"):
        response = decode(stub, 1)
        generations += [one for one in response.generations if one.request_id == 1]
    assert "".join(one.tokens.texts[0] for one in generations) == "oné👍 STOP"
    end = generations[-1].generated_text
    assert (end.text, end.generated_tokens) == ("oné👍 STOP", len(ids_of("oné👍 STOP")))
    assert end.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE
    assert list(response.batch.request_ids) == [2]
    assert engine.commands[-1].cancel == [1]


@pytest.mark.fault("lmdeploy#1047")
def test_a_special_token_as_stop_string(stub: Any, script: Script) -> None:
    answer = [*b"hi", BOS_ID, *b"x"]
    script.token = lambda prompt_ids, index: answer[index]
    end = finish(stub, prefill(stub, 1, request(1, max_new=4, stop=["<s>"])))[1][-1]
    assert (list(end.tokens.texts), end.generated_text.text) == (["<s>"], "hi")
    assert end.generated_text.finish_reason == pb.FINISH_REASON_STOP_SEQUENCE


def test_a_character_that_the_length_cuts(stub: Any, script: Script) -> None:
    answer = [*b"a", *"👍".encode()]
    script.token = lambda prompt_ids, index: answer[index]
    generations = finish(stub, prefill(stub, 1, request(1, max_new=3)))[1]
    assert [one.tokens.texts[0] for one in generations] == ["a", "", "\ufffd"]
    assert generations[-1].generated_text.text == "a\ufffd"


def test_top_tokens_and_prompt_logprobs(stub: Any) -> None:
    generations = finish(stub, prefill(stub, 1, request(1, max_new=2, top_n_tokens=2, prefill_logprobs=True)))[1]
    token = scripted_tokens(prompt("hello"), 1)[0]
    top = generations[0].top_tokens
    assert [(list(one.ids), list(one.logprobs)) for one in top] == [([token, 0], [LOGPROB, LOGPROB - 1])]
    assert [list(one.texts) for one in top] == [[chr(token), "\0"]]
    before = generations[0].prefill_tokens
    assert (list(before.ids), list(before.texts)) == ([*b"hello"], list("hello"))
    assert math.isnan(before.logprobs[0])
    assert list(before.logprobs[1:]) == [-0.5] * 4
    assert not before.is_special
    assert not generations[1].HasField("prefill_tokens")


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.7}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.9}, True),
        ({"temperature": 0.0, "top_p": 0.0, "typical_p": 0.0, "repetition_penalty": 0.0}, False),
        ({"repetition_penalty": 1.2, "frequency_penalty": 0.1, "watermark": True}, False),
    ],
)
def test_a_row_samples_when_any_parameter_asks_for_it(
    stub: Any, engine: ScriptedEngine, parameters: dict[str, Any], samples: bool
) -> None:
    response = prefill(stub, 1, request(1, max_new=1, parameters=parameters | {"seed": 2**64 - 1}))
    sent = engine.commands[-1].admit[0].sampling
    assert sent.do_sample is samples
    assert sent.seed == 2**64 - 1
    assert sent.temperature > 0
    assert sent.repetition_penalty >= 1
    text = response.generations[0].generated_text
    assert (text.HasField("seed"), text.seed) == (samples, (2**64 - 1) * samples)


def test_every_control_reaches_the_engine(stub: Any, engine: ScriptedEngine) -> None:
    parameters = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "typical_p": 0.25,
        "do_sample": True,
        "seed": 9,
        "repetition_penalty": 1.5,
        "frequency_penalty": -0.5,
        "watermark": True,
    }
    prefill(stub, 1, request(1, max_new=1, parameters=parameters))
    assert engine.commands[-1].admit[0].sampling == Sampling(**parameters)


def test_grammar_adapter_and_ends_reach_the_engine(stub: Any, engine: ScriptedEngine) -> None:
    grammar = {"grammar": "[a-z]+", "grammar_type": pb.GRAMMAR_TYPE_REGEX}
    prefill(stub, 1, request(1, parameters=grammar, adapter_id="lora"))
    admit = engine.commands[-1].admit[0]
    assert admit.grammar is not None
    assert (admit.grammar.kind, admit.grammar.source, admit.adapter_id) == ("regex", "[a-z]+", "lora")
    assert admit.stopping.eos_ids == (EOS_ID,)
    assert TURN_END_ID not in admit.stopping.eos_ids  # the files on disk name one
    prefill(stub, 2, request(2))
    assert engine.commands[-1].admit[0].grammar is None


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["error_at", "nan_at"])
def test_a_fault_of_one_request_fails_the_call_and_leaves_nothing_behind(
    stub: Any, engine: ScriptedEngine, script: Script, fault: str
) -> None:
    setattr(script, fault, lambda prompt_ids: 1 if prompt_ids == prompt("bad") else None)
    prefill(stub, 1, request(1, "good", 9), request(2, "bad", 9))
    code, details = status(decode, stub, 1)
    assert (code, details.startswith("request 2: ")) == (grpc.StatusCode.INTERNAL, True)
    assert not engine.model.rows
    assert status(decode, stub, 1)[1] == "Batch ID 1 not found in cache."
    assert len(prefill(stub, 2, request(3, "a", 240)).batch.request_ids) == 1  # every block is back


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda stub: prefill(stub, 1), "a batch needs at least one request"),
        (lambda stub: decode(stub), "Decode needs at least one batch"),
        (lambda stub: prefill(stub, 1, request(1, max_new=0)), "request 1: max_new_tokens must be at least 1"),
        (lambda stub: prefill(stub, 1, request(1), join=8), "Batch ID 8 not found in cache."),
        (lambda stub: prefill(stub, 1, request(1, text="")), "request 1: cache_len 0 must be below its 0 tokens"),
    ],
)
def test_wrong_calls_are_internal_errors_with_a_text(
    stub: Any, engine: ScriptedEngine, call: Any, message: str
) -> None:
    assert status(call, stub) == (grpc.StatusCode.INTERNAL, message)
    assert not engine.model.rows


def test_beside_a_routers_stream_every_step_is_refused(stub: Any, engine: ScriptedEngine) -> None:
    prefill(stub, 1, request(1, max_new=9))
    engine.stream_is_open = True
    engine.open()
    for call in (lambda: decode(stub, 1), lambda: prefill(stub, 2, request(2))):
        assert status(call)[0] is grpc.StatusCode.FAILED_PRECONDITION
    stub.ClearCache(pb.ClearCacheRequest())
    stub.Info(pb.InfoRequest())
    engine.stream_is_open = False
    engine.open()
    assert status(decode, stub, 1)[1] == "Batch ID 1 not found in cache."  # the stream has dropped it
    assert len(finish(stub, prefill(stub, 3, request(3)))[3]) == 3


def test_a_stream_that_came_and_went_unseen_has_taken_the_batches(stub: Any, engine: ScriptedEngine) -> None:
    for batch_id in (1, 2):
        prefill(stub, batch_id, request(batch_id, max_new=100))
    engine.open()
    code, details = status(decode, stub, 1)
    assert (code, "its rows are gone" in details) == (grpc.StatusCode.INTERNAL, True)
    response = prefill(stub, 3, request(3, max_new=100))  # here batch 2 is noticed to be gone
    assert list(response.batch.request_ids) == [3]
    code, details = status(prefill, stub, 4, request(4, max_new=9), join=2)
    assert (code, details) == (grpc.StatusCode.INTERNAL, "Batch ID 2 not found in cache.")
    stub.ClearCache(pb.ClearCacheRequest(id=3))
    assert len(prefill(stub, 4, request(4, "a", 240)).batch.request_ids) == 1  # the blocks of all three are back
    stub.ClearCache(pb.ClearCacheRequest())
    prefill(stub, 5, request(5, "a", 9))
    engine.open()
    code, details = status(prefill, stub, 6, request(6, "b", 9), join=5)
    assert (code, details) == (
        grpc.StatusCode.INTERNAL,
        "batch 5: requests [5] are gone, a router's stream has taken over",
    )
    assert not engine.model.rows
