"""`text-generation-router`: flags and their environment mirrors, from one table, to a RouterConfig.

The command line wins over the environment, the environment over the default. Reads the environment through `tgi.env`.
"""

from __future__ import annotations

import inspect
import ipaddress
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from tgi import __version__, env
from tgi.enums import ReasoningParser, ToolCallParser
from tgi.env import Kind
from tgi.errors import StartupError
from tgi.observability.logging import setup_logging
from tgi.router.config import RouterConfig

logger = logging.getLogger(__name__)

ANY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Flag:
    name: str  # of the option, without dashes; upper case with underscores in the environment
    kind: Kind
    default: Any
    help: str
    short: str | None = None
    is_list: bool = False
    no_effect: str | None = None  # why it is accepted though it does nothing here
    refused: str | None = None  # why it cannot be used

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return self.field.upper()


FLAGS: tuple[Flag, ...] = (
    Flag("max-concurrent-requests", Kind.INT, 128, "requests at once; more are answered 429"),
    Flag("max-best-of", Kind.INT, 2, "largest `best_of`"),
    Flag("max-stop-sequences", Kind.INT, 4, "stop strings of one request"),
    Flag("max-top-n-tokens", Kind.INT, 5, "largest `top_n_tokens` and `top_logprobs`"),
    Flag("max-input-tokens", Kind.INT, None, "longest prompt; default: max-total-tokens less one"),
    Flag("max-total-tokens", Kind.INT, None, "longest prompt and answer; default: what the model and the memory allow"),
    Flag("waiting-served-ratio", Kind.FLOAT, 1.2, "waiting by running requests that pause decoding, without chunking"),
    Flag("max-batch-prefill-tokens", Kind.INT, 4096, "tokens of the largest step"),
    Flag("max-batch-total-tokens", Kind.INT, None, "KV tokens of the pool; default: what the memory allows"),
    Flag("host-cache-bytes", Kind.INT, 0, "host memory for cached prefixes that the KV cache gives up; 0: none"),
    Flag("max-waiting-tokens", Kind.INT, 20, "decode steps after which waiting requests go first, without chunking"),
    Flag("queue-timeout", Kind.FLOAT, None, "seconds a request waits to start, then it is answered 429; default: any"),
    Flag("max-batch-size", Kind.INT, None, "rows of a batch; default: max-concurrent-requests"),
    Flag("hostname", Kind.TEXT, ANY_ADDRESS, "address to listen on"),
    Flag("port", Kind.INT, 3000, "port to listen on", short="p"),
    Flag("prometheus-port", Kind.INT, 9000, "", no_effect="metrics are at /metrics of the main port"),
    Flag("master-shard-uds-path", Kind.TEXT, "/tmp/text-generation-server-0", "socket of shard rank 0"),
    Flag("tokenizer-name", Kind.TEXT, "bigscience/bloom", "model id, directory or .gguf file"),
    Flag("tokenizer-config-path", Kind.TEXT, None, "a tokenizer_config.json instead of the model's, chat template too"),
    Flag("chat-template", Kind.TEXT, None, "file with a chat template instead of the model's own, or its text"),
    Flag("tool-call-parser", Kind.TEXT, "auto", f"how the model writes tool calls: {', '.join(ToolCallParser)}"),
    Flag("reasoning-parser", Kind.TEXT, "auto", f"marks around its thinking text: {', '.join(ReasoningParser)}"),
    Flag("revision", Kind.TEXT, None, "revision of the model on the hub"),
    Flag("trust-remote-code", Kind.BOOL, False, "", no_effect="tokenizers run no code of the model"),
    Flag("validation-workers", Kind.INT, 2, "threads that tokenise"),
    Flag("api-key", Kind.TEXT, None, "key that clients must send; prefer the environment, where nobody sees it"),
    Flag("json-output", Kind.BOOL, False, "log as JSON lines"),
    Flag("otlp-endpoint", Kind.TEXT, None, "where to send traces, OTLP over gRPC: http://host:4317; default: nowhere"),
    Flag("otlp-service-name", Kind.TEXT, "text-generation-inference.router", "name of this service in traces"),
    Flag(
        "cors-allow-origin", Kind.TEXT, (), "origin that browsers may call from; repeatable; default: any", is_list=True
    ),
    Flag("ngrok", Kind.BOOL, False, "", refused="there is no ngrok tunnel; run ngrok beside the server"),
    Flag("ngrok-authtoken", Kind.TEXT, None, "", no_effect="there is no ngrok tunnel"),
    Flag("ngrok-edge", Kind.TEXT, None, "", no_effect="there is no ngrok tunnel"),
    Flag("disable-grammar-support", Kind.BOOL, False, "refuse requests with a grammar"),
    Flag("max-client-batch-size", Kind.INT, 4, "prompts of one /v1/completions call"),
    Flag("usage-stats", Kind.TEXT, "on", "", no_effect="no usage statistics are ever sent"),
    Flag("payload-limit", Kind.INT, 2_000_000, "largest request body, bytes"),
    Flag("kserve", Kind.BOOL, False, "serve KServe's routes (/v2/...) too"),
    Flag("max-image-fetch-size", Kind.INT, 1 << 30, "", no_effect="images are not supported yet"),
)

