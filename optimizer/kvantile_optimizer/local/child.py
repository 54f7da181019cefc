"""Runs one server module as `python -m` would, and ends with the process that started it.

A parent killed by SIGKILL cannot stop its children, so each child watches its standard input: the parent holds the
other end of that pipe and the kernel closes it however the parent dies. That needs no signal, no polling and no help
from the server, and it works beyond Linux, which `PR_SET_PDEATHSIG` does not (and that one fires when the *thread*
that started the child ends).
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from threading import Thread

STDIN = 0


def main() -> None:
    """`python -m kvantile_optimizer.local.child MODULE [ARGUMENT...]`."""
    _, module, *arguments = sys.argv
    Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with_parent() -> None:
    while os.read(STDIN, 4096):
        pass
    # Nobody is left to drain for, and a server may be too busy to heed a gentler signal. What it has started goes too:
    # the supervisor made it the leader of a group.
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
