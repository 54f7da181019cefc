"""How results are printed: a table for people, JSON or YAML for programs, alone on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click
from ruamel.yaml import YAML

Command = TypeVar("Command", bound=Callable[..., Any])

FORMATS = ("table", "json", "yaml")


def output_option(command: Command) -> Command:
    """Adds `-o table|json|yaml` as the parameter `output`."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default="table", show_default=True, help="Form of the result."
    )(command)


def write(data: object, form: str) -> None:
    """Writes JSON data to stdout as `json` or `yaml`."""
    if form == "json":
        json.dump(data, sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None, read as a flag
        yaml.dump(data, sys.stdout)
