"""generate.v4 on the shard's side: protobuf -> Command, Step -> protobuf. Columns are little-endian arrays."""

from __future__ import annotations

import struct

from tgi.proto.v4 import generate_pb2 as pb
from tgi.shard_client.messages import (
    Admit,
    BlockMoves,
    Command,
    Grammar,
    Health,
    Sampling,
    ShardInfo,
    Step,
    Stopping,
    WarmupRequest,
    WarmupResult,
)

WORD = 4  # bytes of a u32


def _u32s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // WORD}I", packed)


def _u64s(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


class Codec:
    """One per stream; keeps nothing."""

    def command(self, message: pb.Command) -> Command:
        return Command(
            seen=message.seen,
            cancel=list(_u64s(message.cancel)),
            grow=self._grow(message.grow) if message.HasField("grow") else [],
            admit=[self._admit(admit) for admit in message.admit],
            moves=self._moves(message.moves) if message.HasField("moves") else BlockMoves(),
        )

    def _moves(self, message: pb.BlockMoves) -> BlockMoves:
        """Raises ValueError on columns whose lengths do not fit."""
        count = len(message.to_host)
        if not len(message.sources) == len(message.targets) == count * WORD:
            raise ValueError("the columns of the block moves do not fit each other")
        return BlockMoves(message.to_host, message.sources, message.targets)

    def _grow(self, message: pb.Grow) -> list[tuple[int, bytes]]:
        grown: list[tuple[int, bytes]] = []
        position = 0
        for handle, count in zip(_u64s(message.handles), _u32s(message.num_blocks), strict=True):
            grown.append((handle, message.blocks[position : position + count * WORD]))
            position += count * WORD
        return grown

    def _admit(self, message: pb.Admit) -> Admit:
        grammar = message.grammar
        return Admit(
            handle=message.handle,
            prompt_ids=message.prompt_ids,
            generated_ids=message.generated_ids,
            cached_len=message.cached_len,
            blocks=message.blocks,
            sampling=self._sampling(message.sampling),
            stopping=Stopping(
                max_new_tokens=message.stopping.max_new_tokens,
                min_new_tokens=message.stopping.min_new_tokens,
                eos_ids=_u32s(message.stopping.eos_ids),
                stop_ids=_u32s(message.stopping.stop_ids),
                ignore_eos=message.stopping.ignore_eos,
            ),
            priority=message.priority,
            top_n=message.top_n,
            prompt_logprobs=message.prompt_logprobs,
            prompt_top_n=message.prompt_top_n,
            adapter_id=message.adapter_id,
            adapter_load=message.adapter_load,
            grammar=(Grammar(grammar.kind, grammar.source, grammar.begins_at) if message.HasField("grammar") else None),
            traceparent=message.traceparent,
        )

    def _sampling(self, message: pb.Sampling) -> Sampling:
        bias = message.logit_bias
        values = struct.unpack(f"<{len(bias.values) // WORD}f", bias.values)
        return Sampling(
            do_sample=message.do_sample,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            typical_p=message.typical_p,
            repetition_penalty=message.repetition_penalty,
            frequency_penalty=message.frequency_penalty,
            presence_penalty=message.presence_penalty,
            watermark=message.watermark,
            seed=message.seed,
            logit_bias=tuple(zip(_u32s(bias.token_ids), values, strict=True)),
            bad_words=tuple(map(_u32s, message.bad_words)),
            raw_logprobs=message.raw_logprobs,
        )

    def step(self, step: Step) -> pb.Step:
        message = pb.Step(
            number=step.number,
            kv_epoch=step.kv_epoch,
            handles=step.handles.tobytes(),
            num_tokens=step.num_tokens,
            token_ids=step.token_ids.tobytes(),
            logprobs=step.logprobs.tobytes(),
            ends=step.ends,
            progress_handles=step.progress_handles.tobytes(),
            computed_len=step.computed_len.tobytes(),
            rows_running=step.rows_running,
            rows_waiting=step.rows_waiting,
            free_rows=step.free_rows,
        )
        timings = step.timings
        message.timings.plan_ns = timings.plan_ns
        message.timings.forward_ns = timings.forward_ns
        message.timings.collect_ns = timings.collect_ns
        message.timings.steps = timings.steps
        message.timings.prefill_tokens = timings.prefill_tokens
        message.timings.decode_tokens = timings.decode_tokens
        for top in step.top_tokens:
            message.top_tokens.add(
                handle=top.handle, index=top.index, token_ids=top.token_ids.tobytes(), logprobs=top.logprobs.tobytes()
            )
        for prompt in step.prompt_logprobs:
            message.prompt_logprobs.add(
                handle=prompt.handle,
                first_position=prompt.first_position,
                logprobs=prompt.logprobs.tobytes(),
                top_ids=prompt.top_ids.tobytes(),
                top_logprobs=prompt.top_logprobs.tobytes(),
            )
        for error in step.errors:
            message.errors.add(handle=error.handle, code=error.code, message=error.message)
        if step.opening is not None:
            message.opening.window = step.opening.window
            message.opening.max_rows = step.opening.max_rows
            message.opening.num_blocks = step.opening.num_blocks
            message.opening.block_size = step.opening.block_size
            message.opening.num_host_blocks = step.opening.num_host_blocks
        return message

    def info(self, info: ShardInfo) -> pb.InfoResponse:
        return pb.InfoResponse(
            model_type=info.model_type,
            dtype=info.dtype,
            device_type=info.device_type,
            attention=info.attention,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
            supports_chunking=info.supports_chunking,
            prefix_caching=info.prefix_caching,
            speculate=info.speculate,
            world_size=info.world_size,
            max_position_embeddings=info.max_position_embeddings,
            prompt_logprobs=info.prompt_logprobs,
        )

    def health(self, health: Health) -> pb.HealthResponse:
        return pb.HealthResponse(
            phase=health.phase,
            step=health.step,
            since_s=health.since_s,
            hung_after_s=health.hung_after_s,
            finished=health.finished,
        )

    def warmup_request(self, message: pb.WarmupRequest) -> WarmupRequest:
        def optional(field: str) -> int | None:
            return getattr(message, field) if message.HasField(field) else None

        return WarmupRequest(
            max_batch_prefill_tokens=message.max_batch_prefill_tokens,
            max_rows=message.max_rows,
            max_input_tokens=optional("max_input_tokens"),
            max_total_tokens=optional("max_total_tokens"),
            max_batch_total_tokens=optional("max_batch_total_tokens"),
            host_cache_bytes=message.host_cache_bytes,
        )

    def warmup_result(self, result: WarmupResult) -> pb.WarmupResponse:
        return pb.WarmupResponse(
            max_input_tokens=result.max_input_tokens,
            max_total_tokens=result.max_total_tokens,
            max_batch_total_tokens=result.max_batch_total_tokens,
            num_blocks=result.num_blocks,
            block_size=result.block_size,
            max_rows=result.max_rows,
        )
