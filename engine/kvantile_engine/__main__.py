"""`python -m kvantile_engine check`: whether the vLLM of this environment will keep reservations.

It runs in vLLM's environment, so it needs nothing but that.
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
    """Says what was found on stdout; 0 when reservations will be kept, 1 when not, 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog="python -m kvantile_engine", description="Reservations inside vLLM.")
    parser.add_subparsers(dest="command", required=True).add_parser(
        "check", help="say whether this environment's vLLM will keep reservations"
    )
    parser.parse_args(arguments)
    try:
        settings = Settings.of(os.environ)
        DefaultsFile(settings.defaults, time.monotonic).load()
    except ValueError as error:
        print(f"settings: {error}", file=sys.stderr)
        return 2
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
