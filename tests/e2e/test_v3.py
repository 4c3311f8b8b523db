"""generate.v3 over a real socket: a client generated from TGI's contract steps a shard by hand."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.servers import Process, shard, wait_until
from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tokenizer import packed, unpacked
from tgi.proto.v3 import generate_pb2 as pb
from tgi.proto.v3 import generate_pb2_grpc as rpc
from tgi.shard_client.client import ShardClient, ShardStream
from tgi.shard_client.messages import Admit, Command, Sampling, Stopping
from tgi.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.row("D: gRPC v3 wire compatibility")]

LIVENESS_ID = 2**64 - 1
PROMPTS = ("The capital of France is", "hello world " * 30, "1 2 3")
SEEDS = (None, 77, 2**64 - 1)  # None: greedy
MAX_NEW = 12
LIMITS = pb.WarmupRequest(max_input_tokens=1000, max_total_tokens=1024, max_prefill_tokens=512)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture(scope="module")
def running_shard(model: Path) -> Iterator[tuple[Process, str]]:
    with shard(model, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def stub(running_shard: tuple[Process, str]) -> Iterator[rpc.TextGenerationServiceStub]:
    with grpc.insecure_channel(f"unix:{running_shard[1]}") as channel:
        stub = rpc.TextGenerationServiceStub(channel)
        stub.Warmup(LIMITS)
        yield stub


@pytest.fixture(autouse=True)
def clear(stub: rpc.TextGenerationServiceStub) -> Iterator[None]:
    yield
    stub.ClearCache(pb.ClearCacheRequest())


def request(index: int, **more: object) -> pb.Request:
    seed = SEEDS[index]
    sampling = pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0)
    if seed is not None:
        sampling.MergeFrom(pb.NextTokenChooserParameters(temperature=0.8, do_sample=True, seed=seed))
    return pb.Request(
        id=index,
        inputs=PROMPTS[index],
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=PROMPTS[index])]),
        truncate=1000,
        parameters=sampling,
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=MAX_NEW, ignore_eos_token=True),
        **more,  # pyright: ignore[reportArgumentType]
    )


def prefill(stub: rpc.TextGenerationServiceStub, batch_id: int, *requests: pb.Request) -> pb.PrefillResponse:
    return stub.Prefill(pb.PrefillRequest(batch=pb.Batch(id=batch_id, requests=requests, size=len(requests))))


def decode(stub: rpc.TextGenerationServiceStub, *ids: int) -> pb.DecodeResponse:
    return stub.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=batch_id) for batch_id in ids]))


class Answers:
    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.texts: dict[int, pb.GeneratedText] = {}

    def keep(self, response: pb.PrefillResponse | pb.DecodeResponse) -> None:
        for one in response.generations:
            self.ids.setdefault(one.request_id, []).extend(one.tokens.ids)
            if one.HasField("generated_text"):
                self.texts[one.request_id] = one.generated_text

    def finish(self, stub: rpc.TextGenerationServiceStub, response: pb.PrefillResponse | pb.DecodeResponse) -> None:
        """Keep a response and all that follow from its batch."""
        self.keep(response)
        while response.HasField("batch"):
            response = decode(stub, response.batch.id)
            self.keep(response)


async def through_v4(uds_path: str, tokenizer: Tokenizer) -> list[list[int]]:
    """The same requests on the production stream, each with blocks of its own."""
    client = ShardClient.connect(uds_path)
    stream = client.stream()
    opening = await anext(stream)
    assert opening.opening is not None
    admits = [admit(index, tokenizer) for index in range(len(PROMPTS))]
    stream.send(Command(admit=admits))
    ids = await collect(stream, {admit.handle for admit in admits})
    await stream.close()
    await client.close()
    return [ids[admit.handle] for admit in admits]


def admit(index: int, tokenizer: Tokenizer) -> Admit:
    seed = SEEDS[index]
    return Admit(
        handle=index + 1,
        prompt_ids=tokenizer.encode(PROMPTS[index], add_special_tokens=False).ids,
        generated_ids=b"",
        cached_len=0,
        blocks=packed(range(1 + 4 * index, 5 + 4 * index)),
        sampling=Sampling() if seed is None else Sampling(do_sample=True, temperature=0.8, seed=seed),
        stopping=Stopping(max_new_tokens=MAX_NEW, ignore_eos=True),
    )


async def collect(stream: ShardStream, handles: set[int]) -> dict[int, list[int]]:
    ids: dict[int, list[int]] = {handle: [] for handle in handles}
    async for step in stream:
        assert not step.errors
        position = 0
        for index, handle in enumerate(step.handles):
            count = step.num_tokens[index] if step.num_tokens else 1
            ids[handle] += step.token_ids[position : position + count]
            position += count
        if all(len(found) == MAX_NEW for found in ids.values()):
            return ids
    raise AssertionError("the stream ended")


def test_the_unary_calls(stub: rpc.TextGenerationServiceStub, running_shard: tuple[Process, str]) -> None:
    info = stub.Info(pb.InfoRequest())
    assert (info.dtype, info.device_type, info.requires_padding) == ("torch.float32", "cpu", False)
    assert (info.block_size, info.use_prefix_caching, info.support_chunking) == (64, True, True)
    found = stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
    assert list(found.urls) == [f"unix://{running_shard[1]}"]
    stub.Health(pb.HealthRequest())
    warm = stub.Warmup(LIMITS)
    assert (warm.max_input_tokens, warm.max_total_tokens) == (1000, 1024)
    assert warm.max_supported_total_tokens >= 1024


def test_the_tokens_of_the_production_stream(
    stub: rpc.TextGenerationServiceStub, running_shard: tuple[Process, str], tokenizer: Tokenizer
) -> None:
    """Two batches, joined in one Decode; a third request joins by its Prefill."""
    expected = asyncio.run(through_v4(running_shard[1], tokenizer))
    assert len({tuple(ids) for ids in expected}) == 3
    wait_until(lambda: is_welcome(stub), "the shard notices that the stream has ended")
    answers = Answers()
    answers.keep(prefill(stub, 10, request(0)))
    second = prefill(stub, 11, request(1, chunk_len=50))
    answers.keep(second)
    assert [one.request_id for one in second.generations] == [], "its prompt is longer than the chunk"
    joined = decode(stub, 10, 11)
    answers.keep(joined)
    assert joined.batch.id == 10
    assert joined.batch.size == 2
    assert list(joined.batch.request_ids) == [0, 1]
    assert joined.HasField("concat_ns")
    later = pb.PrefillRequest(
        batch=pb.Batch(id=12, requests=[request(2)], size=1), cached_batch=pb.CachedBatch(id=joined.batch.id)
    )
    answers.finish(stub, stub.Prefill(later))
    assert [answers.ids[index] for index in range(3)] == expected
    for index, ids in enumerate(expected):
        text = answers.texts[index]
        assert (text.text, text.generated_tokens) == (tokenizer.decode(ids), MAX_NEW)
        assert text.finish_reason == pb.FINISH_REASON_LENGTH
        assert text.HasField("seed") == (SEEDS[index] is not None)
        assert text.seed == (SEEDS[index] or 0)


def test_filter_keeps_the_others_as_they_were(stub: rpc.TextGenerationServiceStub) -> None:
    alone = Answers()
    alone.finish(stub, prefill(stub, 20, request(2)))
    answers = Answers()
    answers.keep(prefill(stub, 21, request(0), request(1), request(2)))
    answers.keep(decode(stub, 21))
    kept = stub.FilterBatch(pb.FilterBatchRequest(batch_id=21, request_ids=[2])).batch
    assert (kept.id, kept.size, list(kept.request_ids)) == (21, 1, [2])
    answers.finish(stub, decode(stub, 21))
    assert answers.ids[2] == alone.ids[2]
    assert [len(answers.ids[index]) for index in (0, 1)] == [2, 2], "the others were dropped"


def test_a_cleared_batch_is_gone(stub: rpc.TextGenerationServiceStub) -> None:
    prefill(stub, 30, request(0))
    prefill(stub, 31, request(2))
    stub.ClearCache(pb.ClearCacheRequest(id=30))
    with pytest.raises(grpc.RpcError, match="30"):
        decode(stub, 30)
    assert decode(stub, 31).batch.id == 31


def test_the_liveness_request(stub: rpc.TextGenerationServiceStub) -> None:
    """TGI's router sends it while a batch runs: it needs no block of anybody's."""
    answers = Answers()
    answers.keep(prefill(stub, 40, request(0)))
    probe = pb.Request(
        id=LIVENESS_ID,
        inputs="liveness",
        input_chunks=pb.Input(chunks=[pb.InputChunk(text="liveness")]),
        truncate=10,
        prefill_logprobs=False,
        parameters=pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=1),
        blocks=[0],
        slots=list(range(16)),
    )
    found = prefill(stub, LIVENESS_ID, probe)
    assert [one.request_id for one in found.generations] == [LIVENESS_ID]
    assert not found.HasField("batch")
    answers.finish(stub, decode(stub, 40))
    undisturbed = Answers()
    undisturbed.finish(stub, prefill(stub, 41, request(0)))
    assert answers.ids == undisturbed.ids


def test_stepping_by_hand_is_refused_while_a_router_streams(
    stub: rpc.TextGenerationServiceStub, running_shard: tuple[Process, str], tokenizer: Tokenizer
) -> None:
    prefill(stub, 50, request(0))

    async def run() -> None:
        client = ShardClient.connect(running_shard[1])
        stream = client.stream()
        assert (await anext(stream)).opening is not None
        again = functools.partial(decode, stub, 50)
        for call in (again, functools.partial(prefill, stub, 51, request(0)), again):
            with pytest.raises(grpc.RpcError) as refused:
                await asyncio.to_thread(call)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert "stream" in str(refused.value.details())
        await asyncio.to_thread(stub.Health, pb.HealthRequest())
        stream.send(Command(admit=[admit(0, tokenizer)]))
        assert len((await collect(stream, {1}))[1]) == MAX_NEW
        await stream.close()
        await client.close()

    asyncio.run(run())
    wait_until(lambda: is_welcome(stub), "the shard notices that the stream has ended")
    # The batch of before went with the stream's opening.
    with pytest.raises(grpc.RpcError, match="Batch ID 50 not found"):
        decode(stub, 50)


def is_welcome(stub: rpc.TextGenerationServiceStub) -> bool:
    try:
        return prefill(stub, 52, request(0)).batch.id == 52
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.FAILED_PRECONDITION:
            raise
        return False


def test_texts_and_top_tokens(stub: rpc.TextGenerationServiceStub, tokenizer: Tokenizer) -> None:
    response = prefill(stub, 60, request(0, top_n_tokens=3))
    one = response.generations[0]
    assert len(one.top_tokens) == 1
    assert one.tokens.ids[0] == one.top_tokens[0].ids[0]
    assert list(one.tokens.texts) == [tokenizer.decode(unpacked(packed(one.tokens.ids)))]
    assert list(response.batch.request_ids) == [0]
