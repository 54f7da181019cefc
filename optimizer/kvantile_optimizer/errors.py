"""What can go wrong, by what the caller does next."""


class KvantileError(Exception):
    """Root of the errors that are told to a person without a traceback."""

    exit_code = 1


class InputError(KvantileError):
    """The input is wrong. Each line says where, what was found and what is allowed."""

    exit_code = 2


class WorkError(KvantileError):
    """The work failed; the message says what to do about it."""


class TimeOverError(WorkError):
    """The time limit came before any result: what runs can stand."""
