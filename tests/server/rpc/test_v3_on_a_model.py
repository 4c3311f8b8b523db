"""generate.v3 over the real engine and a tiny model: the same tokens as the engine gives when it plans by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import grpc
import pytest

from tests.fakes.tiny_model import write_tiny_llama
from tests.fakes.tiny_shard import TinyShard
from tests.fakes.tokenizer import unpacked
from tgi.enums import Phase
from tgi.errors import GenerationFailed
from tgi.proto.v3 import generate_pb2 as pb
from tgi.server.rpc.v3 import V3Service
from tgi.shard_client.messages import Command, Health, ShardInfo, Step, WarmupRequest, WarmupResult
from tgi.text.tokenizer import load_tokenizer

LIVENESS_ID = 2**64 - 1
PROMPTS = ("The capital of France is", "hello world " * 30, "1 2 3")
MAX_NEW = 12
NO_CONTEXT = cast(grpc.ServicerContext, None)  # the service does not use it


class ByHand:
    """SteppableEngine straight over an Engine: no thread, no stream."""

    def __init__(self, shard: TinyShard) -> None:
        self._engine = shard.engine
        self._masks = shard.masks
        size = shard.block_size
        self.warm: WarmupResult | None = WarmupResult(
            2047, 2048, (shard.num_blocks - 1) * size, shard.num_blocks, size, shard.engine.table.max_rows
        )

    def info(self) -> ShardInfo:
        return ShardInfo("llama", "float32", "cpu", "torch", 16, 512, True, True, 0, 1, 2048, False)

    def health(self) -> Health:
        return Health(Phase.IDLE, 0, 0.0, 30.0)

    def warmup(self, request: WarmupRequest) -> WarmupResult:
        return cast(WarmupResult, self.warm)

    def step_by_hand(
        self, command: Command, handles: Sequence[int], chunk_lens: Mapping[int, int] | None = None
    ) -> Step | None:
        self._engine.apply(command)
        rows = self._engine.rows_under_grammar(handles)
        assert self._masks is None or self._masks.wait(rows, 20)
        return self._engine.step(handles, chunk_lens) if handles else None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def shard(model: Path) -> TinyShard:
    return TinyShard(model, grammars=True)


@pytest.fixture
def service(shard: TinyShard, model: Path) -> Iterator[V3Service]:
    shard.reset()
    yield V3Service(ByHand(shard), model, ["unix:///x-0"])
    assert not shard.engine.has_rows


def request(request_id: int, text: str, max_new: int = MAX_NEW, **more: object) -> pb.Request:
    return pb.Request(
        id=request_id,
        input_chunks=pb.Input(chunks=[pb.InputChunk(text=text)]),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new, ignore_eos_token=True),
        **more,  # pyright: ignore[reportArgumentType]
    )


def test_the_same_tokens_as_the_engine_by_itself(service: V3Service, shard: TinyShard, model: Path) -> None:
    tokenizer = load_tokenizer(model)
    prompts = [unpacked(tokenizer.encode(text, add_special_tokens=False).ids) for text in PROMPTS]
    expected = [answer.ids for answer in shard.run([shard.admit(ids, MAX_NEW, ignore_eos=True) for ids in prompts])]
    shard.reset()
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    texts: dict[int, pb.GeneratedText] = {}

    def keep(response: pb.PrefillResponse | pb.DecodeResponse) -> None:
        for one in response.generations:
            found[one.request_id] += one.tokens.ids
            if one.HasField("generated_text"):
                texts[one.request_id] = one.generated_text

    first = pb.PrefillRequest(
        batch=pb.Batch(id=4, requests=[request(0, PROMPTS[0]), request(1, PROMPTS[1], chunk_len=9)])
    )
    keep(service.Prefill(first, NO_CONTEXT))
    later = pb.PrefillRequest(
        batch=pb.Batch(id=5, requests=[request(2, PROMPTS[2])]), cached_batch=pb.CachedBatch(id=4)
    )
    response: pb.PrefillResponse | pb.DecodeResponse = service.Prefill(later, NO_CONTEXT)
    keep(response)
    while response.HasField("batch"):
        decode = pb.DecodeRequest(batches=[pb.CachedBatch(id=response.batch.id)])
        response = service.Decode(decode, NO_CONTEXT)
        keep(response)
    assert [found[index] for index in range(3)] == expected
    for index, ids in enumerate(expected):
        assert texts[index].text == tokenizer.decode(ids)
        assert texts[index].finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        (pb.GRAMMAR_TYPE_REGEX, "[a-f]{3,8}", "[a-f]{3,8}"),
        (pb.GRAMMAR_TYPE_JSON, '{"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}', r"\[[ 12,]*\]"),
    ],
)
def test_a_grammar_holds_and_its_end_is_the_answers(
    service: V3Service, kind: pb.GrammarType, source: str, pattern: str
) -> None:
    parameters = pb.NextTokenChooserParameters(do_sample=True, seed=4, grammar=source, grammar_type=kind)
    asked = [request(1, "1 2 3", 60, parameters=parameters), request(2, "1 2 3")]
    response: pb.PrefillResponse | pb.DecodeResponse = service.Prefill(
        pb.PrefillRequest(batch=pb.Batch(id=1, requests=asked)), NO_CONTEXT
    )
    texts: dict[int, pb.GeneratedText] = {}
    while True:
        assert response.generations
        texts |= {one.request_id: one.generated_text for one in response.generations if one.HasField("generated_text")}
        if not response.HasField("batch"):
            break
        response = service.Decode(pb.DecodeRequest(batches=[pb.CachedBatch(id=1)]), NO_CONTEXT)
    assert re.fullmatch(pattern, texts[1].text.removesuffix("</s>").removesuffix("<|im_end|>")), texts[1].text
    assert texts[1].finish_reason == pb.FINISH_REASON_EOS_TOKEN
    assert texts[2].generated_tokens == MAX_NEW


def test_a_broken_grammar_fails_its_call_and_leaves_nothing(service: V3Service) -> None:
    parameters = pb.NextTokenChooserParameters(grammar="a(", grammar_type=pb.GRAMMAR_TYPE_REGEX)
    batch = pb.Batch(id=1, requests=[request(1, "1 2 3", parameters=parameters), request(2, "1 2 3")])
    with pytest.raises(GenerationFailed, match="request 1: grammar is not valid"):
        service.Prefill(pb.PrefillRequest(batch=batch), NO_CONTEXT)


def test_the_liveness_probe_passes_while_every_block_is_taken(service: V3Service, shard: TinyShard) -> None:
    shares = [range(1, 100), range(100, 200), range(200, shard.num_blocks)]
    requests = [request(index, "1 2 3", blocks=share) for index, share in enumerate(shares)]
    response = service.Prefill(pb.PrefillRequest(batch=pb.Batch(id=1, requests=requests)), NO_CONTEXT)
    assert response.batch.max_tokens == (shard.num_blocks - 1) * shard.block_size
    probe = request(LIVENESS_ID, "liveness", 1, truncate=1, blocks=[0], slots=[0])
    answer = service.Prefill(pb.PrefillRequest(batch=pb.Batch(id=LIVENESS_ID, requests=[probe])), NO_CONTEXT)
    assert [one.request_id for one in answer.generations] == [LIVENESS_ID]
    service.ClearCache(pb.ClearCacheRequest(), NO_CONTEXT)
