"""text-generation-server: serve, download-weights, quantize. Parses, then hands over; torch loads with `serve` only."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from tgi import __version__, hub
from tgi.errors import StartupError
from tgi.observability.logging import setup_logging
from tgi.server.ending import tell

log = logging.getLogger(__name__)

# A thread that waits for the next parallel region spins for some tens of microseconds, then sleeps: inside a step
# regions follow each other faster than that, between steps the core is the router's. Sleeping at once costs 9 ms of a
# decode step (27 instead of 18 at batch 1), spinning for long takes the router's core from it.
SHARD_THREADING = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "0"}
# Three threads share the interpreter; one that computes must give way sooner than the default 5 ms.
SWITCH_INTERVAL_S = 0.0002

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The model server: one process per device.")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"text-generation-server {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", "-V", callback=_version, is_eager=True)] = False,
) -> None:
    """The model server: one process per device."""


@app.command()
def serve(
    model_id: str,
    revision: str | None = None,
    sharded: Annotated[bool, typer.Option("--sharded/--no-sharded")] = False,
    quantize: str | None = None,
    speculate: int | None = None,
    dtype: str | None = None,
    kv_cache_dtype: str | None = None,
    trust_remote_code: bool = False,
    uds_path: str = "/tmp/text-generation-server",
    logger_level: str = "INFO",
    json_output: bool = False,
    otlp_endpoint: str | None = None,
    otlp_service_name: str = "text-generation-inference.server",
    max_input_tokens: int | None = None,
    load_format: Annotated[str, typer.Option(help="auto, or dummy: random weights made on the device")] = "auto",
    hung_after: Annotated[float, typer.Option(help="seconds; least time after which a step counts as hung")] = 30.0,
    budget_scale: Annotated[
        float, typer.Option(help="of the prefill budget: below 1 after running out of memory")
    ] = 1.0,
    model_plugins: Annotated[
        str | None, typer.Option(help="folder of model files of your own, <model_type>.py; they run with your rights")
    ] = None,
) -> None:
    """Serve one rank of a model on a Unix socket."""
    setup_logging("shard", logger_level, json_output)

    def run() -> int:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        from tgi import env

        env.set_defaults(SHARD_THREADING)
        # torch and all that needs it: after the environment above, which its thread pool reads as it loads.
        from tgi.server.platforms.detect import detect
        from tgi.server.resolve import ServeArgs, resolve
        from tgi.server.serve import serve as run_server

        args = ServeArgs(
            model_id=model_id,
            revision=revision,
            sharded=sharded,
            quantize=quantize,
            speculate=speculate,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            trust_remote_code=trust_remote_code,
            uds_path=uds_path,
            otlp_endpoint=otlp_endpoint,
            otlp_service_name=otlp_service_name,
            max_input_tokens=max_input_tokens,
            load_format=load_format,
            hung_after=hung_after,
            budget_scale=budget_scale,
            model_plugins=model_plugins,
        )
        return run_server(resolve(args, hub.locate(model_id, revision), detect()))

    _run(run)


@app.command("download-weights")
def download_weights(
    model_id: str,
    revision: str | None = None,
    extension: str = ".safetensors",
    auto_convert: Annotated[
        bool | None,
        typer.Option(
            "--auto-convert/--no-auto-convert",
            help="convert pickled weights (.bin, .pt) to safetensors; if not given, as --trust-remote-code says",
        ),
    ] = None,
    logger_level: str = "INFO",
    json_output: bool = False,
    trust_remote_code: bool = False,
    merge_lora: Annotated[bool, typer.Option(help="merge an adapter into its base model")] = False,
) -> None:
    """Fetch a model into the hub's cache, and make of its files what can be served."""
    setup_logging("shard", logger_level, json_output)

    def run() -> int:
        from tgi.server.prepare.command import prepare

        if extension != ".safetensors":
            raise StartupError(f"--extension {extension} is not supported: weights are served as safetensors")
        convert = trust_remote_code if auto_convert is None else auto_convert
        log.info("Files are present at %s", prepare(model_id, revision, convert=convert, merge=merge_lora))
        return 0

    _run(run)


@app.command()
def quantize(model_id: str, output_dir: str) -> None:
    """Quantise a model (not there yet)."""
    setup_logging("shard")

    def run() -> int:
        raise StartupError("the quantize command is not supported yet; serve the model unquantised")

    _run(run)


def _run(program: Callable[[], int]) -> None:
    """The exit code, and one line for what went wrong."""
    try:
        code = program()
    except Exception as error:
        code = tell(error)
    raise typer.Exit(code)


def main() -> None:
    app()