_TYPES = {Kind.TEXT: str, Kind.INT: int, Kind.FLOAT: float, Kind.BOOL: bool}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console command. Exit codes: 0 after a clean stop, 1 with one line saying why not."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name="text-generation-router", help="HTTP server of the model behind a shard's socket.")(_command(_run))
    app(args=None if argv is None else list(argv))


def read_config(given: Mapping[str, Any], environment: Mapping[str, str]) -> RouterConfig:
    """`given`: what stood on the command line, by field; None or missing for the rest.

    Raises StartupError naming the flag.
    """
    values: dict[str, Any] = {}
    chosen: set[str] = set()
    for flag in FLAGS:
        value = given.get(flag.field)
        if flag.is_list and not value:
            value = None
        if value is None and environment.get(flag.variable, "").strip():
            text = environment[flag.variable].strip()
            value = text.replace(",", " ").split() if flag.is_list else env.parse(flag.variable, flag.kind, text)
        if value is not None:
            chosen.add(flag.field)
        values[flag.field] = flag.default if value is None else value
    for flag in FLAGS:
        if flag.refused and values[flag.field]:
            raise StartupError(f"--{flag.name} cannot be used: {flag.refused}")
        if flag.no_effect and flag.field in chosen and values[flag.field] != flag.default:
            logger.warning("--%s has no effect: %s", flag.name, flag.no_effect)
    # Vertex AI says by environment alone what a container serves where; TGI lets that win over --port.
    if env.is_set("AIP_HTTP_PORT", environment):
        values["port"] = env.get("AIP_HTTP_PORT", environment)
    _check(values)
    return RouterConfig(
        tokenizer_name=values["tokenizer_name"],
        revision=values["revision"],
        tokenizer_config_path=values["tokenizer_config_path"],
        chat_template=values["chat_template"],
        tool_call_parser=values["tool_call_parser"],
        reasoning_parser=values["reasoning_parser"],
        master_shard_uds_path=values["master_shard_uds_path"],
        hostname=_address(values["hostname"]),
        port=values["port"],
        max_concurrent_requests=values["max_concurrent_requests"],
        max_best_of=values["max_best_of"],
        max_stop_sequences=values["max_stop_sequences"],
        max_top_n_tokens=values["max_top_n_tokens"],
        max_client_batch_size=values["max_client_batch_size"],
        max_input_tokens=values["max_input_tokens"],
        max_total_tokens=values["max_total_tokens"],
        max_batch_prefill_tokens=values["max_batch_prefill_tokens"],
        max_batch_total_tokens=values["max_batch_total_tokens"],
        max_batch_size=values["max_batch_size"],
        host_cache_bytes=values["host_cache_bytes"],
        waiting_served_ratio=values["waiting_served_ratio"],
        max_waiting_tokens=values["max_waiting_tokens"],
        queue_timeout=values["queue_timeout"],
        validation_workers=values["validation_workers"],
        payload_limit=values["payload_limit"],
        cors_allow_origin=tuple(values["cors_allow_origin"]),
        api_key=values["api_key"],
        json_output=values["json_output"],
        prefix_caching=env.get("PREFIX_CACHING", environment),
        compute_type=env.get("COMPUTE_TYPE", environment) or "gpu+optimized",
        docker_label=env.get("DOCKER_LABEL", environment),
        git_sha=env.get("GIT_SHA", environment),
        disable_grammar_support=values["disable_grammar_support"],
        otlp_endpoint=values["otlp_endpoint"],
        otlp_service_name=values["otlp_service_name"],
        kserve=values["kserve"],
        aip_predict_route=_route("AIP_PREDICT_ROUTE", environment),
        aip_health_route=_route("AIP_HEALTH_ROUTE", environment),
    )


