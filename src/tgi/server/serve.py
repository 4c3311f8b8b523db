"""Build the model, the engine and the socket of one rank, then run until signalled."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import grpc
import torch

from tgi import env
from tgi.errors import StartupError
from tgi.model_config import ModelConfig, read_model_config, with_rope_scaling
from tgi.observability.tracing import open_tracer
from tgi.server.attention.select import make_backend
from tgi.server.config import ShardConfig
from tgi.server.distributed.group import Group, make_group
from tgi.server.ending import leave_at_once, tell
from tgi.server.engine.compiling import watch_compilers
from tgi.server.engine.device import Device
from tgi.server.engine.leader import LeaderDevice, follow, gather_followers, join_leader
from tgi.server.engine.liveness import Liveness
from tgi.server.engine.loop import Loop
from tgi.server.engine.out_of_memory import is_out_of_memory
from tgi.server.engine.row_spans import RowSpans
from tgi.server.engine.runner import ModelRunner
from tgi.server.engine.service import Shard
from tgi.server.engine.warmup import WarmUp, free_bytes
from tgi.server.grammar.compiler import Compiler
from tgi.server.grammar.vocabulary import Vocabulary, read_beside
from tgi.server.models.model import CausalLM, RowKeeper
from tgi.server.models.registry import build_model, has_module
from tgi.server.platforms.detect import platform_of
from tgi.server.platforms.platform import Platform
from tgi.server.rpc.interceptors import ErrorInterceptor
from tgi.server.rpc.v3 import DEFAULT_MAX_ROWS, V3Service
from tgi.server.rpc.v4 import FollowerService, V4Service
from tgi.server.weights import allocation
from tgi.server.weights.checkpoint import open_checkpoint
from tgi.server.weights.dummy_checkpoint import DummyCheckpoint
from tgi.server.weights.tracked_checkpoint import TrackedCheckpoint
from tgi.shard_client.finished import FinishedFile
from tgi.shard_client.messages import ShardInfo

if TYPE_CHECKING:
    from tgi.observability.otlp import Tracer
    from tgi.server.engine.faults import Fault, Tamper

log = logging.getLogger(__name__)

UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
RPC_THREADS = 16  # a stream holds one while it lasts; health must always find one
STOP_GRACE_S = 2.0
VOCABULARY_S = 30.0  # the most that a start that has failed waits for the vocabulary
OUT_OF_MEMORY = 75  # exit code (EX_TEMPFAIL): start again with a smaller --budget-scale


def serve(config: ShardConfig) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Raises StartupError with one line for the operator."""
    faults = _faults(config.rank)  # what is wrong or missing is told before a model is loaded
    # Rank 0 alone has rows.
    tracer = open_tracer(config.otlp_endpoint, config.otlp_service_name) if config.rank == 0 else None
    device = torch.device(config.device)
    platform = platform_of(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    threads = env.get("OMP_NUM_THREADS")
    if device.type == "cpu" and threads is None and config.world_size > 1:
        # Ranks share the cores: more threads than cores would spin against each other.
        torch.set_num_threads(max(1, torch.get_num_threads() // config.world_size))
    group = make_group(config.rank, config.world_size, config.master_addr, config.master_port, device)
    try:
        return _serve_rank(config, group, device, platform, faults, tracer)
    finally:
        group.close()
        if tracer is not None:
            tracer.close()


def _serve_rank(
    config: ShardConfig,
    group: Group,
    device: torch.device,
    platform: Platform,
    faults: list[Fault],
    tracer: Tracer | None,
) -> int:
    """The exit code. One rank of several does not come back when something was wrong: leaving the group may wait for
    ranks that are in the midst of a collective, or gone."""
    try:
        model_config = read_model_config(config.model_path)
        if config.rank != 0:
            code = _follow(config, _load(config, model_config, group, device), platform, faults)
        else:
            vocabulary = read_beside(config.model_path, model_config.vocab_size, model_config.eos_ids)
            try:
                runner = _load(config, model_config, group, device)
            except Exception:
                # Its thread runs native code, which must not see the interpreter end.
                wait((vocabulary,), VOCABULARY_S)
                raise
            code = _lead(config, model_config, runner, vocabulary, platform, faults, tracer)
    except Exception as error:
        if config.world_size == 1:
            raise
        code = tell(error)
        if is_out_of_memory(error):
            code = OUT_OF_MEMORY
    if code and config.world_size > 1:
        leave_at_once(code)
    return code


def _load(config: ShardConfig, model_config: ModelConfig, group: Group, device: torch.device) -> ModelRunner:
    started = time.perf_counter()
    log.info("Loading %s (%s, %s)", config.model_id, config.dtype, config.device)
    dtype = getattr(torch, config.dtype)
    if config.load_format == "dummy":
        checkpoint = TrackedCheckpoint(DummyCheckpoint(dtype, device))
    else:
        checkpoint = TrackedCheckpoint(open_checkpoint(config.model_path))
    try:
        plugins = config.model_plugins
        if config.rope is not None:
            if not has_module(model_config, plugins):
                raise StartupError(
                    f"ROPE_SCALING: {model_config.model_type!r} is served through transformers, which scales as the "
                    "model's own config says; leave --rope-scaling out"
                )
            model_config = with_rope_scaling(model_config, *config.rope)
        longest = config.max_total_tokens
        with allocation.apart():
            model = build_model(model_config, checkpoint, dtype, device, group, longest, plugins, config.model_path)
        if has_module(model_config, plugins):
            has_drafts = bool(model_config.raw.get("num_nextn_predict_layers"))
            checkpoint.check_all_read(model_config.num_layers if has_drafts else None)
    finally:
        checkpoint.close()
    shape = model.cache_shape
    backend = make_backend(config.attention, config.block_size, shape.options)
    backend.warmup(shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, device)
    log.info("Loaded %.2f GB of weights in %.1f s", model.weight_bytes / 1e9, time.perf_counter() - started)
    return ModelRunner(model, backend, device, dtype, group, watermark=(config.watermark_gamma, config.watermark_delta))


def _lead(
    config: ShardConfig,
    model_config: ModelConfig,
    runner: ModelRunner,
    vocabulary: Future[Vocabulary],
    platform: Platform,
    faults: list[Fault],
    tracer: Tracer | None,
) -> int:
    config = _as_served(config, runner.model)
    launched_by, tamper = _faulty(runner, faults)
    device = LeaderDevice(runner, gather_followers(runner.group, config.master_addr, runner.device), launched_by)
    liveness = Liveness(config.hung_after)
    watch_compilers(liveness, runner.device.type)
    loop = Loop(liveness)
    info = ShardInfo(
        model_type=model_config.model_type,
        dtype=config.dtype,
        device_type=runner.device.type,
        attention=config.attention,
        block_size=config.block_size,
        vocab_size=runner.model.vocab_size,
        supports_chunking=config.prefill_chunking,
        prefix_caching=config.prefix_caching,
        speculate=0,
        world_size=config.world_size,
        max_position_embeddings=model_config.max_position_embeddings or 0,
        prompt_logprobs=config.prompt_logprobs,
        requires_padding=isinstance(runner.model, RowKeeper) and runner.model.requires_padding,
    )
    warm_up = WarmUp(device, config, platform, model_config.max_position_embeddings)
    spans = None if tracer is None else RowSpans(tracer)
    server, url = _bind(config)
    finished = FinishedFile(_socket(config))
    shard = Shard(info, device, warm_up, loop, liveness, Compiler(vocabulary), spans, tamper, finished.write)
    # Only rank 0 is named: it answers for every id.
    V4Service(shard, [url]).add_to(server)
    V3Service(shard, config.model_path, [url], config.max_batch_size or DEFAULT_MAX_ROWS).add_to(server)
    server.start()
    log.info("Server started at %s", url)
    with _on_signals(loop.stop):
        loop.run()  # this thread loaded the model and owns the device
    server.stop(STOP_GRACE_S).wait()
    if loop.failure is not None:
        log.error("Error: the device failed: %s", loop.failure)
        # Ranks cannot try a step again in halves: the group starts anew with smaller steps.
        return OUT_OF_MEMORY if config.world_size > 1 and is_out_of_memory(loop.failure) else 1
    device.stop()
    finished.remove()
    return 0


def _as_served(config: ShardConfig, model: CausalLM) -> ShardConfig:
    """Without what this model cannot do."""
    if not isinstance(model, RowKeeper):
        return config
    if config.prefix_caching:
        log.info("Prefix caching is off: this model keeps what it has read by request")
    return replace(
        config,
        prefix_caching=False,
        prefill_chunking=config.prefill_chunking and model.can_chunk,
        prompt_logprobs=config.prompt_logprobs and model.scores_prompts,
    )


def _follow(config: ShardConfig, runner: ModelRunner, platform: Platform, faults: list[Fault]) -> int:
    wire = join_leader(runner.group, config.master_addr, runner.device)
    server, url = _bind(config)
    liveness = Liveness(config.hung_after)
    FollowerService(liveness).add_to(server)
    server.start()
    log.info("Rank %d of %d follows at %s", config.rank, config.world_size, url)
    # The leader's stop ends this, not the signal: plans may still be on their way. The launcher kills what does not
    # end.
    with _on_signals(lambda: None):
        follow(runner, wire, free_bytes(platform, runner.device, config), liveness, _faulty(runner, faults)[0])
    server.stop(STOP_GRACE_S).wait()
    return 0


def _faults(rank: int) -> list[Fault]:
    """What a test has asked to break in this process. Raises StartupError."""
    text = env.get("TGI_FAULTS")
    if text is None:
        return []
    from tgi.server.engine.faults import parse_faults

    return [fault for fault in parse_faults(text) if fault.rank == rank]


def _faulty(device: Device, faults: list[Fault]) -> tuple[Device, Tamper | None]:
    """The device, behind its faults if it has any."""
    if not faults:
        return device, None
    from tgi.server.engine.faults import FaultyDevice, Tamper

    tamper = Tamper()
    return FaultyDevice(device, faults, tamper), tamper


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`. Outside of this they end the process: while a model loads there is nothing to
    finish."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _socket(config: ShardConfig) -> Path:
    return Path(f"{config.uds_path}-{config.rank}")


def _bind(config: ShardConfig) -> tuple[grpc.Server, str]:
    path = _socket(config)
    url = f"unix://{path}"
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=RPC_THREADS, thread_name_prefix="rpc"),
        interceptors=[ErrorInterceptor()],
        options=UNLIMITED,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left behind by a process that was killed
        server.add_insecure_port(f"unix:{path}")
    except (RuntimeError, OSError) as error:
        raise StartupError(f"Cannot bind the socket {path}: {error}; choose another --uds-path") from error
    return server, url
