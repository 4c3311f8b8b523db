"""generate.v4 on the router's side: Command -> protobuf, protobuf -> Step. Columns are little-endian arrays.

The machines that we run on are little-endian, so a column is copied once and never touched value by value.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

from tgi.proto.v4 import generate_pb2 as pb
from tgi.shard_client.messages import (
    Admit,
    Command,
    Health,
    Opening,
    PromptLogprobs,
    RowError,
    Sampling,
    ShardInfo,
    Step,
    Timings,
    TopTokens,
    WarmupRequest,
    WarmupResult,
)

assert sys.byteorder == "little", "the wire's columns are little-endian"

WORD = 4  # bytes of a u32


class Codec:
    """One per connection; keeps nothing."""

    def command(self, command: Command) -> pb.Command:
        message = pb.Command(seen=command.seen, admit=[self._admit(admit) for admit in command.admit])
        if command.cancel:
            message.cancel = array("Q", command.cancel).tobytes()
        if command.grow:
            message.grow.handles = array("Q", [handle for handle, _ in command.grow]).tobytes()
            message.grow.num_blocks = _u32s(len(blocks) // WORD for _, blocks in command.grow)
            message.grow.blocks = b"".join(blocks for _, blocks in command.grow)
        if command.moves:
            message.moves.to_host = command.moves.to_host
            message.moves.sources = command.moves.sources
            message.moves.targets = command.moves.targets
        return message

    def _admit(self, admit: Admit) -> pb.Admit:
        stopping, grammar = admit.stopping, admit.grammar
        return pb.Admit(
            handle=admit.handle,
            prompt_ids=admit.prompt_ids,
            generated_ids=admit.generated_ids,
            cached_len=admit.cached_len,
            blocks=admit.blocks,
            priority=admit.priority,
            sampling=self._sampling(admit.sampling),
            stopping=pb.Stopping(
                max_new_tokens=stopping.max_new_tokens,
                min_new_tokens=stopping.min_new_tokens,
                eos_ids=_u32s(stopping.eos_ids),
                stop_ids=_u32s(stopping.stop_ids),
                ignore_eos=stopping.ignore_eos,
            ),
            top_n=admit.top_n,
            prompt_logprobs=admit.prompt_logprobs,
            prompt_top_n=admit.prompt_top_n,
            adapter_id=admit.adapter_id,
            adapter_load=admit.adapter_load,
            grammar=(
                pb.Grammar(kind=grammar.kind, source=grammar.source, begins_at=grammar.begins_at) if grammar else None
            ),
            traceparent=admit.traceparent,
        )

    def _sampling(self, sampling: Sampling) -> pb.Sampling:
        bias = sampling.logit_bias
        return pb.Sampling(
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            watermark=sampling.watermark,
            seed=sampling.seed,
            logit_bias=(
                pb.LogitBias(
                    token_ids=_u32s(token_id for token_id, _ in bias),
                    values=array("f", [value for _, value in bias]).tobytes(),
                )
                if bias
                else None
            ),
            bad_words=[_u32s(word) for word in sampling.bad_words],
            raw_logprobs=sampling.raw_logprobs,
        )

    def step(self, message: pb.Step) -> Step:
        """Raises ValueError on columns whose lengths do not fit."""
        step = Step(
            number=message.number,
            kv_epoch=message.kv_epoch,
            handles=_column("Q", message.handles),
            num_tokens=message.num_tokens,
            token_ids=_column("I", message.token_ids),
            logprobs=_column("f", message.logprobs),
            ends=message.ends,
            progress_handles=_column("Q", message.progress_handles),
            computed_len=_column("I", message.computed_len),
            rows_running=message.rows_running,
            rows_waiting=message.rows_waiting,
            free_rows=message.free_rows,
            timings=self._timings(message.timings),
        )
        if message.top_tokens:
            step.top_tokens = [
                TopTokens(top.handle, top.index, _column("I", top.token_ids), _column("f", top.logprobs))
                for top in message.top_tokens
            ]
        if message.prompt_logprobs:
            step.prompt_logprobs = [self._prompt_logprobs(entry) for entry in message.prompt_logprobs]
        if message.errors:
            step.errors = [RowError(error.handle, error.code, error.message) for error in message.errors]
        if message.HasField("opening"):
            opening = message.opening
            step.opening = Opening(
                opening.window, opening.max_rows, opening.num_blocks, opening.block_size, opening.num_host_blocks
            )
        _check_columns(step)
        return step

    def _prompt_logprobs(self, entry: pb.PromptLogprobs) -> PromptLogprobs:
        return PromptLogprobs(
            entry.handle,
            entry.first_position,
            _column("f", entry.logprobs),
            _column("I", entry.top_ids),
            _column("f", entry.top_logprobs),
        )

    def _timings(self, timings: pb.Timings) -> Timings:
        return Timings(
            plan_ns=timings.plan_ns,
            forward_ns=timings.forward_ns,
            collect_ns=timings.collect_ns,
            steps=timings.steps,
            prefill_tokens=timings.prefill_tokens,
            decode_tokens=timings.decode_tokens,
        )

    def info(self, message: pb.InfoResponse) -> ShardInfo:
        return ShardInfo(
            model_type=message.model_type,
            dtype=message.dtype,
            device_type=message.device_type,
            attention=message.attention,
            block_size=message.block_size,
            vocab_size=message.vocab_size,
            supports_chunking=message.supports_chunking,
            prefix_caching=message.prefix_caching,
            speculate=message.speculate,
            world_size=message.world_size,
            max_position_embeddings=message.max_position_embeddings,
            prompt_logprobs=message.prompt_logprobs,
        )

    def health(self, message: pb.HealthResponse) -> Health:
        return Health(message.phase, message.step, message.since_s, message.hung_after_s, message.finished)

    def warmup_request(self, request: WarmupRequest) -> pb.WarmupRequest:
        return pb.WarmupRequest(
            max_batch_prefill_tokens=request.max_batch_prefill_tokens,
            max_rows=request.max_rows,
            max_input_tokens=request.max_input_tokens,
            max_total_tokens=request.max_total_tokens,
            max_batch_total_tokens=request.max_batch_total_tokens,
            host_cache_bytes=request.host_cache_bytes,
        )

    def warmup_result(self, message: pb.WarmupResponse) -> WarmupResult:
        return WarmupResult(
            max_input_tokens=message.max_input_tokens,
            max_total_tokens=message.max_total_tokens,
            max_batch_total_tokens=message.max_batch_total_tokens,
            num_blocks=message.num_blocks,
            block_size=message.block_size,
            max_rows=message.max_rows,
        )


def _u32s(values: Iterable[int]) -> bytes:
    return array("I", values).tobytes()


def _column(code: Any, packed: bytes) -> array[Any]:
    column = array(code)
    column.frombytes(packed)
    return column


def _fits(part: PromptLogprobs) -> bool:
    positions, tops = len(part.logprobs), len(part.top_ids)
    return tops == len(part.top_logprobs) and (tops % positions == 0 if positions else tops == 0)


def _check_columns(step: Step) -> None:
    rows = len(step.handles)
    tokens = sum(step.num_tokens) if step.num_tokens else rows
    if (
        len(step.token_ids) != tokens
        or len(step.logprobs) != tokens
        or (step.num_tokens and len(step.num_tokens) != rows)
        or (step.ends and len(step.ends) != rows)
        or len(step.progress_handles) != len(step.computed_len)
        or not all(_fits(part) for part in step.prompt_logprobs)
    ):
        raise ValueError(f"the columns of step {step.number} do not fit each other")
