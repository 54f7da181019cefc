"""Makes the environment of the real vLLM: `python -m tests.support.vllm_environment`, or `make vllm`.

One version is whole, in a virtual environment of its own with everything pinned (`requirements/vllm.txt`), since its
server runs in tests. Of others only the package itself is there, each in a folder that goes before the whole one on
PYTHONPATH: enough for their schedulers, which need no model. An environment is made beside its place and
moved there when it is whole, so an interrupted one starts afresh, and a lock keeps a second process waiting.
"""

from __future__ import annotations

import fcntl
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.real_vllm import ALONE, SERVING, alone, cache_folder, serving

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"
SERVING_GB, ALONE_GB = 11, 0.6
"""What one version takes while it is made: the whole one 6 GB in the end, and before that what pip downloads for it."""
PINNED_FOR = "3.11"
FITS = f"import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{PINNED_FOR}')"


def main() -> int:
    """Makes what is missing; 0 when all is there, 1 with what stands in the way."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        print("vLLM for the CPU is pinned for Linux on x86_64", file=sys.stderr)
        return 1
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            _make_all(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    return 0


def _make_all(folder: Path) -> None:
    missing = [version for version in (SERVING, *ALONE) if not _place(version).exists()]
    if not missing:
        return
    free_gb = shutil.disk_usage(folder).free / 1e9
    needed_gb = sum(SERVING_GB if version == SERVING else ALONE_GB for version in missing)
    if free_gb < needed_gb:
        raise OSError(f"{free_gb:.1f} GB are free, {needed_gb:g} are needed; KVANTILE_CACHE names another folder")
    for place, version in enumerate(missing, 1):
        print(f"vLLM {version} ({place} of {len(missing)}), once", file=sys.stderr)
        with _beside(_place(version)) as made:
            _install_whole(made) if version == SERVING else _install_alone(version, made)


def _place(version: str) -> Path:
    return serving() if version == SERVING else alone(version)


def _python() -> str:
    """A Python of the version that the requirements are pinned for. Raises OSError where there is none."""
    for name in (sys.executable, f"python{PINNED_FOR}"):
        # Run, not just looked up: a version manager may have a name on the PATH that starts nothing.
        path = shutil.which(name)
        if path and subprocess.run([path, "-c", FITS], stderr=subprocess.DEVNULL).returncode == 0:
            return path
    raise OSError(
        f"no python{PINNED_FOR} with venv on the PATH, which vLLM is pinned for (the tests run with others too)"
    )


def _install_whole(made: Path) -> None:
    # The place is known only when it is whole, and scripts in it name it: nothing starts vLLM by one.
    subprocess.run([_python(), "-m", "venv", made], check=True)
    _pip(made / "bin" / "python", "--require-hashes", "--requirement", str(REQUIREMENTS / "vllm.txt"))


def _install_alone(version: str, made: Path) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pinned:
        name, digest = ALONE[version].split()
        pinned.write(f"{name}=={version} {digest}\n")
        pinned.flush()
        python = serving() / "bin" / "python"
        _pip(python, "--require-hashes", "--target", str(made), "--requirement", pinned.name)


def _pip(python: Path, *arguments: str) -> None:
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    options = ["--disable-pip-version-check", "--no-input", "--no-compile", *quiet]
    subprocess.run([python, "-m", "pip", "install", "--no-deps", *options, *arguments], check=True)


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    """A folder that becomes `place` if nothing goes wrong."""
    made = place.with_name(f".{place.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    yield made
    made.rename(place)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".vllm.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is making vLLM's environment: waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
