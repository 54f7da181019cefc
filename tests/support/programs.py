"""Programs that a test needs and that no Python package brings, such as redis-server.

On a laptop a missing one skips the test and says what to install; where `CI` is set it fails it, so that a test is
never left out unseen.
"""

from __future__ import annotations

import os
import shutil

import pytest


def need(program: str, debian_package: str) -> str:
    """The path of `program`; skips the calling test without it, or fails it where `CI` is set."""
    found = shutil.which(program)
    if found is None:
        message = f"{program} is missing (on Debian: apt install {debian_package})"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found
