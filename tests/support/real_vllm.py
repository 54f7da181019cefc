"""Where the real vLLM is that tests and benchmarks drive, and how a process is started in its environment.

It is an environment of its own in a cache folder (`KVANTILE_CACHE`, or `kvantile` in `XDG_CACHE_HOME`), outside the
checkout: it takes 6 GB, and its packages are not those of the tests.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "0.32.0"
MISSING = f"there is no vLLM {NEWEST} in the cache folder"


def cache_folder() -> Path:
    """Where environments are kept."""
    if named := os.environ.get("KVANTILE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvantile"


def python() -> Path | None:
    """The interpreter of vLLM's environment, None where there is none."""
    path = cache_folder() / f"vllm-{NEWEST}" / "bin" / "python"
    return path if path.exists() else None


def environment(**more: str) -> dict[str, str]:
    """The environment variables of a process that runs vLLM with the plug-in: offline, and with our two folders."""
    folders = (ROOT / "engine", ROOT / "optimizer")
    ours = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return {**os.environ, **ours, **more}
