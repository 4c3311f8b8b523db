"""Command line and environment -> LauncherArgs, by the table of `args`.

The syntax is click's; the conversions are ours, so that a value means the same in both places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tgi import __version__
from tgi.env import FALSE, TRUE, Kind
from tgi.errors import StartupError
from tgi.launcher.args import FLAGS, Flag, LauncherArgs, Policy

PROGRAM = "text-generation-launcher"


@dataclass(frozen=True, slots=True)
class Parsed:
    """`given` names the fields whose value came from the command line or the environment."""

    args: LauncherArgs
    given: frozenset[str]


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Parsed:
    """Raises click's exceptions: UsageError (exit code 2), and Exit after --help or --version."""
    command = build_command()
    context = command.make_context(PROGRAM, list(argv))
    values: dict[str, Any] = {}
    for flag in FLAGS:
        value = context.params.get(flag.field)
        if value is None or value == ():
            value = _from_environment(flag, environment, context)
        elif flag.is_list:
            value = tuple(item for part in value for item in part)
        if value is not None:
            values[flag.field] = value
    return Parsed(LauncherArgs(**values), frozenset(values))


def build_command() -> click.Command:
    return click.Command(
        PROGRAM,
        params=[
            *(_option(flag) for flag in FLAGS),
            click.Option(["-V", "--version"], is_flag=True, expose_value=False, is_eager=True, callback=_print_version,
                         help="Print the version."),
        ],
        help="Serve a language model: starts the model's shards and the HTTP server in front of them.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )  # fmt: skip


def refuse_unsupported(parsed: Parsed) -> None:
    """Raises StartupError for flags that would change answers or memory in a way that does not exist here."""
    for flag in FLAGS:
        if flag.policy is Policy.REFUSED and _asks_for_something(flag, parsed):
            raise StartupError(f"Invalid argument: {flag.name} is not supported: {flag.note}. Start without it")


def remarks(parsed: Parsed, has_gpu: bool) -> list[str]:
    """One line for each flag that was given and has no, or not quite TGI's, effect."""
    lines: list[str] = []
    for flag in FLAGS:
        if flag.field not in parsed.given or (flag.is_switch and not getattr(parsed.args, flag.field)):
            continue
        if flag.policy is Policy.NOTED:
            lines.append(f"{flag.name}: {flag.note}")
        elif flag.policy is Policy.NO_EFFECT or (flag.policy is Policy.GPU_ONLY and not has_gpu):
            lines.append(f"{flag.name} has no effect: {flag.note}")
    return lines


def convert(flag: Flag, text: str) -> Any:
    """`text` as the value of `flag`. Raises ValueError, whose text completes "Invalid value for …: "."""
    if flag.is_list:
        return tuple(_convert_one(flag, item.strip()) for item in text.split(",") if item.strip())
    return _convert_one(flag, text)


def _convert_one(flag: Flag, text: str) -> Any:
    if flag.kind is Kind.TEXT:
        if flag.choices and text not in flag.choices:
            raise ValueError(f"{text!r} is not one of {', '.join(flag.choices)}")
        return text
    if flag.kind is Kind.BOOL:
        if text.lower() in TRUE | FALSE:
            return text.lower() in TRUE
        raise ValueError(f"{text!r} is neither true nor false")
    try:
        number = int(text) if flag.kind is Kind.INT else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a {'whole ' if flag.kind is Kind.INT else ''}number") from None
    low, high = flag.bounds
    if not math.isfinite(number) or (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{text} is not in the range {low} {'and up' if high is None else f'to {high}'}")
    return number


class _Value(click.ParamType):
    """click's view of one row of the table."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self.name = flag.kind.value

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return convert(self.flag, value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        if self.flag.choices:
            return f"<{'|'.join(self.flag.choices)}>"
        words = {Kind.TEXT: "TEXT", Kind.INT: "N", Kind.FLOAT: "NUMBER", Kind.BOOL: "true|false"}
        return f"<{words[self.flag.kind]}{',…' if self.flag.is_list else ''}>"


def _option(flag: Flag) -> click.Option:
    names = [name for name in (flag.short, flag.name) if name] + [flag.field]
    if flag.is_switch:
        return click.Option(names, is_flag=True, flag_value=True, default=None, type=click.BOOL, help=help_text(flag))
    return click.Option(names, type=_Value(flag), multiple=flag.is_list, default=None, help=help_text(flag))


def help_text(flag: Flag) -> str:
    """Help, default, mirror and policy in one line of text."""
    parts = [flag.help]
    default = default_text(flag)
    if default:
        parts.append(f"[default: {default}]")
    if flag.variable:
        parts.append(f"[env: {flag.variable}]")
    if flag.policy is Policy.REFUSED:
        parts.append(f"Refused: {flag.note}.")
    elif flag.policy is Policy.NO_EFFECT:
        parts.append(f"No effect: {flag.note}.")
    elif flag.policy is Policy.GPU_ONLY:
        parts.append(f"No effect without a GPU: {flag.note}.")
    elif flag.note:
        parts.append(f"Note: {flag.note}.")
    return " ".join(parts)


def default_text(flag: Flag) -> str | None:
    """The default as a reader wants it; None where there is none to speak of."""
    if flag.default_text or flag.is_switch:
        return flag.default_text
    if flag.is_list:
        return ",".join(map(str, flag.default)) or None
    return None if flag.default is None else str(flag.default)


def _from_environment(flag: Flag, environment: Mapping[str, str], context: click.Context) -> Any:
    text = environment.get(flag.variable, "").strip() if flag.variable else ""
    if not text:
        return None
    try:
        return convert(flag, text)
    except ValueError as error:
        raise click.UsageError(
            f"Invalid value in the environment variable {flag.variable}: {error}.", context
        ) from None


def _asks_for_something(flag: Flag, parsed: Parsed) -> bool:
    # `--speculate 0` and `NGROK=false` ask for what is so anyway.
    return flag.field in parsed.given and getattr(parsed.args, flag.field) not in (False, 0, "")


def _print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"{PROGRAM} {__version__}")
        context.exit()