def _check(values: Mapping[str, Any]) -> None:
    """What is wrong whatever the model: TGI's texts."""
    for name in ("validation_workers", "max_batch_size", "max_concurrent_requests", "max_batch_prefill_tokens"):
        if values[name] is not None and values[name] <= 0:
            raise StartupError(f"Argument validation error: `{name}` must be > 0")
    if values["queue_timeout"] is not None and not values["queue_timeout"] >= 0:
        raise StartupError("Argument validation error: `queue_timeout` must be >= 0")
    if not 0 <= values["host_cache_bytes"] < 1 << 64:
        raise StartupError("Argument validation error: `host_cache_bytes` must be >= 0 and < 2^64")
    if not 0 <= values["port"] < 1 << 16:
        raise StartupError(f"Argument validation error: `port` must be >= 0 and < 65536. Given: {values['port']}")
    for name, words in (("tool_call_parser", ToolCallParser), ("reasoning_parser", ReasoningParser)):
        if values[name] not in tuple(words):
            allowed = ", ".join(words)
            raise StartupError(f"Argument validation error: `{name}` must be one of {allowed}. Given: {values[name]}")
    max_input, max_total = values["max_input_tokens"], values["max_total_tokens"]
    if max_input is not None and max_total is not None and max_input >= max_total:
        raise StartupError("Argument validation error: `max_input_tokens` must be < `max_total_tokens`")


def _address(hostname: str) -> str:
    """TGI's rule: containers set HOSTNAME to a name, which is no address to listen on."""
    try:
        ipaddress.ip_address(hostname)
    except ValueError:
        logger.warning("Invalid hostname, defaulting to %s", ANY_ADDRESS)
        return ANY_ADDRESS
    return hostname


def _route(variable: str, environment: Mapping[str, str]) -> str | None:
    route = env.get(variable, environment)
    if route is not None and (not route.startswith("/") or set(route) & set("{}?#")):
        raise StartupError(f"{variable} must be a path that begins with / and has no {{}}, ? or #. Given: {route}")
    return route


def _run(given: Mapping[str, Any]) -> int:
    try:
        environment = env.snapshot()
        json_output = given["json_output"] or env.parse("JSON_OUTPUT", Kind.BOOL, environment.get("JSON_OUTPUT", "no"))
        api_key = given["api_key"] or environment.get("API_KEY")
        setup_logging(
            "router",
            env.get("LOG_LEVEL", environment),
            json_output,
            colorize=env.get("LOG_COLORIZE", environment),
            secrets=[api_key] if api_key else [],
        )
        config = read_config(given, environment)
        # Only now what a request needs is imported: a wrong flag is told at once.
        from tgi.router.main import run

        return run(config)
    except StartupError as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 0


def _command(run: Callable[[Mapping[str, Any]], int]) -> Callable[..., None]:
    """A function with one keyword per flag, as typer wants to see it."""

    def command(**given: Any) -> None:
        if given.pop("version"):
            print(f"text-generation-router {__version__}")
            sys.exit(0)
        sys.exit(run(given))

    parameters = [_parameter("version", bool, False, ("--version", "-V"), "print the version")]
    for flag in FLAGS:
        kind = _TYPES[flag.kind]
        names = (f"--{flag.name}", *([f"-{flag.short}"] if flag.short else []))
        annotation = list[str] | None if flag.is_list else kind | None
        parameters.append(_parameter(flag.field, annotation, None, names, _help(flag)))
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameter(name: str, kind: Any, default: Any, names: tuple[str, ...], text: str) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(*names, help=text, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(flag: Flag) -> str:
    text = flag.refused or flag.no_effect or flag.help
    default = "" if flag.default is None or flag.default == () else f", default: {flag.default}"
    return f"{text} [env: {flag.variable}{default}]"
