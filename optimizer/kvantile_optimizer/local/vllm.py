"""The real engine on this machine: whether it is there, what its processes are given, which GPUs they share out.

vLLM keeps an environment of its own, in which our two packages are found by PYTHONPATH. Folders that hold nothing else
are made for that: the place where ours are installed may hold other versions of what vLLM needs, and would hide them.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvantile_optimizer.errors import InputError, WorkError
from kvantile_optimizer.local import flags
from kvantile_optimizer.local.flags import DEVICES_VARIABLE, Vllm
from kvantile_optimizer.local.supervise import environment
from kvantile_optimizer.spec import Engine

PACKAGES = ("kvantile_optimizer", "kvantile_engine")
CHECK_DEADLINE_S = 60.0
"""Nothing heavy is imported; a cold disk may still take a while."""


@contextmanager
def prepared(python: str, wanted: Engine) -> Iterator[Vllm]:
    """The engine as the spec wants it, ready to be started while the body runs. Blocks for a moment.

    Raises InputError for a variable that cannot be resolved here, and WorkError, which names the flag, where the
    interpreter `python` has no vLLM that would do.
    """
    with tempfile.TemporaryDirectory(prefix="kvantile-packages-") as folder:
        link_packages(Path(folder))
        given = variables(wanted.env, os.environ)
        paths = [folder, given.get("PYTHONPATH") or os.environ.get("PYTHONPATH")]
        devices, order = gpus(os.environ)
        found = Vllm(
            python,
            {**order, **given, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            tuple(wanted.args),
            # Who is only advised is told, and admits as it would.
            keeps=wanted.reservation != "Advisory",
            devices=devices,
        )
        check(found)
        yield found


def link_packages(folder: Path) -> None:
    """Makes `folder` one that holds our packages and nothing else. Raises WorkError where one is not installed."""
    for name in PACKAGES:
        package = find_spec(name)
        if package is None or not package.submodule_search_locations:
            raise WorkError(f"this command needs {name}: install kvantile[local]")
        (folder / name).symlink_to(Path(package.submodule_search_locations[0]).resolve())


def variables(given: Sequence[Mapping[str, Any]], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of `spec.engine.env`; what only a cluster can look up is taken from the variable of that name here.

    Raises InputError where that is not set.
    """
    found: dict[str, str] = {}
    for place, item in enumerate(given):
        name, path = str(item.get("name", "")), f"spec.engine.env[{place}]"
        if not name:
            raise InputError(f"{path}: found no name, allowed the name of a variable")
        if "valueFrom" in item and name not in own:
            raise InputError(f"{path}.valueFrom: there is no cluster to look it up in; set {name} where kvantile runs")
        found[name] = own[name] if "valueFrom" in item else str(item.get("value", ""))
    return found


def gpus(own: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """(GPUs to share out, what CUDA must know to count them the same way): those that are shown to us, else all."""
    if (shown := own.get(DEVICES_VARIABLE)) is not None:
        return tuple(device.strip() for device in shown.split(",") if device.strip()), {}
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=CHECK_DEADLINE_S).stdout  # noqa: S603 - fixed words
    except (OSError, subprocess.SubprocessError):
        return (), {}
    # nvidia-smi counts by place on the bus; CUDA would count the fastest first.
    return tuple(listed.split()), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def check(engine: Vllm) -> None:
    """Raises WorkError, which names the flag, where this vLLM cannot be started with what is asked of it."""
    command, more = flags.check(engine)
    try:
        done = subprocess.run(  # noqa: S603 - our own module, the user's interpreter
            command,
            env={**environment(os.environ), **more},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=CHECK_DEADLINE_S,
            check=False,
        )
    except OSError as error:
        raise WorkError(f"--vllm-python {engine.python}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise WorkError(f"--vllm-python {engine.python}: no answer within {CHECK_DEADLINE_S:.0f} s") from error
    if done.returncode != 0:
        said = "; ".join(done.stdout.strip().splitlines()[-3:])
        raise WorkError(
            f"{engine.python} has no vLLM to run: {said}. Name the interpreter of one that has with --vllm-python"
        )
