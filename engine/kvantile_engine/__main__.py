"""`python -m kvantile_engine`: what the vLLM of this environment will do with the plug-in.

`check` says whether it will keep reservations. `installed` says whether it is there in a version that the plug-in runs
under, and says so at once: importing vLLM takes long. Both run in vLLM's environment, so they need nothing but that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from kvantile_engine.plugin import versions
from kvantile_engine.plugin.defaults import DefaultsFile
from kvantile_engine.plugin.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Says what was found on stdout; 0 when all is well, 1 when not, 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog="python -m kvantile_engine", description="Reservations inside vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether this environment's vLLM will keep reservations")
    commands.add_parser("installed", help="say whether it is there, in a version that is not refused; imports nothing")
    wanted = parser.parse_args(arguments).command
    try:
        settings = Settings.of(os.environ)
        DefaultsFile(settings.defaults, time.monotonic).load()
    except ValueError as error:
        print(f"settings: {error}", file=sys.stderr)
        return 2
    return _check() if wanted == "check" else _installed(settings)


def _installed(settings: Settings) -> int:
    version = versions.installed()
    if version is None:
        print("vLLM is not installed")
        return 1
    print(f"vLLM {version}")
    found = versions.version_faults(version)
    for fault in found:
        print(fault)
    return 1 if found and settings.unknown_version == "refuse" else 0


def _check() -> int:
    try:
        found = versions.faults()
    except ImportError as error:
        found = [f"vLLM cannot be imported: {error}"]
    for fault in found:
        print(fault)
    print("reservations will not be kept" if found else "reservations will be kept")
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        print("with one API server, /metrics shows them where PROMETHEUS_MULTIPROC_DIR names an empty folder")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
