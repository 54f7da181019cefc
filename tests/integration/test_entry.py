"""How commands begin and end when the streams or the moment are odd: real processes, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ("kvantile", "kvantile-router", "kvantile-emulator")
LIMIT_S = 100.0
"""A plan whose simulator has still to be compiled, beside tests that need both cores, takes half a minute."""
CHAT = Path(__file__).parents[2] / "examples" / "chat.yaml"


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def shell(line: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a bash line; `$@` are the arguments."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line, "bash", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def ending(body: str) -> tuple[int, str]:
    """Exit code and stderr of a command of our own whose function has this body."""
    imports = "import click, os, signal\nfrom kvantile_optimizer import entry\n"
    source = f"{imports}@click.command()\ndef command():\n    {body}\nentry.run(command)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr.lstrip()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_said_in_a_line(name: str) -> None:
    code, _, err = shell('"$@" --help >/dev/full', program(name))
    assert (code, err) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("form", ["json", "yaml", "table"])
def test_a_result_that_cannot_be_written_is_a_failure(form: str) -> None:
    code, _, err = shell('"$@" >/dev/full', program("kvantile"), "plan", str(CHAT), "-o", form)
    assert (code, err) == (1, "error: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("form", ["json", "table"])
def test_a_reader_that_wants_no_more_is_no_failure(form: str) -> None:
    assert shell('"$@" | true', program("kvantile"), "plan", str(CHAT), "-o", form) == (0, "", "")


def test_an_alphabet_without_our_signs_gets_question_marks() -> None:
    code, out, err = shell('PYTHONIOENCODING=ascii "$@"', program("kvantile"), "plan", str(CHAT))
    assert (code, err) == (0, "")
    assert "? l40s" in out


def test_closed_streams_are_as_if_empty() -> None:
    code, _, err = shell('"$@" <&-', program("kvantile"), "validate", "-")
    assert (code, err) == (2, "error: standard input: found nothing, allowed a ServingPlan\n")
    assert shell('"$@" <&- >&-', program("kvantile"), "plan", str(CHAT), "-o", "json") == (0, "", "")
    assert shell('"$@" 2>&-', program("kvantile"), "validate", "/nowhere") == (2, "", "")


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_before_any_server_or_fleet_runs_is_an_orderly_end(number: str) -> None:
    assert ending(f"os.kill(os.getpid(), signal.{number})") == (130, "")


def test_what_the_system_refuses_is_said_with_its_file() -> None:
    assert ending("open('/nowhere')") == (1, "error: /nowhere: No such file or directory\n")


def test_a_package_that_is_not_installed_is_named() -> None:
    code, err = ending("raise ModuleNotFoundError('no httpx', name='httpx')")
    assert (code, err) == (1, "error: this command needs httpx: install kvantile[local]\n")
