"""The `kvantile-router` command: flags, else KVANTILE_* variables, else the file of `--config`.

Exit codes: 0 after a signal, 1 when it cannot serve (a port in use), 2 when the input is wrong.
"""

from __future__ import annotations

import json
import logging
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from kvantile_optimizer import entry
from kvantile_optimizer.errors import InputError
from kvantile_optimizer.ranges import FiniteRange
from kvantile_router.files import parse_address, read
from kvantile_router.server import serve
from kvantile_router.settings import Settings

_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
FilePath = click.Path(dir_okay=False, path_type=Path)


class FieldsFormatter(logging.Formatter):
    """One event per line: time, level, message, then what was given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = [f"{name}={value}" for name, value in record.__dict__.items() if name not in _FIELDS]
        return " ".join([super().format(record), *fields])


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
    """Makes the file's keys the flags' defaults, so that flags and variables win over them."""
    if path is None:
        return None
    data = read(path)
    try:
        given = json.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: {error}") from error
    context.default_map = _defaults(context, path, given)
    return path


def _defaults(context: click.Context, path: Path, given: object) -> dict[str, Any]:
    flags = {_flag(item): str(item.name) for item in context.command.params if item.expose_value}
    if not isinstance(given, dict):
        raise InputError(f"{path}: expected an object of flags")
    named = {name.replace("_", "-"): value for name, value in given.items()}
    for name in named:
        if name not in flags:
            raise InputError(f"{path}: {name}: no such setting; allowed are {', '.join(sorted(flags))}")
    return {flags[name]: value for name, value in named.items()}


def _flag(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len).lstrip("-")


@click.command(
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KVANTILE", "show_default": True}
)
@click.version_option(version("kvantile"), prog_name="kvantile-router")
@click.option(
    "--config",
    type=FilePath,
    callback=_read_config,
    is_eager=True,
    expose_value=False,
    help="TOML or JSON (.json) file of these flags, without the dashes in front.",
)
@click.option("--plan", type=FilePath, required=True, help="Plan JSON to route by; followed while it changes.")
@click.option("--replica", "replica", metavar="GROUP=URL", multiple=True, help="A replica of a group; repeatable.")
@click.option("--replicas", type=FilePath, help='JSON file {"replicas": [{"group", "url"}]}; followed as well.')
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, help="Port; 0 takes a free one.")
@click.option("--queue-length", type=click.IntRange(0), default=256, help="Requests of a class that may wait.")
@click.option("--queue-wait", type=FiniteRange(0), help="Longest wait, seconds.  [default: the TTFT target]")
@click.option("--max-body", type=click.IntRange(1), default=33554432, help="Longest request body, bytes.")
@click.option("--deadline", type=FiniteRange(0, min_open=True), help="Seconds for a complete answer.")
@click.option("--api-keys", type=FilePath, help="File of the keys that clients may use, one a line.")
@click.option("--replica-header/--no-replica-header", default=True, help="Whether answers say who gave them.")
@click.option("--speed", type=FiniteRange(0, min_open=True), default=1.0, help="Plan seconds per second.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="Of logs.")
def kvantile_router(log_level: str, **flags: Any) -> None:  # noqa: ANN401 - click's values, checked by Settings
    """Routes OpenAI requests to vLLM replicas by a plan.

    \b
    Example:
      kvantile-router --plan plan.json --replica a100=http://127.0.0.1:8000 --port 8080
    """
    _log_to_stderr(log_level)
    serve(
        Settings(
            plan=flags["plan"],
            replicas=tuple(parse_address(text) for text in flags["replica"]),
            replicas_file=flags["replicas"],
            host=flags["host"],
            port=flags["port"],
            queue_length=flags["queue_length"],
            queue_wait_s=flags["queue_wait"],
            max_body_bytes=flags["max_body"],
            deadline_s=flags["deadline"],
            api_keys=flags["api_keys"],
            replica_header=flags["replica_header"],
            speed=flags["speed"],
        )
    )


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(FieldsFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def main() -> None:
    """Entry point of `kvantile-router`."""
    entry.run(kvantile_router)
