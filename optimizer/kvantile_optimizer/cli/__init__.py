"""The `kvantile` command: one module per subcommand, imported only when it is called.

Results go to stdout, progress and messages to stderr. Exit codes are `entry`'s.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

import click

from kvantile_optimizer import entry

COMMANDS = {
    "plan": "Solve a ServingPlan file and print the plan.",
    "fit": "Read a trace and write the classes of a ServingPlan.",
    "reserve": "Say what to reserve for recorded output lengths.",
    "validate": "Check a ServingPlan file without a cluster.",
    "simulate": "Replay a trace through a plan in a simulated fleet.",
    "calibrate": "Fit an engine's step time to a recorded run.",
    "up": "Run the whole loop on this machine.",
    "demo": "Replay a real trace against stock and robust reservation, side by side.",
    "report": "Write a plan as one HTML page with plots.",
}


class LazyGroup(click.Group):
    """Finds `kvantile_optimizer.cli.NAME:command` on demand: `kvantile validate` must not wait for the solver."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"{__name__}.{cmd_name}").command
        assert isinstance(command, click.Command)  # noqa: S101 - ours by construction
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("kvantile"), prog_name="kvantile")
def kvantile() -> None:
    """Plans fleets of vLLM replicas with robust KV-cache reservations.

    \b
    Example:
      kvantile plan examples/chat.yaml
    """


def main() -> None:
    """Entry point of `kvantile`."""
    entry.run(kvantile)
