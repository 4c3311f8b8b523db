"""Start the router: shard and tokenizer side by side, warm-up, application, server; and stop it.

Nothing here runs while requests run. The port is taken first, so that a busy one is told at once, and listened on last.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import uvloop
from starlette.types import ASGIApp

from tgi import __version__, hub
from tgi.errors import StartupError, Unavailable
from tgi.observability.metrics import Metrics
from tgi.observability.tracing import open_tracer
from tgi.router.api.metrics import follow
from tgi.router.api.server import Server
from tgi.router.api.services import Services
from tgi.router.api.sse import Pulse
from tgi.router.app import create_app, table
from tgi.router.chat.end_of_turn import end_of_turn
from tgi.router.chat.template import ChatTemplate
from tgi.router.chat.tools import read_tool_template
from tgi.router.config import RouterConfig
from tgi.router.infer import Infer
from tgi.router.scheduling.core import SchedulerConfig
from tgi.router.scheduling.scheduler import Scheduler
from tgi.router.schema.info import Info
from tgi.router.validation.grammar_checker import GrammarChecker
from tgi.router.validation.parameters import Limits
from tgi.router.validation.validator import Validator
from tgi.router.warm_up import caches_prefixes, warm_up, warm_up_again
from tgi.shard_client.client import ShardClient
from tgi.shard_client.messages import ShardInfo, WarmupResult
from tgi.text.pool import EncodePool
from tgi.text.tokenizer import Tokenizer, check_fits, load_tokenizer

if TYPE_CHECKING:
    from tgi.observability.otlp import Tracer

logger = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")

THREAD_SWITCH_S = 0.0002  # a thread that tokenises or scrapes gives the lock back to the event loop this soon
COLLECT_AFTER = 50_000  # objects: streams come and go without cycles, so collections are rare


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT; -> exit code. Raises StartupError."""
    sys.setswitchinterval(THREAD_SWITCH_S)
    listener = bind(config.hostname, config.port)
    try:
        return uvloop.run(_serve(config, listener))
    finally:
        listener.close()


def bind(hostname: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: until then clients are refused. Raises StartupError."""
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((hostname, port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(hostname, port, error) from error
    listener.setblocking(False)
    return listener


async def _serve(config: RouterConfig, listener: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    starting = asyncio.current_task()
    assert starting is not None
    server: Server | None = None

    def stop(number: signal.Signals) -> None:
        """Starting: give up. Serving: let running requests finish. A second SIGINT does not wait for them."""
        if server is None:
            starting.cancel()
        else:
            server.handle_exit(number, None)
            scheduler.stop_waiting()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with assembled(config) as (app, scheduler):
            server = Server(app, on_listening=_settle)
            await server.serve([listener])
    except asyncio.CancelledError:
        logger.info("Stopped while starting")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _cannot_listen(config.hostname, config.port, error) from error
    return 0


@contextlib.asynccontextmanager
async def assembled(config: RouterConfig) -> AsyncIterator[tuple[ASGIApp, Scheduler]]:
    """The application and what schedules behind it, joined to a warm shard. Raises StartupError."""
    tracer = open_tracer(config.otlp_endpoint, config.otlp_service_name)
    client = ShardClient.connect(config.master_shard_uds_path)
    try:
        tokenizer, (shard, warm) = await _together(_load(config), warm_up(client, config))
        check_fits(tokenizer, shard.vocab_size, config.tokenizer_name)
        pool = EncodePool(tokenizer, config.validation_workers)
        grammars = None if config.disable_grammar_support else GrammarChecker(tokenizer)
        validator = Validator(pool, _limits(config, shard, warm), tokenizer.vocab_size, grammars=grammars)

        async def prepare() -> None:
            again = await warm_up_again(client, config, shard)
            total = again.max_total_tokens
            validator.limits = replace(
                validator.limits, max_input_tokens=again.max_input_tokens, max_total_tokens=total
            )
            scheduler.core.limit_lengths(total)

        scheduler = Scheduler(client, tokenizer, _scheduler_config(config, shard, warm), prepare=prepare)
        try:
            await _start(scheduler)
            yield _application(config, shard, warm, tokenizer, pool, validator, scheduler, tracer), scheduler
        finally:
            await scheduler.close()
            pool.close()
            if grammars is not None:
                grammars.close()
    finally:
        await client.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


async def _start(scheduler: Scheduler) -> None:
    try:
        await scheduler.start()
    except Unavailable as error:
        raise StartupError(f"The shard warmed up, but then was lost: {error}") from error


def _settle() -> None:
    """Everything made so far lives as long as the process: collections need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    logger.info("Connected")


async def _together(loading: Coroutine[Any, Any, A], warming: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Both results; the first error of either, with the other one cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            first, second = group.create_task(loading), group.create_task(warming)
    except* (StartupError, Unavailable) as errors:
        error = errors.exceptions[0]
        if isinstance(error, StartupError):
            raise error from None
        raise StartupError(f"The shard was lost while warming up: {error}") from None
    return first.result(), second.result()


async def _load(config: RouterConfig) -> Tokenizer:
    """The tokenizer, beside the event loop: the shard is starting meanwhile."""
    override = Path(config.tokenizer_config_path) if config.tokenizer_config_path else None
    path = hub.locate(config.tokenizer_name, config.revision)
    return await asyncio.to_thread(_load_with_every_end, path, override, config.chat_template)


def _load_with_every_end(path: Path, override: Path | None, chat_template: str | None) -> Tokenizer:
    """As `load_tokenizer`; what ends a turn of the model's chats ends an answer too."""
    tokenizer = load_tokenizer(path, override, chat_template)
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.named_tokens)
    end = end_of_turn(template, tokenizer.special_tokens)
    if end is not None and end not in tokenizer.eos_ids:
        tokenizer.eos_ids = (*tokenizer.eos_ids, end)
    return tokenizer


def _scheduler_config(config: RouterConfig, shard: ShardInfo, warm: WarmupResult) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=warm.num_blocks,
        block_size=warm.block_size,
        prefix_caching=caches_prefixes(config, shard),
        speculate=shard.speculate,
        supports_chunking=shard.supports_chunking,
        waiting_served_ratio=config.waiting_served_ratio,
        max_waiting_tokens=config.max_waiting_tokens,
        max_batch_prefill_tokens=config.max_batch_prefill_tokens,
        queue_timeout_s=config.queue_timeout,
    )


