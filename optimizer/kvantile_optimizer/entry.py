"""How every command begins and ends, whatever the world around it does.

Errors become one message and an exit code: 0 done, 1 the work failed, 2 the input was wrong, 130 interrupted (SIGINT
and SIGTERM alike, from the first moment on: later a server or a fleet takes the signals over). Standard streams may be
closed, full or read by nobody. A result is on stdout before the command counts as done, and a reader that wanted no
more of it (`| head -1`) is no failure.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn, TextIO

import click

from kvantile_optimizer.errors import KvantileError

INTERRUPTED = 130


def run(command: click.Command) -> NoReturn:
    """Runs `command` on the process's arguments and exits."""
    _open_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _invoke(command)
        sys.stdout.flush()
        code = 0
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt, EOFError):
        code = INTERRUPTED
    except KvantileError as error:
        code = _told(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        # A part of the dependencies is enough for most commands; one of ours that is missing is a fault.
        if (error.name or "").startswith("kvantile"):
            raise
        code = _told(f"this command needs {error.name}: install kvantile[local]", KvantileError.exit_code)
    except BrokenPipeError:
        code = 0
    except SystemExit as end:
        # rich makes one of a broken pipe.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        code = 0
    except OSError as error:
        code = _told(_said(error), KvantileError.exit_code)
    _drop_unwritten(sys.stdout)
    _drop_unwritten(sys.stderr)
    sys.exit(code)


def _invoke(command: click.Command) -> None:
    """What calling the command does, except that a broken pipe stays one: click itself would exit with 1."""
    name = Path(sys.argv[0]).name
    if re.sub(r"[-.]", "_", f"_{name}_complete").upper() in os.environ:
        command()
    with command.make_context(name, sys.argv[1:]) as context:
        command.invoke(context)


def _told(message: str, code: int) -> int:
    """Prints an error; nobody may be there to read it."""
    with suppress(OSError):
        click.echo(f"error: {message}", err=True)
    return code


def _said(error: OSError) -> str:
    """What the system refused. An error without a file is that of a stream: files are opened by name."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else f"the output cannot be written: {reason}"


def _open_streams() -> None:
    """Stands /dev/null in for closed standard streams: else the next socket or file would get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # The interpreter has set the missing ones to None.
    sys.stdin = sys.stdin or open(0, encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):
        # A terminal of another alphabet gets a question mark for what it lacks.
        sys.stdout.reconfigure(errors="replace")


def _drop_unwritten(stream: TextIO) -> None:
    """What cannot be written now cannot be written by the interpreter's last flush either, which would shout."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
