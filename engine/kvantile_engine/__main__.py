"""`python -m kvantile_engine`: gets the plug-in to a vLLM, and says what that vLLM will do with it.

`copy` puts our packages where a vLLM's PYTHONPATH can name them, as an init container does for a stock image. `check`
says whether this environment's vLLM will keep reservations. `installed` says whether it is there in a version that the
plug-in runs under, and says so at once: importing vLLM takes long. The last two run in vLLM's environment, so they need
nothing but that.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

import kvantile_engine
import kvantile_optimizer
from kvantile_engine.plugin import versions
from kvantile_engine.plugin.defaults import DefaultsFile
from kvantile_engine.plugin.settings import Settings


def main(arguments: list[str] | None = None) -> int:
    """Says what was found on stdout; 0 when all is well, 1 when not, 2 for wrong settings."""
    parser = argparse.ArgumentParser(prog="python -m kvantile_engine", description="Reservations inside vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="say whether this environment's vLLM will keep reservations")
    commands.add_parser("installed", help="say whether it is there, in a version that is not refused; imports nothing")
    copy = commands.add_parser(
        "copy", help="copy the packages that vLLM needs of ours into a folder for its PYTHONPATH"
    )
    copy.add_argument("folder", type=Path, help="made if absent; what it holds of these packages is replaced")
    given = parser.parse_args(arguments)
    if given.command == "copy":
        return _copy(given.folder)
    try:
        settings = Settings.of(os.environ)
        DefaultsFile(settings.defaults, time.monotonic).load()
    except ValueError as error:
        print(f"settings: {error}", file=sys.stderr)
        return 2
    return _check() if given.command == "check" else _installed(settings)


def _copy(folder: Path) -> int:
    try:
        for package in (kvantile_optimizer, kvantile_engine):
            target = folder / package.__name__
            # A file of another version that is left would be imported.
            if target.exists():
                shutil.rmtree(target)
            shutil.copytree(package.__path__[0], target, ignore=shutil.ignore_patterns("__pycache__"))
    except (OSError, shutil.Error) as error:
        print(f"{folder}: {_reason(error)}", file=sys.stderr)
        return 1
    print(f"PYTHONPATH={folder.resolve()}")
    return 0


def _reason(error: OSError) -> str:
    """In words; copying a tree goes on after a fault and tells all of them, of which the first says enough."""
    return str(error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror)


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