def _limits(config: RouterConfig, shard: ShardInfo, warm: WarmupResult) -> Limits:
    return Limits(
        max_input_tokens=warm.max_input_tokens,
        max_total_tokens=warm.max_total_tokens,
        vocab_size=shard.vocab_size,
        max_best_of=config.max_best_of,
        max_stop_sequences=config.max_stop_sequences,
        max_top_n_tokens=config.max_top_n_tokens,
        prompt_logprobs=shard.prompt_logprobs,
    )


def _application(
    config: RouterConfig,
    shard: ShardInfo,
    warm: WarmupResult,
    tokenizer: Tokenizer,
    pool: EncodePool,
    validator: Validator,
    scheduler: Scheduler,
    tracer: Tracer | None,
) -> ASGIApp:
    limits = validator.limits
    metrics = Metrics(limits.max_input_tokens, limits.max_total_tokens)
    template = ChatTemplate(tokenizer.chat_templates, tokenizer.named_tokens)
    if template.failure is not None:
        logger.warning("Chat is off: %s", template.failure)
    services = Services(
        infer=Infer(scheduler, validator, metrics, config.max_concurrent_requests),
        encoder=pool,
        vocabulary=tokenizer,
        template=template,
        tools=read_tool_template(
            template.source,
            template.uses_tools,
            tokenizer.special_tokens,
            config.tool_call_parser,
            config.reasoning_parser,
        ),
        metrics=metrics,
        pulse=Pulse(config.keep_alive_s, config.stall_s),
        info=_info(config, limits),
        system_fingerprint=f"{__version__}-{config.docker_label or 'native'}",
        compute_type=config.compute_type,
        payload_limit=config.payload_limit,
        # TGI: true unless the hub says that the model does something else; the hub is not asked.
        compat_return_full_text=True,
        refresh_metrics=follow(scheduler.stats, metrics, warm.block_size, warm.num_blocks),
    )
    rows = table(config.kserve, config.aip_predict_route, config.aip_health_route)
    return create_app(services, config.api_key, config.cors_allow_origin, rows, tracer)


def _info(config: RouterConfig, limits: Limits) -> Info:
    return Info(
        model_id=config.tokenizer_name,
        model_sha=_snapshot_sha(hub.locate(config.tokenizer_name, config.revision)),
        model_pipeline_tag=None,
        max_concurrent_requests=config.max_concurrent_requests,
        max_best_of=limits.max_best_of,
        max_stop_sequences=limits.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=config.validation_workers,
        max_client_batch_size=config.max_client_batch_size,
        router="text-generation-router",
        version=__version__,
        sha=config.git_sha,
        docker_label=config.docker_label,
    )


def _snapshot_sha(path: Path) -> str | None:
    """The commit of a model in the hub's cache: its files lie in snapshots/<sha>."""
    is_snapshot = path.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", path.name)
    return path.name if is_snapshot else None


def _cannot_listen(hostname: str, port: int, error: OSError) -> StartupError:
    if error.errno == errno.EADDRINUSE:
        return StartupError(f"Port {port} is in use: stop what listens there, or choose another with --port")
    return StartupError(f"Cannot listen on {hostname}:{port}: {error.strerror}. Check --hostname and --port")
