"""The command `kvantile-emulator`: one flag for each field of `Settings`.

A value is taken from the flag, else from its `KVANTILE_*` variable, else from the `--config` file (TOML, keys as the
flags are written or with underscores), else it is the default. Wrong ones end with exit code 2, a port in use with 1.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvantile_engine.emulator.settings import Settings
from kvantile_optimizer import entry


def _read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:  # noqa: ARG001
    """Makes the file's values the flags' defaults."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--config") from error
    values = {key.replace("-", "_"): value for key, value in values.items()}
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        allowed = ", ".join(Settings.model_fields)
        raise click.BadParameter(f"{path}: {unknown[0]}: no such setting; allowed are {allowed}", param_hint="--config")
    ctx.default_map = values


def _option(name: str, field: FieldInfo) -> click.Option:
    """The flag of a setting, with its documentation."""
    flag, annotation = f"--{name.replace('_', '-')}", field.annotation
    kind: Any = str
    if annotation is bool:
        flag, kind = f"{flag}/--no-{flag[2:]}", bool
    elif get_origin(annotation) is Literal:
        kind = click.Choice(get_args(annotation))
    elif annotation in (int, float):
        kind = annotation
    elif NoneType not in get_args(annotation) and annotation is not str:
        raise TypeError(f"no flag for {name}")
    return click.Option([flag], type=kind, default=field.default, show_default=True, help=field.description)


class Command(click.Command):
    """A command whose flags are the settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to click
        super().__init__(*args, **kwargs)
        self.params += [_option(name, field) for name, field in Settings.model_fields.items()]


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "KVANTILE"})
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_read_config,
    is_eager=True,
    expose_value=False,
    help="TOML file with any of the settings below.",
)
@click.version_option(package_name="kvantile")
def emulator(**values: object) -> None:
    """Serves an OpenAI-compatible API that behaves like one vLLM replica in time and memory.

    \b
    Examples:
      kvantile-emulator --model meta-llama/Llama-3.1-8B-Instruct --port 8000 --kv-tokens 20000 --speed 10
      kvantile-emulator --gpu H100 --model meta-llama/Llama-3.1-70B-Instruct --tp 4
    """
    from kvantile_engine.emulator.server import run  # here, so that --help does not wait for it

    run(_settings(values))


def _settings(values: dict[str, object]) -> Settings:
    """The settings; with a GPU those that follow from it, unless they were given. Raises UsageError or InputError."""
    settings = _validated(values)
    if settings.gpu is None:
        if settings.tp != 1:
            raise click.UsageError(f"--tp: found {settings.tp} without --gpu, which it is for")
        return settings
    from kvantile_engine.emulator import priors  # here, since it needs more than the emulator

    found = priors.of_hardware(
        settings.gpu, settings.model, settings.tp, settings.max_num_batched_tokens, settings.max_num_seqs
    )
    source = click.get_current_context().get_parameter_source
    assumed = {name: value for name, value in found.items() if source(name) is ParameterSource.DEFAULT}
    return _validated({**values, **assumed})


def _validated(values: dict[str, object]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise click.UsageError("\n".join(map(_complaint, error.errors()))) from error


def _complaint(item: ErrorDetails) -> str:
    where = "".join(f"--{str(part).replace('_', '-')}: " for part in item["loc"][:1])
    found = f" (found {item['input']})" if where else ""
    return f"{where}{item['msg']}{found}"


def main() -> None:
    """Entry point of `kvantile-emulator`."""
    entry.run(emulator)
