"""What must not be committed: addresses of package registries and paths of one developer's machine.

Registries are everyone's own setting (a mirror, a proxy), so a file that names one breaks somewhere else; a path of
one machine breaks everywhere else. `make lint` runs this as a program, over what git tracks and what it would add.
The patterns are written so that this file does not match itself.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LEAKS = {
    "a package registry": re.compile(
        r"[p]ypi\.(org|python)|[p]ythonhosted\.org|[r]egistry\.(npmjs|yarnpkg)|[c]rates\.io|[p]roxy\.golang"
        r"|--(extra-|default-)?[i]ndex-url|--[f]ind-links"
    ),
    "a path of one machine": re.compile(r"(?<![\w./$}-])/(root|work|opt/wheels|home/\w+|Users/\w+)\b"),
}


def committed_files(root: Path) -> list[Path]:
    """The files under `root` that git tracks or would add."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={root}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def leaks_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, kind and line of everything in `text` that must not be committed."""
    for number, line in enumerate(text.splitlines(), start=1):
        for kind, pattern in LEAKS.items():
            if pattern.search(line):
                yield number, kind, line.strip()[:120]


def leaks(root: Path) -> list[str]:
    """`FILE:LINE: kind: text` for each leak in the text files under `root`."""
    found = []
    for path in committed_files(root):
        content = path.read_bytes()
        if b"\0" not in content:
            text = content.decode("utf-8", errors="replace")
            found += [f"{path.relative_to(root)}:{number}: {kind}: {line}" for number, kind, line in leaks_in(text)]
    return found


if __name__ == "__main__":
    sys.exit("\n".join(leaks(Path.cwd())) or None)
