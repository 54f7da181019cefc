"""What can go wrong while a request is served, split by what the gateway does next.

`RefusedError` and its children are told to the client in OpenAI's error JSON; the HTTP status, OpenAI's `type` and the
one-word reason of `x-kvantile-reason` are attributes of the class. `ReplicaFailedError` means: try another replica
while no byte has reached the client, and otherwise tell the client.
"""

from __future__ import annotations

from typing import Any

from kvantile_optimizer.errors import KvantileError


class RouterError(KvantileError):
    """Root of the gateway's errors: each can be told to a client."""

    status = 500
    type = "internal_error"
    reason: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, reason: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason or self.reason
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, Any]:
        """The error in OpenAI's shape; `code` is the reason, or the status where there is none."""
        code = self.reason or self.status
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": code}}


class RefusedError(RouterError):
    """The gateway does not serve this request."""


class BadRequestError(RefusedError):
    """The request is wrong; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class UnauthorizedError(RefusedError):
    """No key, or none of those that are allowed."""

    status = 401
    type = "authentication_error"


class UnknownModelError(RefusedError):
    """The plan serves another model."""

    status = 404
    type = "not_found_error"


class UnknownPathError(RefusedError):
    """The path is none that a replica may be asked for."""

    status = 404
    type = "not_found_error"


class TooSlowError(RefusedError):
    """The client does not send the rest of its body."""

    status = 408
    type = "invalid_request_error"


class TooLargeError(RefusedError):
    """The body is longer than `--max-body`."""

    status = 413
    type = "invalid_request_error"


class FullError(RefusedError):
    """Every replica is full and so is the queue (`full`), or the wait in it was too long (`waited`)."""

    status = 429
    type = "rate_limit_error"
    reason = "full"


class NothingReadyError(RefusedError):
    """No replica that could serve the request is ready."""

    status = 503
    type = "service_unavailable_error"
    reason = "unready"


class DeadlinePassedError(RefusedError):
    """The answer would come too late."""

    status = 504
    type = "timeout_error"
    reason = "deadline"


class ReplicaFailedError(RouterError):
    """A replica gave no answer (`unreachable`), broke off (`broken`) or said 502, 503 or 504 (`unavailable`)."""

    status = 502
    type = "upstream_error"

    def __init__(self, message: str, *, reason: str, status: int = 502) -> None:
        super().__init__(message, reason=reason)
        self.status = status
