"""generate.v3, TGI's own service, over the engine of generate.v4: for TGI's router and for stepping by hand.

Protobuf in, protobuf out; stepping.py keeps the batches. One call at a time. Errors are raised here and become a status
in interceptors.py.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import grpc

from tgi.enums import FinishReason, Phase
from tgi.errors import GenerationFailed, InvalidRequest, StartupError, Unavailable
from tgi.proto.v3 import generate_pb2 as pb
from tgi.proto.v3 import generate_pb2_grpc as rpc
from tgi.server.rpc.stepping import Asked, Batch, Generated, Outcome, Row, SteppableEngine, Stepper
from tgi.shard_client.messages import Grammar, Sampling
from tgi.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_MAX_ROWS = 128  # TGI's default of concurrent requests; its Warmup does not say how many

GRAMMAR_KIND = {pb.GRAMMAR_TYPE_JSON: "json_schema", pb.GRAMMAR_TYPE_REGEX: "regex"}
FINISH_REASON = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS_TOKEN: pb.FINISH_REASON_EOS_TOKEN,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_SEQUENCE,
}


class V3Service(rpc.TextGenerationServiceServicer):
    def __init__(
        self, engine: SteppableEngine, model_path: Path, urls: Sequence[str], max_rows: int = DEFAULT_MAX_ROWS
    ) -> None:
        """`urls`: what ServiceDiscovery names, rank 0's socket alone, which answers for every request id.

        The tokenizer is loaded when first needed: the production path never does.
        """
        self._engine = engine
        self._model_path = model_path
        self._urls = list(urls)
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None
        self._stepper = Stepper(engine, self._tokenizer, max_rows)

    def add_to(self, server: grpc.Server) -> None:
        rpc.add_TextGenerationServiceServicer_to_server(self, server)

    # --- the service -------------------------------------------------------------------------------------------

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:
        info = self._engine.info()
        return pb.InfoResponse(
            requires_padding=info.requires_padding,
            dtype=f"torch.{info.dtype}",
            device_type=info.device_type,
            speculate=info.speculate,
            support_chunking=info.supports_chunking,
            use_prefix_caching=info.prefix_caching,
            attention_impl=info.attention,
            block_size=info.block_size,
        )

    def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    def Health(self, request: pb.HealthRequest, context: grpc.ServicerContext) -> pb.HealthResponse:
        health = self._engine.health()
        if health.phase == Phase.FAILED or health.is_hung:
            raise Unavailable(f"the model is not well: {health.phase} for {health.since_s:.0f} s")
        return pb.HealthResponse()

    def Warmup(self, request: pb.WarmupRequest, context: grpc.ServicerContext) -> pb.WarmupResponse:
        """The batch is not run: the engine has its own worst case."""
        with self._lock:
            warm = self._stepper.warmup(
                request.max_prefill_tokens,
                request.max_input_tokens if request.HasField("max_input_tokens") else None,
                request.max_total_tokens if request.HasField("max_total_tokens") else None,
            )
        return pb.WarmupResponse(
            max_supported_total_tokens=warm.max_batch_total_tokens,
            max_input_tokens=warm.max_input_tokens,
            max_total_tokens=warm.max_total_tokens,
        )

    def Prefill(self, request: pb.PrefillRequest, context: grpc.ServicerContext) -> pb.PrefillResponse:
        started = time.perf_counter_ns()
        with self._lock:
            join_to = request.cached_batch.id if request.HasField("cached_batch") else None
            asked = [self._asked(one) for one in request.batch.requests]
            outcome = self._stepper.prefill(request.batch.id, asked, join_to)
            response = pb.PrefillResponse()
            self._fill(response, outcome, started)
        if join_to is not None:
            response.concat_ns = 0  # two lists: nothing to measure
        return response

    def Decode(self, request: pb.DecodeRequest, context: grpc.ServicerContext) -> pb.DecodeResponse:
        started = time.perf_counter_ns()
        with self._lock:
            outcome = self._stepper.decode([batch.id for batch in request.batches])
            response = pb.DecodeResponse()
            self._fill(response, outcome, started)
        if len(request.batches) > 1:
            response.concat_ns = 0
        return response

    def FilterBatch(self, request: pb.FilterBatchRequest, context: grpc.ServicerContext) -> pb.FilterBatchResponse:
        with self._lock:
            batch = self._stepper.filter(request.batch_id, list(request.request_ids))
            return pb.FilterBatchResponse(batch=self._cached(batch))

    def ClearCache(self, request: pb.ClearCacheRequest, context: grpc.ServicerContext) -> pb.ClearCacheResponse:
        with self._lock:
            self._stepper.clear(request.id if request.HasField("id") else None)
        return pb.ClearCacheResponse()

    # --- in ----------------------------------------------------------------------------------------------------

    def _tokenizer(self) -> Tokenizer:
        if self._loaded is None:
            try:
                self._loaded = load_tokenizer(self._model_path)
            except StartupError as error:
                raise GenerationFailed(str(error)) from error
        return self._loaded

    def _asked(self, request: pb.Request) -> Asked:
        stopping = request.stopping_parameters
        grammar = request.parameters.grammar
        kind = GRAMMAR_KIND.get(request.parameters.grammar_type)
        return Asked(
            request_id=request.id,
            prompt_ids=self._prompt_ids(request),
            cache_len=request.cache_len,
            chunk_len=request.chunk_len if request.HasField("chunk_len") else None,
            blocks=tuple(request.blocks),
            sampling=_sampling(request.parameters),
            max_new_tokens=stopping.max_new_tokens,
            ignore_eos=stopping.ignore_eos_token,
            stop_strings=tuple(stopping.stop_sequences),
            top_n=request.top_n_tokens,
            # As in TGI: asked for in vain where the server is not started for it.
            prompt_logprobs=request.prefill_logprobs and self._engine.info().prompt_logprobs,
            adapter_id=request.adapter_id if request.HasField("adapter_id") else "",
            grammar=Grammar(kind, grammar) if kind is not None and grammar else None,
        )

    def _prompt_ids(self, request: pb.Request) -> bytes:
        chunks = request.input_chunks.chunks
        if any(chunk.HasField("image") for chunk in chunks):
            raise GenerationFailed(f"request {request.id}: this model takes no images")
        text = "".join(chunk.text for chunk in chunks) if chunks else request.inputs
        try:
            ids = self._tokenizer().encode(text, request.add_special_tokens).ids
        except InvalidRequest as error:
            raise GenerationFailed(f"request {request.id}: {error}") from error
        # From the left; 0 stands for no limit.
        return ids[-4 * request.truncate :] if request.truncate else ids

    # --- out ---------------------------------------------------------------------------------------------------

    def _fill(self, response: pb.PrefillResponse | pb.DecodeResponse, outcome: Outcome, started: int) -> None:
        response.generations.extend(self._generation(one) for one in outcome.generated)
        if outcome.batch is not None:
            response.batch.CopyFrom(self._cached(outcome.batch))
        response.total_ns = time.perf_counter_ns() - started
        response.forward_ns = outcome.forward_ns
        response.decode_ns = max(0, response.total_ns - outcome.forward_ns)

    def _cached(self, batch: Batch) -> pb.CachedBatch:
        warm = self._engine.warm
        assert warm is not None
        return pb.CachedBatch(
            id=batch.batch_id,
            request_ids=[row.asked.request_id for row in batch.rows],
            size=len(batch.rows),
            max_tokens=batch.num_blocks * warm.block_size,
            current_tokens=batch.next_tokens,
        )

    def _generation(self, one: Generated) -> pb.Generation:
        row, tokens = one.row, one.tokens
        generation = pb.Generation(
            request_id=row.asked.request_id,
            tokens=pb.Tokens(
                ids=[token.token_id for token in tokens],
                logprobs=[token.logprob for token in tokens],
                texts=[token.text for token in tokens],
                is_special=[token.is_special for token in tokens],
            ),
        )
        if one.is_first and row.asked.prompt_logprobs:
            generation.prefill_tokens.CopyFrom(self._prefill_tokens(row))
        if row.asked.top_n:
            generation.top_tokens.extend(
                self._with_texts(token.top.token_ids, token.top.logprobs) if token.top else pb.Tokens()
                for token in tokens
            )
        if one.finish is not None:
            generation.generated_text.text = row.stream.text
            generation.generated_text.generated_tokens = row.num_generated
            generation.generated_text.finish_reason = FINISH_REASON[one.finish]
            if row.asked.sampling.do_sample:
                generation.generated_text.seed = row.asked.sampling.seed
        return generation

    def _prefill_tokens(self, row: Row) -> pb.Tokens:
        """The prompt with its logprobs: not a number for the first token and for what came from the cache."""
        ids = array("I")
        ids.frombytes(row.asked.prompt_ids)
        known = row.prompt_logprobs
        logprobs = [float("nan")] * (len(ids) - len(known)) + known
        tokenizer = self._tokenizer()
        return pb.Tokens(ids=ids, logprobs=logprobs, texts=[tokenizer.token_text(token_id) for token_id in ids])

    def _with_texts(self, ids: Sequence[int], logprobs: Sequence[float]) -> pb.Tokens:
        tokenizer = self._tokenizer()
        return pb.Tokens(
            ids=ids,
            logprobs=logprobs,
            texts=[tokenizer.token_text(token_id) for token_id in ids],
            is_special=[tokenizer.is_special(token_id) for token_id in ids],
        )


def _sampling(sent: pb.NextTokenChooserParameters) -> Sampling:
    """TGI samples when any parameter asks for it. A field left out reads as 0, where 0 has no meaning: neutral."""
    temperature, top_p, typical_p = sent.temperature or 1.0, sent.top_p or 1.0, sent.typical_p or 1.0
    return Sampling(
        do_sample=sent.do_sample or temperature != 1.0 or sent.top_k != 0 or top_p < 1.0 or typical_p < 1.0,
        temperature=temperature,
        top_k=sent.top_k,
        top_p=top_p,
        typical_p=typical_p,
        repetition_penalty=sent.repetition_penalty or 1.0,
        frequency_penalty=sent.frequency_penalty,
        watermark=sent.watermark,
        seed=sent.seed,
    )
