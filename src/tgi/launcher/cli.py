"""`text-generation-launcher`: parse, choose, check, then hand over to the supervisor.

Exit codes: 0 after a stop that was asked for, 1 with one line `Error: …`, 2 for a command line that cannot be read.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from tgi import env, hub
from tgi.errors import StartupError, TgiError
from tgi.launcher import children, commands
from tgi.launcher.args import PORTS, LauncherArgs, describe
from tgi.launcher.devices import Devices, find_devices
from tgi.launcher.parse import Parsed, parse, refuse_unsupported, remarks
from tgi.launcher.process import Command
from tgi.launcher.resolve import ResolvedArgs, choose_model, resolve, resolve_hostname, validate
from tgi.launcher.runtime_env import describe_runtime
from tgi.launcher.signals import StopAsked, StopSignals
from tgi.launcher.sockets import SocketDirectory, check_port, free_master_port
from tgi.launcher.supervisor import Plan, Supervisor
from tgi.model_config import read_model_config
from tgi.observability.logging import mask, setup_logging

logger = logging.getLogger("tgi.launcher")

KEY_OPTION, KEY_VARIABLE = "--api-key", "API_KEY"


def main(programs: Path | None = None) -> int:
    """The console command. `programs`: where the children's programs lie, for tests."""
    _hide_key_from_process_list()
    return run(sys.argv[1:], env.snapshot(), programs)


def run(argv: Sequence[str], environment: Mapping[str, str], programs: Path | None = None) -> int:
    """Serve until stopped; returns the exit code."""
    try:
        parsed = parse(argv, environment)
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    secrets = [secret for secret in (parsed.args.api_key, parsed.args.ngrok_authtoken) if secret]
    try:
        _launch(parsed, environment, programs, secrets)
    except StopAsked:
        return 0
    except TgiError as error:
        print(f"Error: {mask(str(error), secrets)}", file=sys.stderr)
        return 1
    return 0


def _launch(parsed: Parsed, environment: Mapping[str, str], programs: Path | None, secrets: list[str]) -> None:
    refuse_unsupported(parsed)
    args = _on_port_of_vertex(parsed.args, environment)
    colorize = env.get("LOG_COLORIZE", environment)
    colorize = sys.stdout.isatty() and not args.json_output if colorize is None else colorize
    setup_logging("launcher", env.get("LOG_LEVEL", environment), args.json_output, colorize=colorize, secrets=secrets)
    with StopSignals() as signals:
        if args.show_env:
            logger.info(describe_runtime(environment))
        logger.info(describe(args))
        validate(args)
        check_port(resolve_hostname(args.hostname)[0], args.port)
        devices = find_devices(environment)
        for remark in remarks(parsed, has_gpu=devices.kind != "cpu"):
            logger.info(remark)
        resolved = _resolve(args, environment, devices, programs, signals)
        for note in resolved.notes:
            logger.info(note)
        logger.info(
            "Using attention %s - Prefix caching %s", resolved.attention, "on" if resolved.prefix_caching else "off"
        )
        if resolved.num_shard > 1:
            logger.info("Sharding model on %d processes", resolved.num_shard)
        sockets = SocketDirectory(args.shard_uds_path if "shard_uds_path" in parsed.given else None)
        try:
            Supervisor(_plan(resolved, parsed, sockets, environment, colorize, programs), sockets, signals).run()
        finally:
            sockets.close()


def _on_port_of_vertex(args: LauncherArgs, environment: Mapping[str, str]) -> LauncherArgs:
    """TGI lets this variable win over --port."""
    port = env.get("AIP_HTTP_PORT", environment)
    if port is None:
        return args
    if not PORTS[0] <= port <= PORTS[1]:
        raise StartupError(f"AIP_HTTP_PORT must be a port, {PORTS[0]} to {PORTS[1]}. Given: {port}")
    return dataclasses.replace(args, port=port)


def _resolve(
    args: LauncherArgs,
    environment: Mapping[str, str],
    devices: Devices,
    programs: Path | None,
    signals: StopSignals,
) -> ResolvedArgs:
    model_id = choose_model(args, devices, bundled_installed=hub.bundled_model() is not None)
    if args.model_id is None:
        logger.info("No --model-id given: serving %s", model_id)
    # The hub looks at the environment; these flags stand above it.
    flags = {
        "HUGGINGFACE_HUB_CACHE": args.huggingface_hub_cache,
        "WEIGHTS_CACHE_OVERRIDE": args.weights_cache_override,
    }
    source = env.child_environment({name: value for name, value in flags.items() if value}, environment)
    path = hub.find(model_id, args.revision, source)
    if path is None:
        command = commands.download_command(args, model_id, environment, programs)
        children.download(command, model_id, signals)
        path = hub.locate(model_id, args.revision, source)
    signals.check()
    return resolve(args, model_id, read_model_config(path), environment, devices)


def _plan(
    resolved: ResolvedArgs,
    parsed: Parsed,
    sockets: SocketDirectory,
    environment: Mapping[str, str],
    colorize: bool,
    programs: Path | None,
) -> Plan:
    args = resolved.args
    commands.find_program(commands.SERVER, environment, programs)  # told before anything starts

    def shards(budget_scale: float) -> list[Command]:
        port = args.master_port
        if resolved.num_shard > 1 and "master_port" not in parsed.given:
            port = free_master_port(port)
        return [
            commands.shard_command(resolved, rank, sockets.prefix, port, environment, programs, budget_scale)
            for rank in range(resolved.num_shard)
        ]

    return Plan(
        shards=shards,
        router=commands.router_command(resolved, sockets.path(0), environment, colorize, programs),
        model_id=resolved.model_id,
        num_shard=resolved.num_shard,
        address=_address(args.hostname, args.port),
        needs_key=args.api_key is not None,
        grace_s=args.graceful_termination_timeout,
        health_timeout_s=args.health_timeout,
    )


def _address(hostname: str, port: int) -> str:
    """Where a client on this machine finds the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(hostname, hostname)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _hide_key_from_process_list() -> None:
    """Every user of a machine can read command lines: start again with the key in the environment."""
    arguments, key = take_key(sys.argv[1:])
    if key:
        interpreter = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        os.execve(sys.executable, [*interpreter, *arguments], env.child_environment({KEY_VARIABLE: key}))


def take_key(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """(`argv` without the key, the key). Empty keys and a missing value are left for the parser to refuse."""
    kept: list[str] = []
    key: str | None = None
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument.startswith(KEY_OPTION + "=") and argument != KEY_OPTION + "=":
            key = argument.partition("=")[2]
        elif argument == KEY_OPTION and rest and rest[0]:
            key = rest.pop(0)
        else:
            kept.append(argument)
    return kept, key


if __name__ == "__main__":
    sys.exit(main())
